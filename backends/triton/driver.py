"""The Triton backend's driver: torch tensors in, generated kernels launched on their device and the caller's stream."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton

from kivi.arrays import kind
from kivi.backend import Backend, DeviceInfo, Manifest, Probe
from kivi.backends.triton.kernels import library, options
from kivi.backends.triton.schedule import schedules
from kivi.errors import DeviceError
from kivi.kernels.backend import KernelBackend
from kivi.kernels.library import Loaded
from kivi.pool import PageFormat, PagePool
from kivi.schedule import Schedule

TORCH = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "int32": torch.int32,
    "int64": torch.int64,
}
#: How a tensor reads in a kernel: the dialect has signless integers, and bfloat16 is 16 bits.
SIGNLESS = {torch.bfloat16: torch.int16, torch.uint8: torch.int8, torch.uint16: torch.int16, torch.uint32: torch.int32}


def probe(mode: str, device: str) -> Probe:
    """Interpreter: always. Device: CUDA or ROCm devices that torch sees."""
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    if mode == "interpreter":
        return Probe(available=True, mode=mode, devices=("cpu",), versions=versions)
    if not torch.cuda.is_available():
        return Probe(available=False, mode=mode, reason=f"torch {torch.__version__} sees no CUDA or ROCm device", versions=versions)
    found = tuple(_device(i) for i in range(torch.cuda.device_count()))
    return Probe(available=True, mode=mode, devices=tuple(info.device for info in found), versions=versions, found=found)


def _device(number: int) -> DeviceInfo:
    """A device as torch describes it; AMD's are called cuda, too."""
    facts = torch.cuda.get_device_properties(number)
    hip = torch.version.hip is not None
    capability = facts.gcnArchName.partition(":")[0] if hip else f"{facts.major}.{facts.minor}"
    api = "hip" if hip else "cuda"
    return DeviceInfo(device=f"cuda:{number}", name=facts.name, api=api, capability=capability, memory=facts.total_memory)


def create(manifest: Manifest, mode: str, device: str) -> Backend:
    return TritonBackend(manifest, mode, device, probe(mode, device).versions)


class TritonBackend(KernelBackend):
    """Generated Triton kernels on torch tensors."""

    def __init__(self, manifest: Manifest, mode: str, device: str, versions: dict[str, str]) -> None:
        super().__init__(manifest, mode, device, versions, library(versions["triton"], interpret=mode == "interpreter"))

    # array plumbing

    def adopt(self, x: Any, what: str) -> torch.Tensor:
        if kind(x, what) == "numpy":
            if not self.device.startswith("cpu"):
                raise DeviceError(
                    f"{what} is a NumPy array on the cpu, but backend 'triton' runs on {self.device}; pass a torch tensor there"
                )
            if not (x.flags.writeable and x.flags.aligned) or any(s < 0 for s in x.strides):  # torch has no such views
                x = x.copy()
            if x.dtype == ml_dtypes.bfloat16:
                return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(x)
        if kind(x, what) == "cupy":
            x = torch.from_dlpack(x)
        if str(x.device) != self.device:
            raise DeviceError(
                f"{what} lives on {x.device}, but backend 'triton' runs on {self.device}; move it, or choose a backend for {x.device}"
            )
        return x.detach()

    def give(self, a: torch.Tensor, like: Any) -> Any:
        which = kind(like, "like")
        if which == "torch":
            return a
        if which == "cupy":
            return sys.modules["cupy"].from_dlpack(a)
        return self.to_host(a)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=TORCH[dtype], device=self.device)

    def to_host(self, a: torch.Tensor) -> np.ndarray:
        a = a.detach().cpu()
        return a.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if a.dtype is torch.bfloat16 else a.numpy()

    def from_host(self, a: np.ndarray) -> torch.Tensor:
        t = torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16) if a.dtype == ml_dtypes.bfloat16 else torch.from_numpy(a.copy())
        return t.to(self.device)

    def page_views(self, raw: torch.Tensor, form: PageFormat) -> dict[str, torch.Tensor]:
        return {
            name: raw[..., f.offset : f.offset + f.bytes].view(TORCH[f.dtype]).unflatten(-1, f.shape) for name, f in form.fields.items()
        }

    def gather(self, a: torch.Tensor, index: list[int]) -> torch.Tensor:
        return a[torch.tensor(index, device=a.device)]

    def copy_page(self, pool: PagePool, source: int, target: int) -> None:
        (from_slab, i), (to_slab, j) = pool.where(source), pool.where(target)
        pool.raw[to_slab][j].copy_(pool.raw[from_slab][i])

    def first_bad(self, x: torch.Tensor, counts: np.ndarray, lowest: float) -> tuple[int, int, int, int] | None:
        bad = ~torch.isfinite(x) | (x.float() < lowest)
        if (counts < x.shape[2]).any():
            real = torch.arange(x.shape[2], device=x.device) < torch.from_numpy(counts).to(x.device)[:, None]
            bad &= real[:, None, :, None]
        if not bad.any():
            return None
        return tuple(torch.nonzero(bad)[0].tolist())  # type: ignore[return-value]

    # kernels

    def empty(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=TORCH[dtype], device=self.device)

    def dtype_of(self, a: torch.Tensor) -> str:
        return str(a.dtype).removeprefix("torch.")

    def strides(self, a: torch.Tensor) -> tuple[int, ...]:
        return a.stride()

    def address(self, a: torch.Tensor) -> int:
        return a.data_ptr()

    def flat(self, a: torch.Tensor, dtype: str) -> torch.Tensor:
        return a.view(-1).view(TORCH[dtype])

    def schedules(self, form: PageFormat, q_heads: int, rows: int) -> dict[str, Schedule]:
        return schedules(self.mode, form, q_heads, rows)

    def launch(self, loaded: Loaded, programs: tuple[int, ...], arguments: list[Any]) -> None:
        """Launch under the device of the tensors, whatever the current one is."""
        given = [_signless(a) for a in arguments]
        with self._guard():
            if self.mode == "interpreter":
                loaded.launch[programs](*given)
            else:
                loaded.launch[programs](*given, **options(loaded.generated))

    # capturing a step: a CUDA or HIP graph; an interpreter plays the launches again

    can_capture = True

    def capture(self, launches: Callable[[], None]) -> Callable[[], None]:
        if self.mode == "interpreter":
            return launches
        with self._guard():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launches()
        return graph.replay

    def write(self, target: torch.Tensor, source: Any) -> None:
        source = torch.from_numpy(source) if isinstance(source, np.ndarray) else source
        if source.device.type == "cpu" and target.device.type != "cpu":
            source = source.pin_memory()  # a copy from other memory would wait for it
        target.copy_(source, non_blocking=True)

    def first_bad_place(self, x: torch.Tensor, lowest: float) -> torch.Tensor:
        bad = (~torch.isfinite(x) | (x.float() < lowest)).reshape(-1).int()
        return ((bad.argmax() + 1) * bad.amax()).int()

    def total(self, flag: torch.Tensor) -> torch.Tensor:
        return flag.sum(dtype=torch.int32)

    def _guard(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.mode == "interpreter" else torch.cuda.device(self.device)


def _signless(x: Any) -> Any:
    return x.view(SIGNLESS[x.dtype]) if isinstance(x, torch.Tensor) and x.dtype in SIGNLESS else x
