"""Which schedule the attention kernels take.

The choices for GPUs come from static analysis (registers, spills and width of loads of the compiled kernels, tests/triton_backend);
none has been measured on a device yet.
"""

from __future__ import annotations

from typing import Literal

from kivi.pool import PageFormat
from kivi.schedule import Schedule, queries_of_program

#: `unpack_in_place` saves a shift a word and is left out: with it, `history` spills on sm_100 and `tail` on gfx942.
REWRITES = ("fold_scale", "join_sums", "contract")


def schedules(mode: str, form: PageFormat, q_heads: int, rows: int) -> dict[str, Schedule]:
    """Zone -> schedule, for calls with `rows` query rows."""
    queries = queries_of_program(rows, q_heads // form.kv_heads)
    # An interpreter pays for each operation, whatever its width.
    slots: Literal["lanes", "axis"] = "axis" if mode == "interpreter" else "lanes"
    return {
        "history": Schedule(tokens=32, queries=queries, slots=slots, rewrites=("split_kv", *REWRITES), threads=64),
        "tail": Schedule(tokens=16, queries=queries, slots=slots, rewrites=REWRITES, threads=128),
    }
