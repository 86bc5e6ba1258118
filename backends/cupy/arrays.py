"""CuPy arrays for backends whose kernels run on a CUDA device: NumPy's interface, on the stream that is current in CuPy."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from kivi.arrays import device_of, dtype_name, kind
from kivi.backend import DeviceInfo, Manifest, Probe
from kivi.dtypes import np_dtype
from kivi.errors import DeviceError
from kivi.kernels.backend import KernelBackend
from kivi.kernels.library import Library
from kivi.pool import PageFormat, PagePool

INSTALL = "pip install the cupy-cuda package of your CUDA version"


def devices(mode: str, versions: dict[str, str], nvrtc: bool = False) -> Probe:
    """The CUDA devices that CuPy sees. `nvrtc`: kernels go through CuPy's NVRTC, so a device that it does not know cannot be used."""
    try:
        import cupy
    except Exception as error:  # a package for another CUDA, or a broken one, can fail in any way
        reason = f"cupy cannot be imported ({type(error).__name__}: {error}); {INSTALL}"
        return Probe(available=False, mode=mode, reason=reason, versions=versions, state="broken")
    versions = {**versions, "cupy": cupy.__version__}
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        driver = _version(runtime.driverGetVersion())
        if "InsufficientDriver" in str(error) and driver:
            wanted = _version(runtime.runtimeGetVersion())
            reason = f"the NVIDIA driver serves CUDA {driver}, cupy {cupy.__version__} needs CUDA {wanted}; update it, or {INSTALL}"
            return Probe(available=False, mode=mode, reason=reason, versions=versions, state="driver too old")
        return Probe(available=False, mode=mode, reason=f"cupy {cupy.__version__} sees no CUDA device: {error}", versions=versions)
    found = tuple(_device(runtime, i, cupy.cuda.nvrtc if nvrtc else None) for i in range(count))
    usable = tuple(info.device for info in found if not info.reason)
    reason = "" if usable else "; ".join(info.reason for info in found) or f"cupy {cupy.__version__} sees no CUDA device"
    state = "" if usable or not found else "unfit device"
    return Probe(available=bool(usable), mode=mode, devices=usable, reason=reason, versions=versions, found=found, state=state)


def _device(runtime: Any, number: int, nvrtc: Any) -> DeviceInfo:
    facts = runtime.getDeviceProperties(number)
    major, minor, name = facts["major"], facts["minor"], facts["name"].decode()
    reason = ""
    if nvrtc is not None and 10 * major + minor not in nvrtc.getSupportedArchs():
        known = nvrtc.getSupportedArchs()
        reason = (
            f"NVRTC {'.'.join(map(str, nvrtc.getVersion()))} does not know cuda:{number} ({name}, sm_{major}{minor}), it has "
            f"sm_{min(known)} to sm_{max(known)}; install another nvidia-cuda-nvrtc"
        )
    driver = _version(runtime.driverGetVersion())
    memory = facts["totalGlobalMem"]
    return DeviceInfo(
        device=f"cuda:{number}", name=name, api="cuda", capability=f"{major}.{minor}", driver=driver, memory=memory, reason=reason
    )


def _version(number: int) -> str:
    """13020 as "13.2", as CUDA writes its versions; empty for 0, which stands for none."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


class CupyArrays(KernelBackend):
    """The array plumbing of `KernelBackend` in CuPy; a backend adds `launch` and `schedules`."""

    def __init__(self, manifest: Manifest, mode: str, device: str, versions: dict[str, str], library: Library) -> None:
        import cupy

        super().__init__(manifest, mode, device, versions, library)
        self.cupy = cupy
        self.number = int(device.partition(":")[2] or 0)

    def here(self) -> Any:
        """The device of this backend as a context, whatever the current one is."""
        return self.cupy.cuda.Device(self.number)

    def adopt(self, x: Any, what: str) -> Any:
        which = kind(x, what)
        if which == "numpy":
            raise DeviceError(
                f"{what} is a NumPy array on the cpu, but backend {self.name!r} runs on {self.device}; pass one of CuPy or torch there"
            )
        place = device_of(x, what)
        if place != f"cuda:{self.number}":
            raise DeviceError(
                f"{what} lives on {place}, but backend {self.name!r} runs on {self.device}; move it, or choose a backend for {place}"
            )
        return x if which == "cupy" else self._from_torch(x.detach())

    def give(self, a: Any, like: Any) -> Any:
        which = kind(like, "like")
        if which == "numpy":
            return self.to_host(a)
        return a if which == "cupy" else _to_torch(a)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        with self.here():
            return self.cupy.zeros(shape, np_dtype(dtype))

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        with self.here():
            return self.cupy.empty(shape, np_dtype(dtype))

    def to_host(self, a: Any) -> np.ndarray:
        with self.here():
            return self.cupy.asnumpy(a)

    def from_host(self, a: np.ndarray) -> Any:
        with self.here():
            return self.cupy.array(a)

    def page_views(self, raw: Any, form: PageFormat) -> dict[str, Any]:
        return {
            name: raw[..., f.offset : f.offset + f.bytes].view(np_dtype(f.dtype)).reshape(*raw.shape[:2], *f.shape)
            for name, f in form.fields.items()
        }

    def gather(self, a: Any, index: list[int]) -> Any:
        with self.here():
            return a[self.cupy.array(index, np.int64)]

    def copy_page(self, pool: PagePool, source: int, target: int) -> None:
        (from_slab, i), (to_slab, j) = pool.where(source), pool.where(target)
        with self.here():
            pool.raw[to_slab][j] = pool.raw[from_slab][i]

    def first_bad(self, x: Any, counts: np.ndarray, lowest: float) -> tuple[int, int, int, int] | None:
        with self.here():
            wide = x.astype(np.float32)
            real = self.cupy.arange(x.shape[2]) < self.cupy.array(counts)[:, None]
            bad = (~self.cupy.isfinite(wide) | (wide < lowest)) & real[:, None, :, None]
            if not bad.any():
                return None
            return tuple(int(i) for i in self.cupy.argwhere(bad)[0])  # type: ignore[return-value]

    def dtype_of(self, a: Any) -> str:
        return str(a.dtype)

    def strides(self, a: Any) -> tuple[int, ...]:
        return tuple(s // a.itemsize for s in a.strides)

    def address(self, a: Any) -> int:
        return a.data.ptr

    def flat(self, a: Any, dtype: str) -> Any:
        return a.reshape(-1).view(np_dtype(dtype))

    def _from_torch(self, x: Any) -> Any:
        """A view; DLPack of bfloat16 is not understood by all versions, 16-bit integers are."""
        if dtype_name(x) == "bfloat16":
            return self.cupy.from_dlpack(x.view(sys.modules["torch"].int16)).view(ml_dtypes.bfloat16)
        return self.cupy.from_dlpack(x)


def _to_torch(a: Any) -> Any:
    torch = sys.modules["torch"]
    if a.dtype == ml_dtypes.bfloat16:
        return torch.from_dlpack(a.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(a)
