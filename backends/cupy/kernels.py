"""The kernels of this process, by mode: what `kivi.kernels.library` needs to print and to load them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kivi.backends.cupy import shim
from kivi.backends.cupy.binaries import cached
from kivi.jit import Generated
from kivi.kernels.library import Library
from kivi.kernels.request import Request

if TYPE_CHECKING:
    from kivi.passes.tensors import Kernel


@cache
def library(versions: tuple[tuple[str, str], ...], target: str | None = None) -> Library:
    """Texts are the same for all modes; they are loaded for the shim, or for the GPUs of a target such as "sm_90a"."""
    return Library("cupy", dict(versions), printed, _load_shim if target is None else _loader(target), ".cu")


def printed(kernel: Kernel, request: Request) -> Generated:
    """A `tile` kernel as CUDA C."""
    from kivi.backends.cupy import emit  # the compiler, which a warm process does not need

    return emit.printed(kernel, request)


def _load_shim(generated: Generated, source: Path) -> shim.ShimKernel:
    sanitize = bool(os.environ.get("KIVI_SHIM_SANITIZE"))
    return shim.ShimKernel(generated.name, generated.source, generated.signature, generated.launch["threads"], sanitize)


def _loader(target: str) -> Callable[[Generated, Path], Any]:
    return lambda generated, source: _load_device(generated, target)


def _load_device(generated: Generated, target: str) -> Any:
    """A kernel function of CuPy, from machine code on disk if it was compiled before."""
    import cupy

    from kivi.backends.cupy import nvrtc

    def write(path: Path) -> None:
        path.write_bytes(nvrtc.compile_text(generated.source, generated.name, target).cubin)

    made = (generated.source, target, nvrtc.OPTIONS, nvrtc.HEADER.read_text("utf-8"), cupy.cuda.nvrtc.getVersion())
    path = cached(".cubin", made, write)
    return cupy.RawModule(path=str(path)).get_function(generated.name)
