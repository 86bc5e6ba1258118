"""`kivi demo`: a real language model on quantized caches, what it writes, what it costs and what it saves.

SmolLM2-135M-Instruct (30 layers) continues a page of "Alice's Adventures in Wonderland" with its full-precision cache and with
kivi at 4 and 2 bits, then predicts a stretch of the book token by token through caches of 1 to 8 bits. Everything is measured
in this run on this machine; nothing is a stored figure.
"""

from __future__ import annotations

import itertools
import json as jsonlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kivi.errors import InputError

if TYPE_CHECKING:
    import numpy as np

Progress = Callable[[str, int, int], None]

FULL = "full precision"
PROMPT = (30, 320)  # first token and length: the opening of the book, up to the rabbit-hole
NEW = 48  # tokens to generate
STRETCH = (256, 512)  # first token and prefill of the stretch that is predicted
LAYER = 15  # the layer whose keys, values and attention are plotted: in the middle of 30
ERROR_FROM = 64  # tokens before the first plotted step
BITS = (8, 4, 3, 2, 1)
COMPARED = (4, 2)  # the caches of the table and of the texts


@dataclass(frozen=True)
class Row:
    """One cache of the table. Bytes after the last step of the stretch; `formula` is SPEC's, without padding."""

    name: str
    measured: int
    formula: int
    tokens_per_second: float
    top1: float
    kl: float
    perplexity: float


