"""A backend whose kernels run at the `simt` level, under its interpreter, and what the tests of the level share."""

from __future__ import annotations

from typing import Any

import numpy as np

from kivi.ir.interp import simt as interp
from kivi.ir.interp.memory import Memory
from kivi.ir.simt import Simt
from kivi.ir.tile import Tile
from kivi.ir.xdsl import ModuleOp, parse
from kivi.jit import Generated
from kivi.kernels.library import Library
from kivi.passes.tile_to_simt import lower
from tests.ir import interpreted
from tests.ir.interpreted import Interpreted

THREADS = 32
ORDERS = ("ascending", "descending", "random")


def execute(module: ModuleOp, name: str, grid, arguments: dict[str, Any], **how: Any) -> Memory:
    """Interpret a `simt` module with every array of `arguments` in memory; returns the memory."""
    memory = Memory({n: a for n, a in arguments.items() if isinstance(a, np.ndarray)})
    interp.run(module, name, grid, {n: n if isinstance(a, np.ndarray) else a for n, a in arguments.items()}, memory, **how)
    return memory


def printed(kernel, request) -> Generated:
    """A kernel lowered, as its own text, which is parsed again to run."""
    tiled = interpreted.printed(kernel, request)
    return Generated(kernel.name, str(lower(kernel.module, THREADS)), tiled.signature, kernel.grid, "")


class InterpretedSimt(Interpreted):
    """The kernels of `tests.ir.interpreted`, one level down. `order`: of threads."""

    order: interp.Order = "ascending"

    def __init__(self, **rest: Any) -> None:
        super().__init__(**rest)
        self.library = Library("interpreted-simt", {}, printed, lambda g, source: parse(g.source, Tile, Simt), ".mlir")

    def launch(self, loaded, programs, arguments):
        arrays: dict[str, np.ndarray] = {f"slab{i}": raw for i, raw in enumerate(getattr(self, "slabs", []))}
        given: dict[str, Any] = {}
        for name, value in zip(loaded.generated.signature, arguments, strict=True):
            given[name] = value
            if isinstance(value, np.ndarray):
                given[name] = next((other for other, a in arrays.items() if a.ctypes.data == value.ctypes.data), name)
                if given[name] == name:
                    arrays[name] = np.ascontiguousarray(value) if name in "qkv" else value
        memory = Memory({name: a.view(np.int16) if str(a.dtype) == "bfloat16" else a for name, a in arrays.items()})
        interp.run(loaded.launch, loaded.generated.name, programs, given, memory, order=self.order)
        self.memory[loaded.generated.name] = memory
