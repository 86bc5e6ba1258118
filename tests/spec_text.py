"""spec/SPEC.md as text: its tables and its clause numbers."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "spec" / "SPEC.md").read_text("utf-8")
CLAUSES = re.findall(r"\n\n(?:#+ )?(\d+(?:\.\d+)*) ", TEXT)


def rows(header: str, after: str = "") -> list[list[str]]:
    """Cells of the first table past `after` whose header row starts with `header`."""
    start = TEXT.index(f"\n| {header}", TEXT.index(after)) + 1
    lines = TEXT[start : TEXT.index("\n\n", start)].split("\n")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def codes(cell: str) -> list[str]:
    """The `code` spans of a cell."""
    return re.findall(r"`([^`]+)`", cell)


def code(cell: str) -> str:
    """The only `code` span of a cell."""
    (span,) = codes(cell)
    return span