@dataclass
class DemoResult:
    """Everything that the demo found. `to_dict` is what `--json` prints; `report` is the HTML file, if one was written."""

    model: str
    text: str
    backend: dict[str, Any]
    reason: str
    rejected: list[dict[str, str]]
    prompt: str
    continuations: dict[str, str]
    rows: list[Row]
    bits: dict[str, dict[str, float]]  # bits, or "full precision" -> perplexity, top1, kl
    attention_error: dict[str, list[float]]  # bits -> relative error of each step
    axis_error: dict[str, float]
    long_context: dict[str, Any]
    steps: int
    seconds: float = 0.0
    report: str | None = None
    plots: dict[str, np.ndarray] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: all but the arrays behind the plots."""
        out = asdict(self)
        del out["plots"]
        return out


def run(
    backend: str = "auto", *, out: Path | str | None = None, steps: int = 96, json: bool = False, progress: Progress | None = None
) -> DemoResult:
    """Run the demo, print it unless `json`, and write `report.html` and `demo.json` into the folder `out` if one is given.

    steps: tokens to predict, 2 to 4096; each is one pass through the stored cache, and there are six caches. progress: called
    with a stage's name, steps done and steps in all.

    Raises `IntegrationError` when the model or a package is missing, and what `kivi.select` and `kivi.get_backend` raise.
    """
    from kivi.demo import model as weights

    weights.require("jinja2", "matplotlib")
    if not 2 <= steps <= 4096:
        raise InputError(f"steps = {steps}: the demo predicts 2 to 4096 tokens")
    started = time.perf_counter()
    tick = _counter(progress, "load the model (the first time it is converted)", 1)
    model, tokenizer = weights.load()
    tick()
    result = _measure(model, tokenizer, backend, steps, progress)
    result.seconds = time.perf_counter() - started
    if out is not None:
        from kivi.demo.report import render

        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        result.report = str(folder / "report.html")
        (folder / "report.html").write_text(render(result), "utf-8")
        (folder / "demo.json").write_text(jsonlib.dumps(result.to_dict(), indent=2), "utf-8")
    if not json:
        from kivi.demo.terminal import show

        show(result)
    return result


def _measure(model: Any, tokenizer: Any, backend: str, steps: int, progress: Progress | None) -> DemoResult:
    import torch
    from transformers import DynamicCache

    import kivi
    from kivi.demo import measure, text
    from kivi.integrations.transformers import KiviCache, register

    config = model.config
    tokens = STRETCH[1] + steps
    chosen, reason, rejected = _choose(backend, config, tokens)
    specs = {bits: kivi.load_spec("kivi-2bit").override({"key.bits": bits, "value.bits": bits}) for bits in BITS}
    register()
    model.set_attn_implementation("kivi")

    def cache_of(bits: int | None) -> Any:
        return DynamicCache(config=config) if bits is None else KiviCache(specs[bits], config, backend=chosen)

    prompt = text.alice_ids(tokenizer, *PROMPT)
    written = {}
    for bits in (None, *COMPARED):
        tick = _counter(progress, f"write a text, {_name(bits)}", NEW)
        written[bits] = measure.continuation(model, tokenizer, prompt, cache_of(bits), NEW, tick)

    ids = text.alice_ids(tokenizer, STRETCH[0], tokens)
    scores, sizes, full = {}, {}, None
    for bits in (None, *BITS):
        cache = cache_of(bits)
        tick = _counter(progress, f"predict {steps} tokens, {_name(bits)}", steps)
        log_probs = measure.predictions(model, ids, STRETCH[1], cache, tick)
        full = log_probs if full is None else full
        scores[bits] = measure.score(log_probs, full, ids[0, STRETCH[1] :])
        sizes[bits] = _sizes(cache)

    q, k, v = measure.record(model, ids, LAYER)
    errors = {}
    for bits in BITS[:-1]:
        tick = _counter(progress, f"attention error, {bits} bits", tokens - ERROR_FROM)
        errors[bits] = measure.attention_error(specs[bits], chosen, q, k, v, ERROR_FROM, tick)
    group = specs[2].key.group
    whole = tokens // group * group
    axis = measure.axis_errors(q[:, :, :whole], k[:, :, :whole], v[:, :, :whole], 2, group)

    return DemoResult(
        model="SmolLM2-135M-Instruct (Q4_1 weights, computed in float32)",
        text=f'"Alice\'s Adventures in Wonderland", tokens {STRETCH[0]} to {STRETCH[0] + tokens}, the first {STRETCH[1]} as prefill',
        backend={"name": chosen.name, "mode": chosen.mode, "device": chosen.device, "summary": chosen.manifest.summary},
        reason=reason,
        rejected=rejected,
        prompt=tokenizer.decode(prompt[0]),
        continuations={_name(bits): w.text for bits, w in written.items()},
        rows=[_row(bits, sizes[bits], written[bits].tokens_per_second, scores[bits]) for bits in (None, *COMPARED)],
        bits={FULL if bits is None else str(bits): asdict(s) for bits, s in scores.items()},
        attention_error={str(bits): e.tolist() for bits, e in errors.items()},
        axis_error=axis,
        long_context=_long_context(specs, config),
        steps=steps,
        plots={"keys": torch.abs(k[0]).numpy(), "values": torch.abs(v[0]).numpy()},
    )


def _row(bits: int | None, sizes: tuple[int, int], tokens_per_second: float, score: Any) -> Row:
    return Row(_name(bits), sizes[0], sizes[1], tokens_per_second, score.top1, score.kl, score.perplexity)


def _name(bits: int | None) -> str:
    return FULL if bits is None else f"kivi {bits} bits" if bits > 1 else "kivi 1 bit"


def _choose(backend: str, config: Any, tokens: int) -> tuple[Any, str, list[dict[str, str]]]:
    """The backend of the demo, why, and what was rejected and why."""
    import kivi

    if backend != "auto":
        return kivi.get_backend(backend), f"asked for by name: {backend}", []
    selection = kivi.select(
        "kivi-2bit",
        device="cpu",  # where the model runs
        head_dim=config.head_dim,
        q_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dtype="float32",
        tokens=tokens,
    )
    return selection.backend, selection.reason, [asdict(r) for r in selection.rejected]


def _sizes(cache: Any) -> tuple[int, int]:
    """(measured, formula) bytes of a cache. A full-precision one holds its tensors and nothing else."""
    if hasattr(cache, "memory"):
        report = cache.memory()
        return report["measured"], report["formula"]
    held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    return held, held


def _long_context(specs: dict[int, Any], config: Any) -> dict[str, Any]:
    """Formula bytes of the whole model at its full context, where the floating window no longer dominates."""
    from kivi import memory

    layers, heads, dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    tokens = config.max_position_embeddings
    sizes = {str(b): int(layers * memory.formula_of_length(specs[b], "float16", heads, dim, dim, tokens)) for b in COMPARED}
    return {"tokens": tokens, "dtype": "float16", FULL: layers * memory.full_precision("float16", heads, dim, dim, tokens), **sizes}


def _counter(progress: Progress | None, stage: str, total: int) -> Callable[[], None]:
    """A function that reports one more step of a stage; the stage is announced at once."""
    count = itertools.count()

    def tick() -> None:
        if progress is not None:
            progress(stage, min(next(count), total), total)

    tick()
    return tick
