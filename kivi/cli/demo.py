"""`kivi demo`: a real model on quantized caches (see `kivi.demo`)."""

from __future__ import annotations

from pathlib import Path

import click

from kivi.cli.output import json_option, print_json, progress


@click.command()
@click.option("--backend", default="auto", show_default=True, help="The backend that stores the caches.")
@click.option("--steps", type=click.IntRange(2, 4096), default=96, show_default=True, help="Tokens to predict through each cache.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER", help="Write report.html and demo.json there.")
@json_option
def demo(backend: str, steps: int, out: Path | None, as_json: bool) -> None:
    """A real model on quantized caches.

    SmolLM2-135M with its full-precision cache and with kivi at 4 and 2 bits: texts, bytes, tokens/s, agreement, perplexity.
    """
    from kivi.demo import run

    with progress() as bar:
        tasks = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        result = run(backend, out=out, steps=steps, json=True, progress=advance)
    if as_json:
        print_json(result.to_dict())
    else:
        from kivi.demo.terminal import show

        show(result)
