"""One element of an elementwise `tile` operation, as `arith` and `math` on scalars.

Half precision is not computed with at this level (`kivi.ir.simt`): its arithmetic is that of f32 with a rounding after each operation,
which is the correctly rounded result, since 24 >= 2 * 11 + 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kivi.errors import UnknownOperationError
from kivi.ir import tile
from kivi.ir.tile import Combine, Sign, element_of
from kivi.ir.xdsl import (
    Attribute,
    FloatAttr,
    IntegerAttr,
    IntegerType,
    Operation,
    SSAValue,
    arith,
    comparison,
    f16,
    f32,
    f64,
    i1,
    i32,
    made,
    math,
)

Emit = Callable[[Operation], SSAValue]

#: Operations that are copied as they are.
COPIED: frozenset[type[Operation]] = frozenset(
    {
        arith.ConstantOp,
        arith.AddiOp,
        arith.SubiOp,
        arith.MuliOp,
        arith.MaxSIOp,
        arith.MinSIOp,
        arith.DivUIOp,
        arith.RemUIOp,
        arith.AndIOp,
        arith.OrIOp,
        arith.XOrIOp,
        arith.ShLIOp,
        arith.ShRUIOp,
        arith.AddfOp,
        arith.SubfOp,
        arith.MulfOp,
        arith.DivfOp,
        arith.MaxnumfOp,
        arith.MinnumfOp,
        arith.NegfOp,
        arith.BitcastOp,
        math.ExpOp,
        math.Exp2Op,
        math.Log2Op,
        math.AbsFOp,
        math.RoundEvenOp,
    }
)
ELEMENTWISE = COPIED | {tile.CastOp, tile.CompareOp, tile.SelectOp}

_BITS_ONLY = {arith.ConstantOp, arith.BitcastOp}  # of COPIED: no arithmetic on their operands


def one_element(op: Operation, operands: Sequence[SSAValue], emit: Emit) -> SSAValue:
    """What an operation of `ELEMENTWISE` computes for one element of each operand. Raises `UnknownOperationError`."""
    if type(op) is tile.CastOp:
        return cast(operands[0], element_of(op.result.type), op.sign.data, emit)
    if type(op) is tile.CompareOp:
        return _compare(op, *operands, emit=emit)
    if type(op) is tile.SelectOp:
        return emit(made(arith.SelectOp, operands, operands[1].type))
    if type(op) not in COPIED:
        raise UnknownOperationError(f"there is no lowering of {op.name} to simt")
    if type(op) is arith.ConstantOp and not isinstance(op.value, IntegerAttr | FloatAttr):
        raise UnknownOperationError("there is no lowering of arith.constant of a whole tile to simt; splat a scalar")
    kind = element_of(op.results[0].type)
    if type(op) in _BITS_ONLY or kind != f16:
        return emit(type(op).create(operands=operands, result_types=[kind], properties=dict(op.properties)))
    wide = [_widened(x, emit) for x in operands]
    return _narrowed(emit(type(op).create(operands=wide, result_types=[f32], properties=dict(op.properties))), kind, emit)


def cast(x: SSAValue, target: Attribute, sign: Sign, emit: Emit) -> SSAValue:
    """A conversion by value, as `tile.cast` defines it."""
    source, signed = x.type, sign is Sign.SIGNED and x.type != i1
    if source == target:
        return x
    if isinstance(source, IntegerType) and isinstance(target, IntegerType):
        if target.width.data < source.width.data:
            return emit(made(arith.TruncIOp, (x,), target))
        return emit(made(arith.ExtSIOp if signed else arith.ExtUIOp, (x,), target))
    if isinstance(source, IntegerType):
        wide: Any = f32 if target == f16 else target  # an integer that f32 rounds is beyond the range of half
        return _narrowed(emit(made(arith.SIToFPOp if signed else arith.UIToFPOp, (x,), wide)), target, emit)
    if isinstance(target, IntegerType):
        return emit(made(arith.FPToSIOp if sign is Sign.SIGNED else arith.FPToUIOp, (_widened(x, emit),), target))
    size = {f16: 16, f32: 32, f64: 64}
    if source not in size or target not in size:
        raise UnknownOperationError(
            f"simt has no floats {source} or {target}; bfloat16 is 16 bits in memory, widened and rounded in integers (kivi.passes.numbers)"
        )
    return emit(made(arith.ExtFOp if size[source] < size[target] else arith.TruncFOp, (x,), target))


def combine(op: tile.ReduceOp | tile.ScanOp, a: SSAValue, b: SSAValue, emit: Emit) -> SSAValue:
    """Two numbers of a reduction or a scan combined, rounded to their type. A sum of products that may be contracted may be, too."""
    integer, floating = {
        Combine.ADD: (arith.AddiOp, arith.AddfOp),
        Combine.MIN: (arith.MinSIOp, arith.MinnumfOp),
        Combine.MAX: (arith.MaxSIOp, arith.MaxnumfOp),
    }[op.combine.data]
    if isinstance(a.type, IntegerType):
        return emit(made(integer, (a, b), a.type))
    flags = op.source.owner.fastmath if isinstance(op.source.owner, arith.MulfOp) else None
    return _narrowed(emit(floating(_widened(a, emit), _widened(b, emit), flags)), a.type, emit)


def identity(how: Combine, kind: Attribute) -> Attribute:
    """The number that changes nothing: -0 for a sum of floats, since 0 + -0 is 0."""
    if isinstance(kind, IntegerType):
        most = (1 << (kind.width.data - 1)) - 1
        return IntegerAttr({Combine.ADD: 0, Combine.MIN: most, Combine.MAX: -most - 1}[how], kind)
    value = {Combine.ADD: -0.0, Combine.MIN: float("inf"), Combine.MAX: float("-inf")}[how]
    return FloatAttr(value, kind)  # type: ignore[call-overload]  # any float type


def zero(kind: Attribute) -> Attribute:
    return IntegerAttr(0, kind) if isinstance(kind, IntegerType) else FloatAttr(0.0, kind)  # type: ignore[call-overload]


def shuffled(x: SSAValue, shuffle: Callable[[SSAValue], SSAValue], emit: Emit) -> SSAValue:
    """`x` passed through `shuffle`, which moves words of 32 and 64 bits."""
    kind = x.type
    if kind == f16:
        return _narrowed(shuffle(_widened(x, emit)), kind, emit)
    if isinstance(kind, IntegerType) and kind.width.data < 32:
        return emit(made(arith.TruncIOp, (shuffle(emit(made(arith.ExtUIOp, (x,), i32))),), kind))
    return shuffle(x)


def product_sum(a: SSAValue, b: SSAValue, acc: SSAValue, emit: Emit) -> SSAValue:
    """acc + a * b in f32, the product exact (`tile.dot`)."""
    x, y = (cast(factor, f32, Sign.SIGNED, emit) for factor in (a, b))
    return emit(made(math.FmaOp, (x, y, acc), f32))


def _compare(op: tile.CompareOp, a: SSAValue, b: SSAValue, emit: Emit) -> SSAValue:
    name = op.predicate.data.value
    if isinstance(a.type, IntegerType):
        return emit(comparison(arith.CmpiOp, a, b, name))
    return emit(comparison(arith.CmpfOp, _widened(a, emit), _widened(b, emit), {"eq": "oeq", "ne": "une"}.get(name, name)))


def _widened(x: SSAValue, emit: Emit) -> SSAValue:
    return emit(made(arith.ExtFOp, (x,), f32)) if x.type == f16 else x


def _narrowed(x: SSAValue, target: Attribute, emit: Emit) -> SSAValue:
    return x if x.type == target else emit(made(arith.TruncFOp, (x,), target))
