"""Interpreter of the `tile` dialect: each program in turn, each operation as the NumPy expression that defines it.

Float arithmetic runs in the element type with one rounding an operation; for half and bfloat16 NumPy rounds the float32 result,
which is the correctly rounded one. Sums may be taken in any order by the dialect; NumPy's is one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from kivi.errors import KiviError, UnknownOperationError
from kivi.ir import tile
from kivi.ir.interp.memory import Memory
from kivi.ir.tile import element_of, shape_of
from kivi.ir.xdsl import Attribute, ModuleOp, Operation, SSAValue, arith, func, math, scf

DTYPES = {
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "bf16": ml_dtypes.bfloat16,
    "i1": np.bool_,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
}


class BrokenPromiseError(KiviError):
    """A value is not what `tile.multiple` or the attribute `tile.align` promised."""


def run(module: ModuleOp, name: str, grid: Sequence[int], arguments: dict[str, Any], memory: Memory) -> None:
    """Run kernel `name` of a module at every point of `grid`.

    arguments: for a pointer the name of an array of `memory`, for a scalar its value, in the order of the kernel's arguments.
    """
    kernel = next(op for op in module.ops if isinstance(op, func.FuncOp) and op.sym_name.data == name)
    start = bound(kernel, arguments, memory)
    for number, place in enumerate(itertools.product(*(range(n) for n in grid))):
        Program(number, (*place, 0, 0, 0)[:3], dict(start), memory).block(list(kernel.body.block.ops))


def bound(kernel: func.FuncOp, arguments: dict[str, Any], memory: Memory) -> dict[SSAValue, Any]:
    """What the arguments of a kernel are: addresses and scalars. Raises `TypeError`, `BrokenPromiseError`."""
    block, name, promised = kernel.body.block, kernel.sym_name.data, tile.alignment(kernel)
    if len(arguments) != len(block.args):
        raise TypeError(f"kernel {name!r} takes {len(block.args)} arguments, got {len(arguments)}")
    start: dict[SSAValue, Any] = {}
    for argument, given in zip(block.args, arguments.values(), strict=True):
        is_pointer = isinstance(argument.type, tile.PtrType)
        start[argument] = np.int64(memory.address(given)) if is_pointer else dtype_of(argument.type).type(given)
    for argument, bytes_ in promised.items():
        if start[argument] % bytes_:
            raise BrokenPromiseError(
                f"argument {argument.name_hint!r} of kernel {name!r} was promised to be a multiple of {bytes_} bytes and is "
                f"{int(start[argument]):#x}"
            )
    return start


def dtype_of(kind: Attribute) -> np.dtype:
    """The NumPy dtype of a type's elements; integers are held signed."""
    return np.dtype(DTYPES[str(element_of(kind))])


class Program:
    """One program: the values so far, and a rule for each operation."""

    def __init__(self, number: int, place: tuple[int, ...], values: dict[SSAValue, Any], memory: Memory) -> None:
        self.number = number
        self.place = place
        self.values = values
        self.memory = memory

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
            rule = RULES.get(type(op))
            if rule is None:
                raise UnknownOperationError(f"the tile interpreter has no rule for {op.name}")
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


def _unsigned(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}") if x.dtype.kind == "i" else x


