"""Which schedule the attention kernel takes: tile sizes by shape, and how many programs share a history."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kivi.pool import PageFormat

PAGES_PER_SPLIT = 16  # enough work a program to hide the merge
MOST_ROWS = 16  # query rows of a program


@dataclass(frozen=True)
class Schedule:
    """See `kivi.passes.attention.Schedule`; data of its own here, so that choosing loads no compiler."""

    tokens: int = 32
    queries: int = 1
    unpack: str = "lanes"


def schedule(mode: str, form: PageFormat, batch: int, q_heads: int, rows: int, closed: int) -> tuple[Schedule, int]:
    """(schedule, splits) of a call with `rows` query rows over at most `closed` closed pages."""
    per_position = q_heads // form.kv_heads
    queries = 1
    while queries < rows and queries * 2 * per_position <= MOST_ROWS:
        queries *= 2
    unpack = "axis" if mode == "interpreter" else "lanes"  # an interpreter pays for each operation, whatever its width
    return Schedule(tokens=32, queries=queries, unpack=os.environ.get("KIVI_TRITON_UNPACK", unpack)), max(1, -(-closed // PAGES_PER_SPLIT))
