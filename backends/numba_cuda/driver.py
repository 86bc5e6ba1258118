"""The Numba CUDA backend's drivers: CuPy arrays on a GPU and CuPy's current stream, or NumPy arrays and the simulator."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any, ClassVar

import numpy as np

from kivi.backend import Backend, Manifest, Probe
from kivi.backends.cupy.arrays import CupyArrays, devices
from kivi.backends.numba_cuda.kernels import library
from kivi.backends.numba_cuda.schedule import schedules
from kivi.kernels.host import HostBackend
from kivi.kernels.library import Loaded
from kivi.pool import PageFormat, PagePool
from kivi.schedule import Schedule


def probe(mode: str, device: str) -> Probe:
    """Simulator: the package greenlet. Device: numba-cuda, and CUDA devices that CuPy sees."""
    versions = {"xdsl": importlib.metadata.version("xdsl")}
    wanted = "greenlet" if mode == "simulator" else "numba-cuda"
    try:
        versions[wanted] = importlib.metadata.version(wanted)
    except importlib.metadata.PackageNotFoundError:
        reason = f"{wanted} is not installed; pip install {wanted}"
        return Probe(available=False, mode=mode, reason=reason, versions=versions)
    if mode == "simulator":
        return Probe(available=True, mode=mode, devices=("cpu",), versions=versions)
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        reason = "NUMBA_ENABLE_CUDASIM is set, so numba.cuda runs no device; unset it, or use mode = 'simulator'"
        return Probe(available=False, mode=mode, reason=reason, versions=versions)
    return devices(mode, versions)


def create(manifest: Manifest, mode: str, device: str) -> Backend:
    versions = probe(mode, device).versions
    return (SimulatorBackend if mode == "simulator" else NumbaBackend)(manifest, mode, device, versions)


class SimulatorBackend(HostBackend):
    """Kernels under the simulator. `KIVI_SIMULATOR_ORDER`: the order of threads between barriers, ascending, descending or random."""

    def __init__(self, manifest: Manifest, mode: str, device: str, versions: dict[str, str]) -> None:
        super().__init__(manifest, mode, device, versions, library((("xdsl", versions["xdsl"]),), simulate=True))
        self.order: Any = os.environ.get("KIVI_SIMULATOR_ORDER", "ascending")

    def adopt(self, x: Any, what: str) -> np.ndarray:
        """Kernels count elements from the first one up, so an axis that runs backwards is copied."""
        a = super().adopt(x, what)
        return a.copy() if any(s < 0 for s in a.strides) else a

    def schedules(self, form: PageFormat, q_heads: int, rows: int) -> dict[str, Schedule]:
        return schedules(self.mode, form, q_heads, rows)

    def launch(self, loaded: Loaded, programs: tuple[int, ...], arguments: list[Any]) -> None:
        loaded.launch(programs, arguments, self.order)

    # A kernel here indexes arrays, not addresses: the pool is one array, from its lowest slab to the end of its highest.

    def _pool(self, pool: PagePool) -> dict[str, Any]:
        from kivi.backends.numba_cuda.simulator import memory

        if len(pool.raw) < 2:
            return super()._pool(pool)
        low = min(self.address(raw) for raw in pool.raw)
        form, whole = pool.format, memory(low, max(self.address(raw) + raw.nbytes for raw in pool.raw) - low)
        return {
            "page_words": self.flat(whole, form.layout.word),
            "page_key_metadata": self.flat(whole, form.key_metadata),
            "page_value_metadata": self.flat(whole, form.value_metadata),
        }

    def _places(self, pool: PagePool) -> np.ndarray:
        starts = [self.address(raw) for raw in pool.raw]
        return super()._places(pool) + (starts[0] - min(starts) if starts else 0)


class NumbaBackend(CupyArrays):
    """Kernels on a GPU, on the stream that is current in CuPy."""

    def __init__(self, manifest: Manifest, mode: str, device: str, versions: dict[str, str]) -> None:
        tools = tuple((name, versions[name]) for name in ("xdsl", "numba-cuda"))
        super().__init__(manifest, mode, device, versions, library(tools, simulate=False))

    def schedules(self, form: PageFormat, q_heads: int, rows: int) -> dict[str, Schedule]:
        return schedules(self.mode, form, q_heads, rows)

    def launch(self, loaded: Loaded, programs: tuple[int, ...], arguments: list[Any]) -> None:
        from numba import cuda

        with self.here(), cuda.gpus[self.number]:
            given = [_argument(kind, a) for kind, a in zip(loaded.generated.signature.values(), arguments, strict=True)]
            stream = cuda.external_stream(self.cupy.cuda.get_current_stream().ptr)
            loaded.launch[(*programs, 1, 1)[:3], loaded.generated.launch["threads"], stream](*given)


class Memory:
    """A CuPy array as Numba takes it: its memory from the first element on, in the type that the kernel names. Kernels compute offsets
    themselves, so the length means nothing; no stream is named, since the launch is on CuPy's."""

    TYPES: ClassVar = {"i8": "|u1", "i16": "<u2", "i32": "<u4", "i64": "<u8", "f16": "<f2", "f32": "<f4", "f64": "<f8"}

    def __init__(self, a: Any, kind: str) -> None:
        shape, place = (max(1, a.size),), (a.data.ptr, False)
        self.__cuda_array_interface__ = {"data": place, "shape": shape, "typestr": self.TYPES[kind], "version": 3}


def _argument(kind: str, given: Any) -> Any:
    """An argument as the kernel types it."""
    if kind.startswith("*"):
        from numba import cuda

        return cuda.as_cuda_array(Memory(given, kind[1:]), sync=False)
    return float(given) if kind.startswith("f") else int(given) & ((1 << int(kind[1:])) - 1)
