"""Launches that are done again in one call of compiled code.

A block of memory holds all that a replay needs: a record a launch, then counters and arguments of each. A thread walks the records of a
phase and shares their programs with the others. Every replay has a fresh copy of the block, because a helper that wakes late reads the old
one once more, and finds nothing left to do there.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kivi.backends.cpu import compile as compiler
from kivi.backends.cpu import threads
from kivi.backends.cpu.counters import FINISHED

if TYPE_CHECKING:
    from kivi.backends.cpu.kernels import Launch

RECORD = 8  # words of 8 bytes: function, arguments, counters (their words in the block), programs, n1, n2, none, none
COUNTERS = 2 * FINISHED  # words
LINE = 64  # bytes to which scratch memory is aligned
ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
#: Calls the functions of records `first` to `last` of a block, one after another.
SEQUENCE = """
define void @sequence(ptr %block, i64 %first, i64 %last) {
entry:
  br label %head
head:
  %i = phi i64 [ %first, %entry ], [ %next, %body ]
  %more = icmp slt i64 %i, %last
  br i1 %more, label %body, label %done
body:
  %at = mul i64 %i, RECORD
  %record = getelementptr i64, ptr %block, i64 %at
  %function = load ptr, ptr %record
  %record.1 = getelementptr i64, ptr %record, i64 1
  %first.argument = load i64, ptr %record.1
  %arguments = getelementptr i64, ptr %block, i64 %first.argument
  %record.2 = getelementptr i64, ptr %record, i64 2
  %first.counter = load i64, ptr %record.2
  %counters = getelementptr i64, ptr %block, i64 %first.counter
  %record.3 = getelementptr i64, ptr %record, i64 3
  %programs = load i64, ptr %record.3
  %record.4 = getelementptr i64, ptr %record, i64 4
  %n1 = load i64, ptr %record.4
  %record.5 = getelementptr i64, ptr %record, i64 5
  %n2 = load i64, ptr %record.5
  call void %function(ptr %arguments, ptr %counters, i64 %programs, i64 %n1, i64 %n2)
  %next = add i64 %i, 1
  br label %head
done:
  ret void
}
""".replace("RECORD", str(RECORD))


@cache
def sequence(machine: compiler.Machine) -> Callable[..., None]:
    """The compiled `SEQUENCE`."""
    return ENTRY(compiler.address(SEQUENCE, "sequence", machine))


class Scratch(threading.local):
    """Memory for what a replay leaves to nobody, one piece a thread that replays."""

    def __init__(self) -> None:
        self._memory, self._base = np.empty(0, np.uint8), 0

    def take(self, count: int) -> int:
        """The address of at least `count` bytes, the same until more are asked for."""
        if len(self._memory) < count + LINE:
            self._memory = np.empty(count + LINE, np.uint8)
            self._base = -(-self._memory.ctypes.data // LINE) * LINE
        return self._base


SCRATCH = Scratch()


@dataclass(frozen=True)
class Written:
    """A launch that was written down: its kernel, its programs and its arguments."""

    launch: Launch
    programs: tuple[int, ...]
    arguments: list[Any]


@dataclass
class Phase:
    """Launches that do not depend on one another: records `first` to `last`."""

    first: int
    last: int
    waits: list[tuple[int, int]]  # (word of a counter, what it holds when the launch is over)
    most: int  # programs of the longest launch
    seconds: float = 0.0  # of one thread, as last measured


class Recording:
    """Calling it does all launches of `phases` again, with the arguments that they had.

    scratch  arrays among them whose contents do not outlive a call: they share the memory of this thread's other replays
    """

    def __init__(self, phases: Sequence[Sequence[Written]], scratch: Sequence[np.ndarray], machine: compiler.Machine) -> None:
        launches = [written for phase in phases for written in phase]
        self._kept = [written.arguments for written in launches]  # what the block points to
        self._sequence = sequence(machine)
        self._scratch: list[tuple[int, int]] = []  # (word, bytes from the start)
        places, size = {}, 0
        for a in scratch:
            places[id(a)] = size
            size += -(-a.nbytes // LINE) * LINE
        self._scratch_bytes, self._base = size, 0
        words, self._phases, number = [0] * (RECORD * len(launches)), [], 0
        for phase in phases:
            waits, first = [], number
            for written in phase:
                n0, n1, n2 = (*written.programs, 1, 1, 1)[:3]
                counters, arguments, programs = len(words), len(words) + COUNTERS, n0 * n1 * n2
                record = [written.launch.address, arguments, counters, programs, n1, n2]
                words[number * RECORD : number * RECORD + len(record)] = record
                words += [0] * COUNTERS + written.launch.pack(written.arguments)
                waits.append((counters + FINISHED, programs))
                self._scratch += [(arguments + i, places[id(x)]) for i, x in enumerate(written.arguments) if id(x) in places]
                number += 1
            if phase:
                self._phases.append(Phase(first, number, waits, max(programs for _, programs in waits)))
        self._words = (ctypes.c_int64 * len(words))(*words)

    def __call__(self) -> None:
        words, base = self._words, SCRATCH.take(self._scratch_bytes)
        if base != self._base:
            self._base = base
            for word, distance in self._scratch:
                words[word] = base + distance
        self._run(type(words).from_buffer_copy(words), threads.count())

    def _run(self, block: Any, count: int) -> None:
        if count == 1:
            self._sequence(block, 0, self._phases[-1].last)
            return
        for phase in self._phases:
            self._share(block, phase, count)

    def _share(self, block: Any, phase: Phase, count: int) -> None:
        job = partial(self._sequence, block, phase.first, phase.last)
        workers = min(count, phase.most) if phase.seconds > threads.WORTH else 1
        start = time.perf_counter()
        if workers > 1:
            threads.share(job, workers - 1, lambda: all(block[word] >= programs for word, programs in phase.waits))
        else:
            job()
        phase.seconds = (time.perf_counter() - start) * workers
