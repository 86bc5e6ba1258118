"""`kivi backends`: which backends are installed, and which of them can run here."""

from __future__ import annotations

import click
from rich.text import Text

from kivi.cli.output import json_option, print_json, print_table


@click.command()
@json_option
def backends(as_json: bool) -> None:
    """List the backends, and whether each can run here.

    A backend that cannot run says what it lacks.
    """
    import kivi

    found = kivi.backends()
    if as_json:
        print_json([{name: getattr(info, name) for name in ("name", "available", "mode", "devices", "reason")} for info in found])
        return
    print_table(
        ("backend", "available", "mode", "devices", "reason"),
        (
            (info.name, Text("yes", "green") if info.available else Text("no", "red"), info.mode, ", ".join(info.devices), info.reason)
            for info in found
        ),
    )
