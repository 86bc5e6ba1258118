"""The kernels of this process, by mode: what `kivi.kernels.library` needs to print and to load them."""

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

THREADS = 128  # of a block, for kernels without a schedule
SIMULATED_THREADS = 32  # one warp: a simulator pays for each thread


@cache
def library(versions: tuple[tuple[str, str], ...], simulate: bool) -> Library:
    """Kernels for the simulator have blocks of one warp, and are otherwise those of a device."""

    def print_(kernel: Kernel, request: Request) -> Generated:
        schedule = request.option("schedule")
        threads = SIMULATED_THREADS if simulate else schedule.threads if schedule else THREADS
        return printed(kernel, threads)

    return Library(
        f"numba_cuda-{'simulator' if simulate else 'device'}", dict(versions), print_, load_simulated if simulate else load_device
    )


def printed(kernel: Kernel, threads: int) -> Generated:
    """A `tile` kernel as Numba CUDA Python, for blocks of so many threads. Imports the compiler."""
    from kivi.backends.numba_cuda import emit
    from kivi.passes.tile_to_simt import lower

    module = lower(kernel.module, threads, verify=False)
    text = emit.emit(module)
    digest = hashlib.sha256(text.encode()).hexdigest()  # a statement an operation: the text is the IR, and printed already
    return Generated(kernel.name, text, emit.signature(module, kernel.name), kernel.grid, digest, {"threads": threads})


def load_simulated(generated: Generated, source: Path) -> Any:
    from kivi.backends.numba_cuda.simulator import Simulated

    return Simulated(generated.name, generated.source, generated.signature, generated.launch["threads"], str(source))


def load_device(generated: Generated, source: Path) -> Any:
    """A compiled kernel; Numba reads its text from the file."""
    from numba import cuda

    return cuda.jit(argument_types(generated))(function(generated, source))


def function(generated: Generated, source: Path) -> Any:
    """The function of a text that imports Numba."""
    spec = importlib.util.spec_from_file_location(f"kivi_generated_{source.stem}", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, generated.name)


def argument_types(generated: Generated) -> Any:
    """The Numba signature of a kernel: arrays of one axis, contiguous, and unsigned integers."""
    from numba import types
    from numba.cuda.types import float16  # type: ignore[attr-defined]

    kinds = {
        "i8": types.uint8,
        "i16": types.uint16,
        "i32": types.uint32,
        "i64": types.uint64,
        "f16": float16,
        "f32": types.float32,
        "f64": types.float64,
    }
    given = [types.Array(kinds[k[1:]], 1, "C") if k.startswith("*") else kinds[k] for k in generated.signature.values()]
    return types.void(*given)
