"""`kivi tune`: measure the backends at a shape, so that selection can rank them by speed there."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from kivi.cli.output import json_option, print_json, print_table
from kivi.cli.shape import shape_options


@click.command()
@shape_options
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Turns of each backend; the median counts.")
@json_option
def tune(as_json: bool, **request: Any) -> None:
    """Measure a decode step on every backend that can serve this shape.

    The ranking is kept for shapes of the same bucket: tokens and batch up to the next power of two, the rest exactly. It holds for this
    device, driver and these versions; another one needs another run.
    """
    from kivi.tuning import tune as measure

    bucket, record, rejected = measure(**request, progress=lambda what: click.echo(what, err=True))
    if as_json:
        measured = [{k: v for k, v in asdict(m).items() if k != "identity"} for m in record.measured]
        left = [asdict(r) for r in rejected]
        print_json({"bucket": asdict(bucket), "tokens": record.tokens, "spec": record.spec, "measured": measured, "rejected": left})
        return
    best = record.measured[0].seconds
    print_table(
        ("backend", "mode", "device", "ms a step", "of the best", "rounds"),
        ((m.backend, m.mode, m.device, f"{m.seconds * 1e3:.3g}", f"{m.seconds / best:.2f}", m.rounds) for m in record.measured),
        right=("ms a step", "of the best", "rounds"),
    )
    for r in rejected:
        click.echo(f"{r.name} was not measured ({r.state}): {r.reason}")
    click.echo(f"kept for {bucket}")
