"""The CuPy backend's drivers: CuPy arrays on a GPU and its current stream, or NumPy arrays and the thread shim."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import numpy as np

from kivi.backend import Backend, Manifest, Probe
from kivi.backends.cupy import shim
from kivi.backends.cupy.arrays import CupyArrays, devices
from kivi.backends.cupy.kernels import library
from kivi.backends.cupy.schedule import schedules
from kivi.errors import BackendError
from kivi.kernels.host import HostBackend
from kivi.kernels.library import Loaded
from kivi.pool import PageFormat
from kivi.schedule import Schedule


def probe(mode: str, device: str) -> Probe:
    """Shim: a C++ compiler. Device: CUDA devices that CuPy sees."""
    versions = {"xdsl": importlib.metadata.version("xdsl")}
    if mode == "device":
        return devices(mode, versions, nvrtc=True)
    command = shim.compiler()
    try:
        if command is None:
            raise BackendError(shim.NO_COMPILER)
        versions["compiler"] = shim.version(tuple(command))
    except BackendError as error:
        return Probe(available=False, mode=mode, reason=str(error), versions=versions)
    return Probe(available=True, mode=mode, devices=("cpu",), versions=versions)


def create(manifest: Manifest, mode: str, device: str) -> Backend:
    versions = probe(mode, device).versions
    return (ShimBackend if mode == "shim" else CupyBackend)(manifest, mode, device, versions)


def _printers(versions: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """The tools that decide what is printed."""
    return (("xdsl", versions["xdsl"]),)


class ShimBackend(HostBackend):
    """Kernels under the thread shim. `KIVI_SHIM_ORDER`: the order of threads between barriers, ascending, descending or random."""

    def __init__(self, manifest: Manifest, mode: str, device: str, versions: dict[str, str]) -> None:
        super().__init__(manifest, mode, device, versions, library(_printers(versions)))
        self.order: Any = os.environ.get("KIVI_SHIM_ORDER", "ascending")

    def schedules(self, form: PageFormat, q_heads: int, rows: int) -> dict[str, Schedule]:
        return schedules(form, q_heads, rows)

    def launch(self, loaded: Loaded, programs: tuple[int, ...], arguments: list[Any]) -> None:
        loaded.launch(programs, arguments, self.order)


class CupyBackend(CupyArrays):
    """Kernels on a GPU, on the stream that is current in CuPy."""

    def __init__(self, manifest: Manifest, mode: str, device: str, versions: dict[str, str]) -> None:
        import cupy

        capability = cupy.cuda.Device(int(device.partition(":")[2] or 0)).compute_capability
        super().__init__(manifest, mode, device, versions, library(_printers(versions), f"sm_{capability}"))

    def schedules(self, form: PageFormat, q_heads: int, rows: int) -> dict[str, Schedule]:
        return schedules(form, q_heads, rows)

    def launch(self, loaded: Loaded, programs: tuple[int, ...], arguments: list[Any]) -> None:
        kinds = loaded.generated.signature.values()
        given = [a if kind.startswith("*") else SCALARS[kind](a) for kind, a in zip(kinds, arguments, strict=True)]
        with self.here():
            loaded.launch((*programs, 1, 1)[:3], (loaded.generated.launch["threads"], 1, 1), tuple(given))


SCALARS = {"i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "f32": np.float32}
