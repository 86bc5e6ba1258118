"""What the commands share: tables on stdout, progress on stderr, JSON in one form, and the `--json` option itself.

Progress goes to stderr so that stdout can be piped; rich draws it only on a terminal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

json_option: Callable[[Any], Any] = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def print_json(data: Any) -> None:
    """`data` as indented JSON on stdout."""
    click.echo(json.dumps(data, indent=2))


def print_table(columns: Iterable[str], rows: Iterable[Iterable[object]], *, right: Iterable[str] = ()) -> None:
    """A table on stdout. `right` names the columns that are aligned to the right: figures. Only the last column wraps."""
    table = Table(box=box.SIMPLE_HEAD)
    names, figures = list(columns), set(right)
    for name in names:
        table.add_column(name, justify="right" if name in figures else "left", overflow="fold", no_wrap=name != names[-1])
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a pipe has no width; rich's default of 80 would cut names
    console.print(table)


def progress() -> Progress:
    """A progress bar on stderr, gone when done; none where stderr is not a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def size(count: int) -> str:
    """Bytes for people: exact below 1 KiB, else with the binary unit, e.g. `410.0 KiB`."""
    power = min((count.bit_length() - 1) // 10, 5)
    return f"{count} B" if power < 1 else f"{count / 1024**power:.1f} {'KMGTP'[power - 1]}iB"
