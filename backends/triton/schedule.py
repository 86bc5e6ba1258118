"""Which schedule the attention kernels take: tile sizes by shape, how codes are unpacked, and how many programs share a history.

The choices for GPUs come from static analysis (registers, spills and width of loads of the compiled kernels, tests/triton_backend);
none has been measured on a device yet.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from kivi.pool import PageFormat

PAGES_PER_SHARE = 16  # enough work a program to hide the merge
MOST_ROWS = 16  # query rows of a program


@dataclass(frozen=True)
class Schedule:
    """See `kivi.passes.attention.Schedule`, whose fields these are but `warps`; data of its own, so that choosing loads no compiler."""

    tokens: int
    queries: int
    unpack: str
    warps: int


def schedules(mode: str, form: PageFormat, q_heads: int, rows: int) -> dict[str, Schedule]:
    """Zone -> schedule, for calls with `rows` query rows.

    `KIVI_TRITON_UNPACK` ("lanes" or "axis") overrides how codes are unpacked, for measuring.
    """
    queries = 1
    while queries < rows and queries * 2 * (q_heads // form.kv_heads) <= MOST_ROWS:
        queries *= 2
    # An interpreter pays for each operation, whatever its width.
    unpack = os.environ.get("KIVI_TRITON_UNPACK") or ("axis" if mode == "interpreter" else "lanes")
    return {
        "history": Schedule(tokens=32, queries=queries, unpack=unpack, warps=2),
        "tail": Schedule(tokens=16, queries=queries, unpack=unpack, warps=4),
    }


def shares(closed: int) -> int:
    """Programs that share the longest history, of `closed` pages."""
    return -(-closed // PAGES_PER_SHARE)
