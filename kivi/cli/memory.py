"""`kivi memory`: what a cache takes, by the formula and measured.

The measured figure comes from one layer that is really allocated and filled with random keys and values, multiplied by the
number of layers, which are all alike. Filling a cache costs attention over all its tokens, so a size beyond `WORK_LIMIT` or
`BYTES_LIMIT` is not measured, and the answer says so; the formula holds for every size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kivi.cli.output import json_option, print_json, print_table, progress, size

if TYPE_CHECKING:
    from kivi.spec import CacheSpec

WORK_LIMIT = 1e11  # floating-point operations of the attention that fills the cache: 40 s on one core with the reference backend
BYTES_LIMIT = 1 << 31  # keys and values of one layer in full precision
SCORES = 1 << 23  # scores that one chunk may produce: 64 MiB in float64


@click.command()
@click.option("--preset", "source", default="kivi-2bit", show_default=True, metavar="SPEC", help="A preset or the path of a TOML file.")
@click.option("--tokens", type=click.IntRange(min=1), required=True, help="Tokens of each request.")
@click.option("--head-dim", type=click.IntRange(min=1), required=True, help="Channels of a key head.")
@click.option("--value-head-dim", type=click.IntRange(min=1), help="Channels of a value head.  [default: head-dim]")
@click.option("--kv-heads", type=click.IntRange(min=1), default=1, show_default=True, help="KV heads of a layer, not query heads.")
@click.option("--layers", type=click.IntRange(min=1), default=1, show_default=True, help="Layers of the model.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Requests.")
@click.option("--dtype", type=click.Choice(["float16", "bfloat16", "float32"]), default="float16", show_default=True, help="Of the model.")
@click.option("--backend", default="auto", show_default=True, help="The backend that measures.")
@click.option("--no-measure", is_flag=True, help="The formula only.")
@json_option
def memory(source: str, no_measure: bool, backend: str, as_json: bool, **geometry: Any) -> None:
    """Bytes of a cache, by the formula and measured.

    What is allocated beyond the formula is listed by kind.
    """
    from kivi.spec import load_spec

    spec = load_spec(source)
    geometry["value_head_dim"] = geometry["value_head_dim"] or geometry["head_dim"]
    reason = "not asked for (--no-measure)" if no_measure else _too_large(**geometry)
    figures = _formula(spec, **geometry) | (_unmeasured(reason) if reason else _measured(spec, backend, **geometry))
    answer = {"spec": spec.name, "hash": spec.hash, **geometry, **figures}
    if as_json:
        print_json(answer)
    else:
        _print(answer)


def _formula(
    spec: CacheSpec, *, tokens: int, head_dim: int, value_head_dim: int, kv_heads: int, layers: int, batch: int, dtype: str
) -> dict[str, Any]:
    from kivi.memory import formula_of_length, full_precision, whole

    each = layers * batch
    quantized = each * formula_of_length(spec, dtype, kv_heads, head_dim, value_head_dim, tokens)
    full = each * full_precision(dtype, kv_heads, head_dim, value_head_dim, tokens)
    elements = each * kv_heads * tokens * (head_dim + value_head_dim)
    return {
        "formula": whole(quantized),
        "full_precision": full,
        "ratio": round(float(full / quantized), 4),
        "bits_per_element": round(float(8 * quantized / elements), 4),
    }


def _too_large(*, tokens: int, head_dim: int, value_head_dim: int, kv_heads: int, batch: int, **_: Any) -> str:
    """Why a cache of this size is not measured; empty if it is."""
    stored = tokens * (head_dim + value_head_dim) * kv_heads * batch
    bytes_, work = 4 * stored, 2.0 * tokens * stored
    if bytes_ > BYTES_LIMIT:
        return f"keys and values of one layer would take {size(bytes_)} in float32, more than the {size(BYTES_LIMIT)} allowed"
    if work > WORK_LIMIT:
        return f"filling one layer takes {work:.1e} floating-point operations of attention, more than the {WORK_LIMIT:.0e} allowed"
    return ""


def _unmeasured(reason: str) -> dict[str, Any]:
    return {"measured": None, "padding": None, "padding_total": None, "by_kind": None, "measured_layers": 0, "reason": reason}


def _measured(
    spec: CacheSpec, backend: str, *, tokens: int, head_dim: int, value_head_dim: int, kv_heads: int, layers: int, batch: int, dtype: str
) -> dict[str, Any]:
    """Figures of one filled layer, times `layers`."""
    import numpy as np

    import kivi
    from kivi.dtypes import np_dtype

    cache = kivi.KVCache(
        spec,
        batch=batch,
        q_heads=kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        dtype=dtype,
        backend=backend,
    )
    rng = np.random.default_rng(0)
    chunk = max(spec.key.residual, SCORES // (batch * kv_heads * tokens))
    with progress() as bar:
        task = bar.add_task("filling one layer", total=tokens)
        for start in range(0, tokens, chunk):
            n = min(chunk, tokens - start)
            q, k, v = (rng.standard_normal((batch, kv_heads, n, d)).astype(np_dtype(dtype)) for d in (head_dim, head_dim, value_head_dim))
            cache.attend(q, k, v)
            bar.advance(task, n)
    one = cache.memory()
    padding = {kind: layers * count for kind, count in one["padding"].items()}
    return {
        "measured": layers * one["measured"],
        "padding": padding,
        "padding_total": sum(padding.values()),
        "by_kind": {kind: layers * count for kind, count in one["by_kind"].items()},
        "measured_layers": 1,
        "reason": f"one layer was filled on backend {cache.ran.backend!r} ({cache.ran.mode}) and its bytes multiplied by {layers}",
    }


def _print(answer: dict[str, Any]) -> None:
    def row(name: str, count: float | None) -> tuple[str, str, str]:
        return (name, "-", "-") if count is None else (name, f"{count:,}", size(int(count)))

    rows = [row("full precision", answer["full_precision"]), row("formula", answer["formula"]), row("measured", answer["measured"])]
    if answer["measured"] is not None:
        rows += [row(f"  padding: {kind.replace('_', ' ')}", count) for kind, count in answer["padding"].items() if count]
        rows.append(row("measured - padding", answer["measured"] - answer["padding_total"]))
    title = (
        f"{answer['spec']}: {answer['batch']} x {answer['tokens']} tokens, {answer['layers']} layers, {answer['kv_heads']} KV heads, "
        f"head_dim {answer['head_dim']}, {answer['dtype']}"
    )
    click.echo(title)
    print_table(("", "bytes", ""), rows, right=("bytes",))
    click.echo(f"full precision / formula = {answer['ratio']:.2f}, {answer['bits_per_element']:.2f} bits an element")
    click.echo(f"{'not measured' if answer['measured'] is None else 'measured'}: {answer['reason']}")
