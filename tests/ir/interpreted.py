"""A backend whose kernels run under an interpreter: what drivers share, launched one program after another on checked memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import kivi
from kivi.ir.interp import tile as interp
from kivi.ir.interp.memory import Memory
from kivi.ir.tile import Tile
from kivi.ir.xdsl import func, parse
from kivi.jit import Generated
from kivi.kernels.backend import KernelBackend
from kivi.kernels.library import Library
from kivi.schedule import Schedule

REFERENCE = kivi.get_backend("reference")
#: All but the one for the history, whose loop alone is shared.
REWRITES = ("fold_scale", "unpack_in_place", "join_sums", "contract")


def printed(kernel, request) -> Generated:
    """A `tile` kernel as its own text, which is parsed again to run."""
    function = next(op for op in kernel.module.ops if isinstance(op, func.FuncOp))
    kinds = {name: str(a.type) for name, a in zip(kernel.arguments, function.body.block.args, strict=True)}
    return Generated(kernel.name, str(kernel.module), kinds, kernel.grid, "")


class Interpreted(KernelBackend, type(REFERENCE)):
    """NumPy arrays, kernels under the `tile` interpreter. `memory`: kernel name -> memory of its last launch, with bytes counted."""

    def __init__(self, schedule: Schedule | None = None, pages_per_share: int = 2) -> None:
        library = Library("interpreted", {}, printed, lambda generated, source: parse(generated.source, Tile), ".mlir")
        super().__init__(REFERENCE.manifest, "interpreter", "cpu", REFERENCE.versions, library)
        self.pages_per_share = pages_per_share
        self.tail = schedule or Schedule(tokens=8, slots="axis", rewrites=REWRITES)
        self.memory: dict[str, Memory] = {}

    def empty(self, shape, dtype):
        out = self.zeros(shape, dtype)
        return np.full_like(out, np.nan) if out.dtype.kind == "f" else out  # what no kernel wrote must show

    def dtype_of(self, a):
        return str(a.dtype)

    def strides(self, a):
        return tuple(s // a.itemsize for s in a.strides)

    def address(self, a):
        return a.ctypes.data

    def flat(self, a, dtype):
        return a.reshape(-1).view(dtype if dtype != "bfloat16" else np.int16)

    def schedules(self, form, q_heads, rows):
        return {"history": replace(self.tail, rewrites=("split_kv", *self.tail.rewrites)), "tail": self.tail}

    def _places(self, pool):
        self.slabs = pool.raw
        return super()._places(pool)

    def launch(self, loaded, programs, arguments):
        arrays: dict[str, np.ndarray] = {f"slab{i}": raw for i, raw in enumerate(getattr(self, "slabs", []))}
        given: dict[str, Any] = {}
        for name, value in zip(loaded.generated.signature, arguments, strict=True):
            if isinstance(value, np.ndarray):
                same = (other for other, a in arrays.items() if a.ctypes.data == value.ctypes.data)
                given[name] = next(same, name)
                if given[name] == name:
                    arrays[name] = np.ascontiguousarray(value) if name in "qkv" else value
            else:
                given[name] = value
        memory = Memory({name: a.view(np.int16) if str(a.dtype) == "bfloat16" else a for name, a in arrays.items()})
        interp.run(loaded.launch, loaded.generated.name, programs, given, memory)
        self.memory[loaded.generated.name] = memory
