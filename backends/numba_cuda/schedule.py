"""Which schedule the attention kernels take. None has been measured on a device yet."""

from __future__ import annotations

from kivi.pool import PageFormat
from kivi.schedule import Schedule, queries_of_program

MOST_ROWS = 8  # query rows of a program: with 16, some kernels spill registers


def schedules(mode: str, form: PageFormat, q_heads: int, rows: int) -> dict[str, Schedule]:
    """Zone -> schedule, for calls with `rows` query rows. A simulator pays for each operation, so it takes the form with the fewest."""
    queries = queries_of_program(rows, q_heads // form.kv_heads, most=MOST_ROWS)
    return {
        "history": Schedule(
            tokens=32, queries=queries, slots="axis" if mode == "simulator" else "lanes", rewrites=("split_kv", "fold_scale", "contract")
        ),
        "tail": Schedule(tokens=8, queries=queries, slots="axis", rewrites=("fold_scale", "contract")),
    }
