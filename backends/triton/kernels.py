"""Printing and loading of Triton kernels.

Triton reads a kernel's source from its file, so a kernel is a module loaded from the cache folder. Whether it is interpreted is fixed
when its module runs.
"""

from __future__ import annotations

import hashlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kivi.jit import Generated
from kivi.kernels.library import Library
from kivi.kernels.request import Request

if TYPE_CHECKING:
    from kivi.passes.tensors import Kernel

THREADS = 128
WARP = 32  # Triton's `num_warps` counts these on NVIDIA; on AMD, whose waves have 64 threads, a program has twice as many


@cache
def library(version: str, interpret: bool) -> Library:
    """The kernels of this process in one mode."""
    return Library("triton", {"triton": version}, printed, lambda generated, source: load(generated, source, interpret))


def printed(kernel: Kernel, request: Request) -> Generated:
    """A `tile` kernel as Triton source. Imports the compiler."""
    from kivi.backends.triton import emit
    from kivi.passes.contract import may_contract

    kernel.module.verify()
    schedule, text = request.option("schedule"), emit.emit(kernel.module)
    return Generated(
        kernel.name,
        text,
        emit.signature(kernel.module, kernel.name),
        kernel.grid,
        hashlib.sha256(text.encode()).hexdigest(),  # a statement an operation: the text is the IR, and printed already
        {"threads": schedule.threads if schedule else THREADS, "fusion": int(schedule is not None and may_contract(kernel.module))},
    )


def options(generated: Generated) -> dict[str, Any]:
    """What the compiler is told beside the source."""
    return {"enable_fp_fusion": bool(generated.launch["fusion"]), "num_warps": generated.launch["threads"] // WARP}


def load(generated: Generated, source: Path, interpret: bool) -> Any:
    """Run the kernel's file under the asked-for mode and take the kernel from it."""
    import triton

    name = f"kivi_generated_{source.stem}{'_interpreted' if interpret else ''}"
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = interpret
    try:
        spec.loader.exec_module(module)
    finally:
        triton.knobs.runtime.interpret = before
    return getattr(module, generated.name)
