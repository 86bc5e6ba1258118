"""The CPU backend's driver: NumPy arrays, and torch tensors in host memory as views of theirs; kernels run on this process's threads."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import llvmlite
import numpy as np

from kivi import arena
from kivi.backend import Backend, Manifest, Probe, Reading
from kivi.backends.cpu import compile as compiler
from kivi.backends.cpu import threads
from kivi.backends.cpu.kernels import FINITE, CpuLibrary, library
from kivi.backends.cpu.recording import Recording, Written
from kivi.errors import KiviError
from kivi.kernels.backend import NO_LAYOUT, NO_SPEC
from kivi.kernels.host import HostBackend
from kivi.kernels.library import Loaded
from kivi.kernels.request import Request
from kivi.pool import PageFormat, PagePool
from kivi.schedule import Schedule, queries_of_program

PROGRAMS = 64  # that are enough for any number of threads to end at about the same time
LARGEST = float(np.finfo(np.float32).max)
TARGET = "KIVI_CPU_TARGET"  # environment: a target below this processor's, for testing


def probe(mode: str, device: str) -> Probe:
    """Any processor that has a target."""
    versions = {"llvmlite": llvmlite.__version__}
    try:
        machine = compiler.machine(os.environ.get(TARGET))
        threads.count()
    except KiviError as error:
        return Probe(available=False, mode=mode, reason=str(error), versions=versions, state="bad setting")
    missing = compiler.missing(machine)
    if missing:
        reason = f"target {machine.target!r} needs {', '.join(missing)}, which this processor does not have"
        return Probe(available=False, mode=mode, reason=reason, versions=versions)
    return Probe(available=True, mode=mode, devices=("cpu",), versions={**versions, "target": machine.target})


def create(manifest: Manifest, mode: str, device: str) -> Backend:
    return CpuBackend(manifest, mode, device, probe(mode, device).versions)


class CpuBackend(HostBackend):
    """Generated vector kernels on NumPy arrays."""

    library: CpuLibrary

    def __init__(self, manifest: Manifest, mode: str, device: str, versions: dict[str, str]) -> None:
        super().__init__(manifest, mode, device, versions, library(compiler.machine(os.environ.get(TARGET))))
        self._arena = arena.Arena()
        self._tables: WeakKeyDictionary[PagePool, tuple[Any, np.ndarray]] = WeakKeyDictionary()

    @property
    def kernel(self) -> str:
        return f"history, tail, merge ({self.versions['target']})"

    def adopt(self, x: Any, what: str) -> np.ndarray:
        """A view, or a copy of a call's rows whose channels are no neighbours in memory; stored history is never copied."""
        a = x if type(x) is np.ndarray else super().adopt(x, what)
        return a if a.flags.aligned and (a.strides[-1:] == (a.itemsize,) or a.ndim == 0) else a.copy()

    def zeros(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return arena.zeros(shape, dtype)

    def slab(self, pages: int, heads: int, size: int) -> tuple[np.ndarray, int]:
        return self._arena.slab(pages, heads, size)

    def schedules(self, form: PageFormat, q_heads: int, rows: int) -> dict[str, Schedule]:
        return schedules(form, q_heads, rows)

    def first_bad(self, x: np.ndarray, counts: np.ndarray, lowest: float) -> tuple[int, int, int, int] | None:
        """As in `HostBackend`, which looks for the place; most calls only have to see that there is none."""
        return super().first_bad(x, counts, lowest) if self.outside(x, lowest).any() else None

    def outside(self, x: np.ndarray, lowest: float) -> np.ndarray:
        batch, heads, rows, channels = x.shape
        flag = np.empty((batch * heads, rows), np.int32)
        loaded = self.library.get(Request(FINITE, NO_SPEC, NO_LAYOUT, self.dtype_of(x), channels))
        given = {"x": x, **self._strides("x", x), "heads": heads, "rows": rows, "flag": flag}
        given |= {"lowest": max(lowest, -LARGEST), "highest": LARGEST}
        self._launch(loaded, loaded.generated.programs({"batch": batch, "heads": heads, "rows": rows}), given)
        return flag

    def counts(self, reading: Reading) -> tuple[np.ndarray, int]:
        """As in `KernelBackend`, request by request: a batch on a CPU is small, and NumPy's calls are what takes time."""
        columns = (reading.stored, reading.key_sealed, reading.value_sealed, reading.pages, reading.chunk, reading.counts)
        out, most = np.empty((len(reading.pages), len(columns) + 1), np.int64), 0
        for b, (stored, key_sealed, value_sealed, pages, chunk, count) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            closed = pages  # pages end where the next one begins; the last ends with the sealed keys
            if value_sealed < key_sealed:
                closed = max(0, int(np.searchsorted(reading.table[b, :pages, 1], value_sealed, side="right")) - 1)
            out[b] = stored, key_sealed, value_sealed, pages, closed, chunk, count
            most = max(most, closed)
        return out, most

    def table(self, reading: Reading, width: int = 1) -> np.ndarray:
        """As in `KernelBackend`; the last one is kept, since a page comes only every so many steps."""
        pool = reading.pool
        key = (width, reading.pages.tobytes(), reading.table.shape, reading.table.tobytes())
        found = self._tables.get(pool)
        if found is None or found[0] != key:
            found = key, super().table(reading, width)
            self._tables[pool] = found
        return found[1]

    def shares_of(self, form: PageFormat, q: np.ndarray, closed: int) -> int:
        """As in `KernelBackend`, but not more programs than keep threads busy: a share costs a partial result and its merge. The
        number does not depend on the threads of this call, and so neither does the result."""
        batch, q_heads, rows = (int(n) for n in q.shape[:3])
        blocks = -(-rows // queries_of_program(rows, q_heads // form.kv_heads))
        return min(super().shares_of(form, q, closed), -(-PROGRAMS // (batch * form.kv_heads * blocks)))

    def seal_metadata(self, pool: PagePool, which: str, jobs: Any, count: int, window: Any, chunk: Any) -> tuple[Any, Any]:
        if not pool.format.seals_apart(which):
            return super().seal_metadata(pool, which, jobs, count, window, chunk)
        loaded, values, given = self._sealing("seal", pool, which, jobs, count, window, chunk)
        programs = loaded.generated.programs({**values, "most": pool.format.tokens})
        flag = np.empty(math.prod(programs), np.int32)
        self._launch(loaded, programs, {**given, "flag": flag})
        return flag, None

    def seal_words(self, pool: PagePool, which: str, jobs: Any, count: int, window: Any, chunk: Any, flat: Any) -> None:
        if not pool.format.seals_apart(which):  # else the words are written already
            super().seal_words(pool, which, jobs, count, window, chunk, flat)

    def launch(self, loaded: Loaded, programs: tuple[int, ...], arguments: list[Any]) -> None:
        loaded.launch(programs, arguments)

    can_record = True

    def record(self, phases: Sequence[Callable[[Any], None]]) -> Recording:
        recorder, written = Recorder(self), []
        for phase in phases:
            recorder.written = []
            phase(recorder)
            written.append(recorder.written)
        return Recording(written, recorder.scratch, self.library.machine)


class Recorder(CpuBackend):
    """A backend whose launches are written down and not done."""

    def __init__(self, backend: CpuBackend) -> None:
        vars(self).update(vars(backend))
        self.written: list[Written] = []
        self.scratch: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        self.scratch.append(super().empty(shape, dtype))
        return self.scratch[-1]

    def launch(self, loaded: Loaded, programs: tuple[int, ...], arguments: list[Any]) -> None:
        self.written.append(Written(loaded.launch, programs, arguments))


def schedules(form: PageFormat, q_heads: int, rows: int) -> dict[str, Schedule]:
    """Zone -> schedule, for calls with `rows` query rows. What depends on the target is chosen by its lowering."""
    queries = queries_of_program(rows, q_heads // form.kv_heads)
    return {
        "history": Schedule(tokens=16, queries=queries, rewrites=("split_kv", "fold_scale"), threads=1),
        "tail": Schedule(tokens=16, queries=queries, rewrites=("fold_scale",), threads=1),
    }
