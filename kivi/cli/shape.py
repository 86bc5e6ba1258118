"""The options that name a spec and a shape, shared by `kivi select` and `kivi tune`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

POSITIVE = click.IntRange(min=1)


def shape_options(command: Any) -> Any:
    """`--preset --device --head-dim --value-head-dim --q-heads --kv-heads --dtype --batch --tokens`, by the names of `kivi.select`."""
    options: list[Callable[[Any], Any]] = [
        click.option(
            "--preset", "spec", default="kivi-2bit", show_default=True, metavar="SPEC", help="A preset or the path of a TOML file."
        ),
        click.option("--device", default="auto", show_default=True, help="auto, a kind such as cuda, or a device such as cuda:1."),
        click.option("--head-dim", type=POSITIVE, default=128, show_default=True, help="Channels of a key head."),
        click.option("--value-head-dim", type=POSITIVE, help="Channels of a value head.  [default: head-dim]"),
        click.option("--q-heads", type=POSITIVE, default=32, show_default=True, help="Query heads of a layer."),
        click.option("--kv-heads", type=POSITIVE, default=8, show_default=True, help="KV heads of a layer."),
        click.option("--dtype", type=click.Choice(["float16", "bfloat16", "float32"]), default="float16", show_default=True),
        click.option("--batch", type=POSITIVE, default=1, show_default=True, help="Requests."),
        click.option("--tokens", type=POSITIVE, default=32768, show_default=True, help="Tokens of each request."),
    ]
    for option in reversed(options):
        command = option(command)
    return command
