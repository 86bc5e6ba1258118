"""Schedules: the choices behind a kernel that change its speed and not its result, as data. Tuning is a search over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """How one attention kernel is built.

    tokens     rows of a tile of history, at most
    queries    query positions of a program
    slots      how the slots of packed words are walked: "lanes", each a tile of its own, or as one more "axis" of a wide tile
    rewrites   names of `kivi.passes.rewrites`, applied in this order
    threads    threads of a program, for targets that count them
    """

    tokens: int = 32
    queries: int = 1
    slots: Literal["lanes", "axis"] = "lanes"
    rewrites: tuple[str, ...] = ("fold_scale",)
    threads: int = 128


def queries_of_program(rows: int, group_heads: int, most: int = 16) -> int:
    """Query positions of a program: as many, up to `rows`, as keep the query rows of all heads of a group within `most`."""
    queries = 1
    while queries < rows and queries * 2 * group_heads <= most:
        queries *= 2
    return queries


def shares(closed: int, pages: int) -> int:
    """Programs that share the longest history, of `closed` pages, when each takes about `pages` of them."""
    return -(-closed // pages)