def _same(f: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A binary rule in the operands' own dtype."""
    return lambda program, op, a, b: np.asarray(f(a, b)).astype(np.asarray(a).dtype)


def _on_unsigned(f: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def rule(program: Program, op: Operation, a: Any, b: Any) -> Any:
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype == np.bool_:
            return f(a, b)
        return np.asarray(f(_unsigned(a), _unsigned(b))).astype(_unsigned(a).dtype).view(a.dtype)

    return rule


def _cast(program: Program, op: tile.CastOp, x: Any) -> Any:
    x, target = np.asarray(x), dtype_of(op.result.type)
    if op.sign.data is tile.Sign.UNSIGNED:
        if x.dtype.kind == "i" and target.kind in "iuf":
            x = _unsigned(x)
        elif x.dtype.kind not in "iub" and target.kind == "i":
            return x.astype(np.float64).astype(np.int64).astype(target)
    if x.dtype.kind in "iu" and target == np.bool_:
        return (x & 1).astype(np.bool_)
    return x.astype(target)


def _compare(program: Program, op: tile.CompareOp, a: Any, b: Any) -> Any:
    name = op.predicate.data.value
    if name in ("eq", "ne"):
        return np.equal(a, b) if name == "eq" else np.not_equal(a, b)
    if name.startswith("u"):
        a, b = _unsigned(a), _unsigned(b)
    return {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}[name[1:]](a, b)


def _load(program: Program, op: tile.LoadOp, pointer: Any, offset: Any, mask: Any = True, other: Any = 0) -> Any:
    dtype = dtype_of(op.result.type)
    addresses = pointer + np.asarray(offset).astype(np.int64) * dtype.itemsize
    addresses, shape = np.atleast_1d(addresses), np.shape(addresses)
    out = program.memory.load(addresses, dtype, np.broadcast_to(mask, addresses.shape), np.asarray(other).astype(dtype))
    return out.reshape(shape)


def _store(program: Program, op: tile.StoreOp, pointer: Any, offset: Any, value: Any, mask: Any = True) -> None:
    dtype = dtype_of(op.value.type)
    addresses = np.atleast_1d(pointer + np.asarray(offset).astype(np.int64) * dtype.itemsize)
    program.memory.store(addresses, np.asarray(value, dtype), np.broadcast_to(mask, addresses.shape), program.number)


def _multiple(program: Program, op: tile.MultipleOp, x: Any) -> Any:
    if int(x) % op.of.value.data:
        raise BrokenPromiseError(f"a value that was promised to be a multiple of {op.of.value.data} is {int(x)}")
    return x


REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}


def _reduce(program: Program, op: tile.ReduceOp, x: Any) -> Any:
    how = REDUCTIONS[op.combine.data.value]
    axis = op.axis.value.data
    if x.dtype == ml_dtypes.bfloat16:  # its ufuncs do not reduce; float32 holds every bfloat16
        return how.reduce(x.astype(np.float32), axis=axis, keepdims=True).astype(x.dtype)
    return how.reduce(x, axis=axis, keepdims=True, dtype=x.dtype)


def _constant(program: Program, op: arith.ConstantOp) -> Any:
    return dtype_of(op.result.type).type(op.value.value.data)  # type: ignore[attr-defined]


def _dot(program: Program, op: tile.DotOp, a: Any, b: Any, acc: Any) -> Any:
    return (acc.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)).astype(acc.dtype)


RULES: dict[type, Callable[..., Any]] = {
    arith.ConstantOp: _constant,
    arith.AddiOp: _same(np.add),
    arith.SubiOp: _same(np.subtract),
    arith.MuliOp: _same(np.multiply),
    arith.MaxSIOp: _same(np.maximum),
    arith.MinSIOp: _same(np.minimum),
    arith.DivUIOp: _on_unsigned(np.floor_divide),
    arith.RemUIOp: _on_unsigned(np.remainder),
    arith.AndIOp: _on_unsigned(np.bitwise_and),
    arith.OrIOp: _on_unsigned(np.bitwise_or),
    arith.XOrIOp: _on_unsigned(np.bitwise_xor),
    arith.ShLIOp: _on_unsigned(np.left_shift),
    arith.ShRUIOp: _on_unsigned(np.right_shift),
    arith.AddfOp: _same(np.add),
    arith.SubfOp: _same(np.subtract),
    arith.MulfOp: _same(np.multiply),
    arith.DivfOp: _same(np.divide),
    arith.MaxnumfOp: _same(np.fmax),
    arith.MinnumfOp: _same(np.fmin),
    arith.NegfOp: lambda p, op, x: np.negative(x),
    arith.BitcastOp: lambda p, op, x: np.asarray(x).view(dtype_of(op.result.type)),
    math.ExpOp: lambda p, op, x: np.exp(x),
    math.Exp2Op: lambda p, op, x: np.exp2(x),
    math.Log2Op: lambda p, op, x: np.log2(x),
    math.AbsFOp: lambda p, op, x: np.abs(x),
    math.RoundEvenOp: lambda p, op, x: np.rint(x),
    tile.ProgramIdOp: lambda p, op: np.int32(p.place[op.axis.value.data]),
    tile.RangeOp: lambda p, op: np.arange(shape_of(op.result.type)[0], dtype=np.int32),
    tile.SplatOp: lambda p, op, x: np.full(shape_of(op.result.type), x, dtype_of(op.result.type)),
    tile.ExpandOp: lambda p, op, x: np.expand_dims(x, op.axis.value.data),
    tile.BroadcastOp: lambda p, op, x: np.broadcast_to(x, shape_of(op.result.type)),
    tile.ReshapeOp: lambda p, op, x: np.reshape(x, shape_of(op.result.type)),
    tile.PermuteOp: lambda p, op, x: np.transpose(x, op.order.get_values()),
    tile.MultipleOp: _multiple,
    tile.CastOp: _cast,
    tile.CompareOp: _compare,
    tile.SelectOp: lambda p, op, c, a, b: np.where(c, a, b),
    tile.LoadOp: _load,
    tile.StoreOp: _store,
    tile.ReduceOp: _reduce,
    tile.ScanOp: lambda p, op, x: REDUCTIONS[op.combine.data.value].accumulate(x, axis=op.axis.value.data),
    tile.DotOp: _dot,
}
