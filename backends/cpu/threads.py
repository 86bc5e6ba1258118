"""Threads that share the programs of a launch.

Helpers are started once and sleep between launches. A launch wakes them and then works itself; nobody waits for a helper that wakes late,
since every program is counted when it is finished. So a launch is never slower than one thread by more than the waking. Kernels run
without Python's lock.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kivi.backends.cpu.counters import FINISHED
from kivi.errors import InputError
from kivi.subnormals import Kept

COUNTERS = ctypes.c_int64 * (FINISHED + 1)
WORTH = 60e-6  # seconds of work below which waking a helper costs more than it brings


def count() -> int:
    """Threads of a launch: `KIVI_CPU_THREADS`; else as many as torch is set to use, if it is loaded, so that the two agree; else the
    processors of this process."""
    named = os.environ.get("KIVI_CPU_THREADS")
    if named:
        if not named.isdecimal() or int(named) < 1:
            raise InputError(f"KIVI_CPU_THREADS = {named!r} is not a number of threads; use 1 or more, or unset it")
        return int(named)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        return int(torch.get_num_threads())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Helper:
    """A thread that runs what it is given, one job after another."""

    def __init__(self) -> None:
        self.job: Callable[[], None] | None = None
        self._wake = threading.Semaphore(0)
        threading.Thread(target=self._work, name="kivi-cpu", daemon=True).start()

    def give(self, job: Callable[[], None]) -> None:
        """Run `job` soon; one that has not begun is replaced, which is harmless: its launch is over."""
        self.job = job
        self._wake.release()

    def _work(self) -> None:
        Kept().__enter__()  # a thread begins as the one that starts it, which may flush subnormal numbers
        while True:
            self._wake.acquire()
            job, self.job = self.job, None
            if job is not None:
                job()


_helpers: list[Helper] = []
_lock = threading.Lock()


def run(function: Callable[..., None], arguments: Any, programs: int, n1: int, n2: int, threads: int) -> None:
    """Call a kernel's entry function (`kivi.backends.cpu.emit`) from `threads` threads, this one included.

    arguments: a ctypes array, one slot an argument.
    """
    counters = COUNTERS()
    wanted = min(threads, programs) - 1
    if wanted <= 0:
        function(arguments, counters, programs, n1, n2)
        return
    share(partial(function, arguments, counters, programs, n1, n2), wanted, lambda: counters[FINISHED] >= programs)


def share(job: Callable[[], None], wanted: int, done: Callable[[], bool]) -> None:
    """Do a job, which takes what is left of some work, with `wanted` helpers; return when the work is `done`.

    The job holds what a helper that wakes late still reads.
    """
    if _lock.acquire(blocking=False):  # else another caller's launch has the helpers, and this one does without
        try:
            while len(_helpers) < wanted:
                _helpers.append(Helper())
            for helper in _helpers[:wanted]:
                helper.give(job)
            job()
        finally:
            _lock.release()
    else:
        job()
    while not done():  # a helper is still at its last program
        time.sleep(0)


def _forget() -> None:
    """Threads do not survive a fork."""
    global _lock
    _helpers.clear()
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
