"""Kernels of this backend: lowering, printing and loading.

Attention over pages in layout `lanes32` (`kivi.passes.vector_attention`) and what is done to rows of a call (`kivi.passes.vector_rows`) are
built at `vec` level; every other kernel is a `tile` kernel lowered by `kivi.passes.tile_to_vector`. Rows are sealed by one kernel where the
layout allows it (`kivi.passes.vector_seal`).
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llvmlite
import numpy as np

from kivi import jit
from kivi.backends.cpu import compile as compiler
from kivi.backends.cpu import threads
from kivi.backends.cpu.compile import Machine
from kivi.jit import Generated
from kivi.kernels.library import Library
from kivi.kernels.request import Request, lower

if TYPE_CHECKING:
    from kivi.passes.tensors import Kernel

ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
#: Arguments that the driver keeps at 1: channels of a row are neighbours.
ONES = ("x_channel", "q_channel", "k_channel", "v_channel")
SEALS = ("key.seal", "value.seal")  # scales, origins and words in one kernel
FINITE = "rows.finite"
ZONES = {"cache.history": "history", "cache.tail": "tail"}


class CpuLibrary(Library):
    """The kernels of one machine."""

    def __init__(self, machine: Machine) -> None:
        versions = {"llvmlite": llvmlite.__version__, "target": machine.target}
        super().__init__("cpu", versions, lambda kernel, request: printed(kernel), lambda g, source: Launch(g, machine), ".ll")
        self.machine = machine

    def printed(self, request: Request) -> tuple[Generated, Path]:
        key = request.key(self.backend, self.versions)
        return jit.generated(key, lambda: printed(lowered(request, self.machine.target)), self.suffix)


@cache
def library(machine: Machine) -> CpuLibrary:
    """The kernels of this process for one machine."""
    return CpuLibrary(machine)


def lowered(request: Request, target: str) -> Kernel:
    """The `vec` kernel of a request. Imports the compiler."""
    from kivi.passes import tile_to_vector, vector_attention, vector_rows
    from kivi.passes.vector_target import TARGETS

    form = request.option("form")
    if request.entry in ZONES and vector_attention.serves(form):
        q_heads, queries = request.option("q_heads"), request.option("schedule").queries
        schedule = vector_attention.schedule_for(TARGETS[target], q_heads // form.kv_heads, queries)
        return vector_attention.attention_kernel(ZONES[request.entry], form, q_heads, request.dtype, schedule, TARGETS[target])
    if request.entry == FINITE:
        return vector_rows.finite_kernel(request.dtype, request.channels, TARGETS[target])
    if request.entry == "rows.keep_rows":
        return vector_rows.keep_rows_kernel(request.dtype, request.option("heads"), request.channels, TARGETS[target])
    return tile_to_vector.lower(tiled(request), TARGETS[target], ONES)


def tiled(request: Request) -> Kernel:
    """The `tile` kernel of a request. Imports the compiler."""
    from kivi.passes import vector_seal
    from kivi.passes.clean import clean

    if request.entry not in SEALS:
        return lower(request)
    build = vector_seal.key_seal_kernel if request.entry == "key.seal" else vector_seal.value_seal_kernel
    kernel = build(request.option("form"), request.dtype)
    clean(kernel.module)
    return kernel


def printed(kernel: Kernel) -> Generated:
    """A `vec` kernel as LLVM IR. Imports the compiler."""
    from kivi.backends.cpu import emit

    text = emit.emit(kernel.module)
    digest = hashlib.sha256(text.encode()).hexdigest()  # an instruction an operation: the text is the IR, and printed already
    return Generated(kernel.name, text, emit.signature(kernel.module, kernel.name), kernel.grid, digest)


class Launch:
    """A kernel of this process. Callable with its programs and its arguments in order; NumPy arrays and numbers."""

    def __init__(self, generated: Generated, machine: Machine) -> None:
        self.name = generated.name
        self.address = compiler.address(generated.source, generated.name, machine)
        self.entry = ENTRY(self.address)
        self.packers = [PACKERS["*" if kind.startswith("*") else kind] for kind in generated.signature.values()]
        self.slots = ctypes.c_int64 * max(1, len(self.packers))
        self.seconds = 0.0  # a program's, as last measured

    def __call__(self, programs: tuple[int, ...], arguments: list[Any]) -> None:
        n0, n1, n2 = (*programs, 1, 1, 1)[:3]
        total = n0 * n1 * n2
        slots = self.slots(*self.pack(arguments))
        workers = threads.count() if total > 1 and self.seconds * total > threads.WORTH else 1
        start = time.perf_counter()
        threads.run(self.entry, slots, total, n1, n2, workers)
        if total:
            self.seconds = (time.perf_counter() - start) * min(workers, total) / total

    def pack(self, arguments: list[Any]) -> list[int]:
        """A slot of 8 bytes an argument."""
        return [pack(x) for pack, x in zip(self.packers, arguments, strict=True)]


def _pointer(a: np.ndarray) -> int:
    return a.ctypes.data


def _bits_of_float(x: float) -> int:
    return _INT.unpack(_FLOAT.pack(x))[0]


_FLOAT, _INT = struct.Struct("<f"), struct.Struct("<i")
PACKERS: dict[str, Callable[[Any], int]] = {"*": _pointer, "f32": _bits_of_float, "i32": int, "i64": int}
