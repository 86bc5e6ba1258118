"""How contenders are timed: in turn in every round, so that whatever disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Clock = Callable[[], float]
FEW, LEAST, MOST = 3, 5, 201  # rounds: if one alone takes longer than the budget, else at least, at most
SHORT, BURST = 5e-3, 5  # seconds of a call that is made several times in its turn, and how many
SETTLE = 0.01  # seconds until the threads of a contender sleep, after it has used several


@dataclass(frozen=True)
class Call:
    """A contender's timed call. `run` is given the number of the round, by which `copies` of the history take turns; `bytes` is what it
    must read of one."""

    name: str
    run: Callable[[int], Any]
    bytes: int
    copies: int = 1


def clock_for(threads: int) -> Clock:
    """One thread: its own CPU time, which other processes disturb less. More: the wall clock."""
    return time.thread_time if threads == 1 else time.perf_counter


def interleaved(calls: Sequence[Call], clock: Clock, budget: float) -> dict[str, list[float]]:
    """Seconds of every call by name, all of them in turn in every round; as many rounds as `budget` seconds of wall time hold, within
    limits.

    A call that follows another contender finds the interpreter's own data gone from the processor's caches, which is large beside a short
    call. So in its turn a short call is made several times, each on another copy, and the first time does not count. OpenMP's threads stay
    awake for milliseconds after their work and would take a processor from the next contender; with the wall clock, which is the one of
    several threads, a turn begins when they sleep.
    """
    turns: dict[str, int] = {}
    for call in calls:  # what is done once, compiling for one, is no part of a step
        for i in range(call.copies):
            start = clock()
            call.run(i)
            turns[call.name] = BURST if clock() - start < SHORT else 1
    times: dict[str, list[float]] = {call.name: [] for call in calls}
    begin = time.perf_counter()
    for done in range(1, MOST + 1):
        for call in calls:
            burst = turns[call.name]
            if clock is time.perf_counter:
                time.sleep(SETTLE)
            for i in range(burst):
                start = clock()
                call.run(done * burst + i)
                spent = clock() - start
                if i or burst == 1:
                    times[call.name].append(spent)
        elapsed = time.perf_counter() - begin
        least = FEW if elapsed / done > budget else LEAST
        if done >= least and elapsed + elapsed / done > budget:
            break
    return times
