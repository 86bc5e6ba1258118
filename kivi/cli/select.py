"""`kivi select`: which backend a cache of a given shape gets here, and why each of the others does not."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import click
from rich.text import Text

from kivi.cli.output import json_option, print_json, print_table
from kivi.cli.shape import shape_options


@click.command()
@shape_options
@click.option("--backend", help="This backend or none.  [default: KIVI_BACKEND, the configuration file, or the best]")
@click.option("--mode", help="device, interpreter, simulator or shim.  [default: KIVI_MODE, the configuration file, or device]")
@click.option("--strict", is_flag=True, default=None, help="Fail where a better backend that is installed here would be passed over.")
@click.option("--explain", is_flag=True, help="Say of every other backend why it was not chosen, and what would change that.")
@json_option
def select(explain: bool, as_json: bool, **request: Any) -> None:
    """Choose the backend for a cache of this shape.

    The choice is made as `backend="auto"` makes it, self-check of the device included. Exit 2 if no backend can serve.
    """
    import kivi
    from kivi.errors import UnsupportedError

    try:
        with contextlib.redirect_stdout(sys.stderr):  # whatever a vendor's package prints when it is imported
            chosen = kivi.select(**request)
    except UnsupportedError as error:
        if explain and not as_json:
            _table(None, error.rejected)
        raise
    if as_json:
        print_json({"request": request, **chosen.to_dict()})
        return
    be = chosen.backend
    click.echo(f"{be.name} (mode {be.mode}, {chosen.device}): {chosen.reason}")
    if explain:
        _table(chosen, chosen.rejected)


def _table(chosen: Any, rejected: Any) -> None:
    from kivi import results
    from kivi.cli.backends import advice, conformance_words

    last = results.last()

    def row(name: str, mode: str, state: Text, device: str, reason: str) -> tuple[Any, ...]:
        found = last.get((name, mode))
        words = conformance_words({"text": str(found), "here": found.here} if found else None)
        seconds = chosen.seconds.get((name, mode)) if chosen else None
        return name, state, mode, device, words, "" if seconds is None else f"{seconds * 1e3:.3g}", reason

    rows = []
    if chosen:
        be = chosen.backend
        rows.append(row(be.name, be.mode, Text("chosen", "green"), be.device, chosen.reason))
    for r in rejected:
        colour = "yellow" if r.state == "ranked behind" else "red"
        rows.append(row(r.name, r.mode, Text(r.state, colour), "", advice(r.reason, r.fix)))
    print_table(("backend", "state", "mode", "device", "conformance", "ms a step", "reason"), rows, right=("ms a step",))
