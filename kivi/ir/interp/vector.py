"""Interpreter of the `vec` dialect: each program in turn, each operation as the NumPy expression that defines it.

A pointer is a memory and an address: arguments point into the arrays that the caller gave, buffers into memory of the program. Every
access is checked, and two programs that write one byte of an argument's array are found, as at `tile` level.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kivi.errors import UnknownOperationError
from kivi.ir import tile
from kivi.ir import vector as vec
from kivi.ir.interp import tile as tile_rules
from kivi.ir.interp.memory import Memory
from kivi.ir.interp.tile import bound
from kivi.ir.vector import element_of, lanes_of
from kivi.ir.xdsl import Attribute, ModuleOp, Operation, SSAValue, arith, func, math, scf


@dataclass(frozen=True)
class Place:
    """A pointer."""

    memory: Memory
    address: int


def run(module: ModuleOp, name: str, grid: Sequence[int], arguments: dict[str, Any], memory: Memory) -> None:
    """Run kernel `name` of a module at every point of `grid`.

    arguments: for a pointer the name of an array of `memory`, for a scalar its value, in the order of the kernel's arguments.
    """
    kernel = next(op for op in module.ops if isinstance(op, func.FuncOp) and op.sym_name.data == name)
    start = bound(kernel, arguments, memory)
    start = {a: Place(memory, int(x)) if isinstance(a.type, tile.PtrType) else x for a, x in start.items()}
    for number, place in enumerate(itertools.product(*(range(n) for n in grid))):
        Program(number, (*place, 0, 0, 0)[:3], dict(start)).block(list(kernel.body.block.ops))


def dtype_of(kind: Attribute) -> np.dtype:
    """The NumPy dtype of a type's elements; integers are held signed."""
    return np.dtype(tile_rules.DTYPES[str(element_of(kind))])


class Program:
    """One program: the values so far, and its buffers."""

    def __init__(self, number: int, place: tuple[int, ...], values: dict[SSAValue, Any]) -> None:
        self.number = number
        self.place = place
        self.values = values
        self.buffers: dict[Operation, Place] = {}

    def block(self, ops: Sequence[Operation]) -> list[Any]:
        """Run operations in order; returns what the terminator yields."""
        for op in ops:
            if isinstance(op, scf.YieldOp):
                return [self.values[o] for o in op.operands]
            if isinstance(op, func.ReturnOp):
                return []
            if isinstance(op, scf.ForOp):
                self.loop(op)
                continue
            if isinstance(op, scf.IfOp):
                region = op.true_region if self.values[op.cond] else op.false_region
                results = self.block(list(region.block.ops)) if region.blocks else []
                self.values.update(zip(op.results, results, strict=True))
                continue
            rule = RULES.get(type(op))
            if rule is None:
                raise UnknownOperationError(f"the vec interpreter has no rule for {op.name}")
            with np.errstate(all="ignore"):
                result = rule(self, op, *(self.values[o] for o in op.operands))
            if op.results:
                self.values[op.results[0]] = result
        return []

    def loop(self, op: scf.ForOp) -> None:
        low, high, step = (int(self.values[o]) for o in (op.lb, op.ub, op.step))
        counter, *arguments = op.body.block.args
        carried = [self.values[o] for o in op.iter_args]
        ops = list(op.body.block.ops)
        for i in range(low, high, step):
            self.values[counter] = dtype_of(counter.type).type(i)
            self.values.update(zip(arguments, carried, strict=True))
            carried = self.block(ops)
        self.values.update(zip(op.results, carried, strict=True))


def _buffer(program: Program, op: vec.BufferOp) -> Place:
    """One place a program, however often the operation is met. It begins as NaN, or as a number that no kernel means."""
    if op not in program.buffers:
        dtype = dtype_of(op.result.type.element)  # type: ignore[attr-defined]
        array = np.full(op.count.value.data, np.nan if dtype.kind == "f" else 85, dtype)
        memory = Memory({"buffer": array}, check_races=False)
        program.buffers[op] = Place(memory, memory.address("buffer"))
    return program.buffers[op]


