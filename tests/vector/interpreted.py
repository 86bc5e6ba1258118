"""A backend whose kernels run under the `vec` interpreter, for a target that need not be here."""

from __future__ import annotations

from typing import Any

import numpy as np

from kivi import jit
from kivi.backends.cpu import emit
from kivi.backends.cpu.kernels import ONES, lowered
from kivi.ir.interp import vector as interp
from kivi.ir.interp.memory import Memory
from kivi.ir.tile import Tile
from kivi.ir.vector import Vec
from kivi.ir.xdsl import func, parse
from kivi.jit import Generated
from kivi.kernels.library import Library
from kivi.passes.tile_to_vector import lower
from kivi.passes.vector_target import TARGETS
from kivi.schedule import Schedule, queries_of_program
from tests.ir.interpreted import Interpreted


class Texts(Library):
    """`vec` kernels as their own text, which is parsed again to run."""

    def __init__(self, target: str) -> None:
        super().__init__("vec", {"target": target}, None, lambda generated, source: parse(generated.source, Tile, Vec), ".mlir")
        self.target = target

    def printed(self, request):
        def build() -> Generated:
            kernel = lowered(request, self.target)
            return Generated(kernel.name, str(kernel.module), emit.signature(kernel.module, kernel.name), kernel.grid, "")

        return jit.generated(request.key(self.backend, self.versions), build, self.suffix)


class Vectors(Interpreted):
    """NumPy arrays, kernels under the `vec` interpreter."""

    def __init__(self, target: str, pages_per_share: int = 2) -> None:
        super().__init__(pages_per_share=pages_per_share)
        self.library = Texts(target)

    def schedules(self, form, q_heads, rows):
        queries = queries_of_program(rows, q_heads // form.kv_heads)
        tail = Schedule(tokens=8, queries=queries)
        return {"history": Schedule(tokens=8, queries=queries, rewrites=("split_kv", *tail.rewrites)), "tail": tail}

    def launch(self, loaded, programs, arguments):
        arrays: dict[str, np.ndarray] = {f"slab{i}": raw for i, raw in enumerate(getattr(self, "slabs", []))}
        given: dict[str, Any] = {}
        for name, value in zip(loaded.generated.signature, arguments, strict=True):
            given[name] = value
            if isinstance(value, np.ndarray):
                same = (other for other, a in arrays.items() if a.ctypes.data == value.ctypes.data)
                given[name] = next(same, name)
                if given[name] == name:
                    arrays[name] = value
        memory = Memory({name: a.view(np.int16) if str(a.dtype) == "bfloat16" else a for name, a in arrays.items()})
        interp.run(loaded.launch, loaded.generated.name, programs, given, memory)
        self.memory[loaded.generated.name] = memory


def launch(target: str):
    """A function that lowers a `tile` kernel for `target` and interprets it: `tests.ir.test_kernels.check_tensor` takes it."""

    def run(kernel, values, arguments):
        lowered = lower(kernel, TARGETS[target], ONES)
        grid = [int(np.prod([-(-values[name] // divisor) for name, divisor in axis])) for axis in lowered.grid]
        execute(lowered.module, lowered.name, grid, {name: arguments[name] for name in lowered.arguments})

    return run


def execute(module, name, grid, arguments) -> Memory:
    """Interpret the text of a module with every array of `arguments` in memory; returns the memory."""
    arrays = {n: a.view(np.int16) if str(a.dtype) == "bfloat16" else a for n, a in arguments.items() if isinstance(a, np.ndarray)}
    memory = Memory(arrays)
    again = parse(str(module), Tile, Vec)
    assert str(again) == str(module)
    function = next(op for op in again.ops if isinstance(op, func.FuncOp))
    assert function.sym_name.data == name
    interp.run(again, name, grid, {n: n if isinstance(a, np.ndarray) else a for n, a in arguments.items()}, memory)
    return memory
