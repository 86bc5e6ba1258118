"""`kivi bench`: measure a backend beside its peers (see `kivi.bench`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kivi.cli.output import json_option, print_json, progress


class Numbers(click.ParamType):
    """One or more positive numbers separated by commas."""

    name = "n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} is not a list of positive numbers such as 1,2", param, ctx)
        return tuple(int(part) for part in parts)


NUMBERS = Numbers()


@click.command()
@click.option(
    "--suite",
    "suites",
    multiple=True,
    metavar="NAME",
    help="attention, step, overhead, generate or peak. May be repeated.  [default: all but peak]",
)
@click.option("--full", is_flag=True, help="All suites on the whole grid, which takes more than an hour.")
@click.option(
    "--spec", "specs", multiple=True, metavar="SPEC", help="A preset or a TOML file. May be repeated.  [default: kivi-2bit, kivi-4bit]"
)
@click.option("--backend", default="auto", show_default=True, help="The backend to measure; see `kivi backends`.")
@click.option("--mode", help="Its mode.  [default: its first one that can run]")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True, help="Of q, k and v.")
@click.option("--threads", type=NUMBERS, default="1", show_default=True, help="Threads, e.g. 1,2: everything is measured with each.")
@click.option("--tokens", type=NUMBERS, help="Lengths for attention and step, instead of the selection.")
@click.option("--head-dim", type=NUMBERS, help="Head dimensions, likewise.")
@click.option("--group", type=NUMBERS, help="Query heads of a KV head, likewise.")
@click.option("--batch", type=NUMBERS, help="Requests, likewise.")
@click.option("--context", type=NUMBERS, help="Tokens before the first generated one.  [default: 512; --full: 1024,4032]")
@click.option("--new", type=click.IntRange(32), default=128, show_default=True, help="Tokens to generate.")
@click.option("--peak-context", type=click.IntRange(64), default=8064, show_default=True, help="Tokens before the first one, suite peak.")
@click.option("--prefill-chunk", type=click.IntRange(1), default=512, show_default=True, help="Tokens that a model reads at a time.")
@click.option(
    "--model-cache",
    "models",
    multiple=True,
    metavar="NAME",
    help="Contenders of generate and peak, e.g. DynamicCache. May be repeated.  [default: all]",
)
@click.option("--budget", type=click.FloatRange(0), help="Seconds of rounds for a shape of attention.  [default: 2; --full: 4]")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER", help="Write bench.json and plots there.")
@json_option
def bench(
    suites: tuple[str, ...],
    full: bool,
    specs: tuple[str, ...],
    backend: str,
    mode: str | None,
    dtype: str,
    threads: tuple[int, ...],
    tokens: tuple[int, ...] | None,
    head_dim: tuple[int, ...] | None,
    group: tuple[int, ...] | None,
    batch: tuple[int, ...] | None,
    context: tuple[int, ...] | None,
    new: int,
    peak_context: int,
    prefill_chunk: int,
    models: tuple[str, ...],
    budget: float | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """How fast a backend is on this machine, beside torch, transformers and llama.cpp.

    Contenders take turns in one run; figures are medians. The default takes about two minutes.
    """
    from dataclasses import replace

    import kivi
    from kivi.bench import plan as plans
    from kivi.bench import run, write, write_json

    loaded = tuple(kivi.load_spec(name) for name in specs or ("kivi-2bit", "kivi-4bit"))
    if backend == "auto":
        chosen = kivi.select(loaded[0], mode=mode, device="cpu", dtype=dtype).backend
    else:
        chosen = kivi.get_backend(backend, mode=mode)
    plan = (plans.full if full else plans.quick)(loaded, chosen)

    def shapes(selected: tuple[Any, ...]) -> tuple[Any, ...]:
        """The selection, its axes replaced by those that were named."""
        found = {name: tuple(dict.fromkeys(getattr(s, name) for s in selected)) for name in ("tokens", "head_dim", "batch")}
        groups = tuple(dict.fromkeys(s.q_heads // s.kv_heads for s in selected))
        return plans.grid(tokens or found["tokens"], head_dim or found["head_dim"], group or groups, batch or found["batch"])

    plan = replace(
        plan,
        suites=suites or plan.suites,
        dtype=dtype,
        threads=threads,
        shapes=shapes(plan.shapes),
        steps=shapes(plan.steps),
        contexts=context or plan.contexts,
        new=new,
        peak_context=peak_context,
        prefill_chunk=prefill_chunk,
        models=models,
        budget=plan.budget if budget is None else budget,
    )
    with progress() as bar:
        tasks: dict[str, Any] = {}

        def advance(suite: str, done: int, total: int) -> None:
            if suite not in tasks:
                tasks[suite] = bar.add_task(suite, total=total)
            bar.update(tasks[suite], completed=done)

        result = run(plan, advance, (lambda partial: write_json(partial, out)) if out else (lambda partial: None))
    files = write(result, out) if out else []
    if as_json:
        print_json(result.to_dict())
        return
    from kivi.bench.terminal import show

    show(result)
    for path in files:
        click.echo(f"wrote {path}")