def _addresses(pointer: Place, offset: Any, dtype: np.dtype, lanes: int) -> np.ndarray:
    """Addresses of the lanes; an offset for all of them or for each."""
    at = np.asarray(offset).astype(np.int64)
    if at.ndim == 0:
        at = at + np.arange(max(lanes, 1))
    return pointer.address + at * dtype.itemsize


def _load(program: Program, op: vec.LoadOp | vec.GatherOp, pointer: Place, offset: Any, mask: Any = True) -> Any:
    dtype, lanes = dtype_of(op.result.type), lanes_of(op.result.type)
    at = _addresses(pointer, offset, dtype, lanes)
    out = pointer.memory.load(at, dtype, np.broadcast_to(mask, at.shape), np.zeros((), dtype))
    return out if lanes else out[0]


def _store(program: Program, op: vec.StoreOp | vec.ScatterOp, pointer: Place, offset: Any, value: Any, mask: Any = True) -> None:
    dtype = dtype_of(op.value.type)
    at = _addresses(pointer, offset, dtype, lanes_of(op.value.type))
    pointer.memory.store(at, np.atleast_1d(np.asarray(value, dtype)), np.broadcast_to(mask, at.shape), program.number)


def _fma(program: Program, op: math.FmaOp, a: Any, b: Any, c: Any) -> Any:
    """Rounded once: the product of two float32 is exact in float64, and so nearly always is the sum; where it is not, it is rounded to
    odd, so that the second rounding decides as one would."""
    product, c64 = np.asarray(a, np.float64) * np.asarray(b, np.float64), np.asarray(c, np.float64)
    total = product + c64
    rest = (product - (total - (total - product))) + (c64 - (total - product))  # what the addition lost
    odd = (total.view(np.int64) & 1) == 1
    away = np.nextafter(total, np.where(rest > 0, np.inf, -np.inf))
    total = np.where((rest != 0) & ~odd & np.isfinite(total), away, total)
    return total.astype(np.float32)


def _cast(program: Program, op: vec.CastOp, x: Any) -> Any:
    x, target = np.asarray(x), dtype_of(op.result.type)
    unsigned = op.sign.data is tile.Sign.UNSIGNED
    if x.dtype.kind == "f" and target.kind == "i":
        return x.astype(np.int64).astype(target) if unsigned else x.astype(target)
    if x.dtype.kind == "i" and unsigned:
        x = x.view(f"uint{8 * x.dtype.itemsize}")
    return (x & 1).astype(np.bool_) if target == np.bool_ else x.astype(target)


def _select(program: Program, op: vec.SelectOp, condition: Any, a: Any, b: Any) -> Any:
    return np.where(condition, a, b)


def _lookup(program: Program, op: vec.LookupOp, table: Any, index: Any) -> Any:
    return table[index & (vec.TABLE - 1)]


#: Elementwise operations mean what they mean at `tile` level.
RULES: dict[type, Callable[..., Any]] = {
    kind: rule for kind, rule in tile_rules.RULES.items() if kind.__module__ in (arith.__name__, math.__name__)
} | {
    math.FmaOp: _fma,
    arith.BitcastOp: lambda p, op, x: np.asarray(x).view(dtype_of(op.result.type)),
    vec.ProgramIdOp: lambda p, op: np.int32(p.place[op.axis.value.data]),
    vec.IotaOp: lambda p, op: np.arange(lanes_of(op.result.type), dtype=dtype_of(op.result.type)),
    vec.BroadcastOp: lambda p, op, x: np.full(lanes_of(op.result.type), x, dtype_of(op.result.type)),
    vec.ShuffleOp: lambda p, op, x: x[list(op.order.get_values())],
    vec.LookupOp: _lookup,
    vec.CastOp: _cast,
    vec.CompareOp: tile_rules.RULES[tile.CompareOp],
    vec.SelectOp: _select,
    vec.BufferOp: _buffer,
    vec.LoadOp: _load,
    vec.GatherOp: _load,
    vec.StoreOp: _store,
    vec.ScatterOp: _store,
    vec.PrefetchOp: lambda p, op, pointer, offset: None,
    vec.ReduceOp: lambda p, op, x: tile_rules.REDUCTIONS[op.combine.data.value].reduce(x, dtype=x.dtype),
}
