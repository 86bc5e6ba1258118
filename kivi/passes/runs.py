"""Loads of a tile that read runs of neighbours, so that one access can move each run.

Offsets are followed as linear forms of the indices: `range`, sums, products with constants, and the promises of `tile.multiple` and of
the alignment of pointers. What is not one of these is taken to be anything, so a load is found only where its runs are certain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd, lcm

from kivi.ir import tile
from kivi.ir.simt import WIDE, run_length
from kivi.ir.tile import alignment, element_of, is_tile, shape_of
from kivi.ir.xdsl import Block, IntegerAttr, IntegerType, Operation, SSAValue, arith, func
from kivi.passes.simt_scalar import ELEMENTWISE


@dataclass(frozen=True)
class Linear:
    """A value as base + sum of stride * index over the axes of its tile.

    divisor    a number that divides the base, 0 if the base is 0
    strides    of each axis: 0 where the value is the same along it, None where it may be anything
    number     what the value is, if it is one constant
    """

    divisor: int
    strides: tuple[int | None, ...]
    number: int | None = None

    @property
    def uniform(self) -> bool:
        return all(stride == 0 for stride in self.strides)


def runs(kernel: func.FuncOp) -> frozenset[SSAValue]:
    """The results of the loads of a `tile` kernel whose every run of `WIDE` bytes, in row-major order, is contiguous, aligned, and masked
    as a whole."""
    forms, aligned = Forms(), alignment(kernel)
    loads = [op for op in kernel.walk() if isinstance(op, tile.LoadOp) and is_tile(op.result)]
    return frozenset(op.result for op in loads if aligned.get(op.pointer, 1) % WIDE == 0 and _is_wide(op, forms))


def _is_wide(op: tile.LoadOp, forms: Forms) -> bool:
    length = run_length(element_of(op.result.type))
    if length < 2 or shape_of(op.result.type)[-1] % length or op.other is not None:
        return False
    offset = forms.of(op.offset)
    *outer, inner = offset.strides
    if inner != 1 or offset.divisor % length or any(stride is None or stride % length for stride in outer):
        return False
    return op.mask is None or forms.of(op.mask).strides[-1] == 0


class Forms:
    """The linear forms of values, each found once."""

    def __init__(self) -> None:
        self._found: dict[SSAValue, Linear] = {}

    def of(self, value: SSAValue) -> Linear:
        """The form of a value. Integers wrap, which changes neither what power of two divides them nor a run that starts at a multiple of
        its length."""
        if value not in self._found:
            self._found[value] = self._form(value)
        return self._found[value]

    def _form(self, value: SSAValue) -> Linear:
        op, rank = value.owner, len(shape_of(value.type))
        if isinstance(op, Block):
            return Linear(1, (None,) * rank)
        rule = RULES.get(type(op))
        found = rule(self, op) if rule else None
        if found is not None:
            return found
        if op.operands and type(op) in ELEMENTWISE:
            strides = [self.of(x).strides for x in op.operands]
            return Linear(1, tuple(0 if all(s[axis] == 0 for s in strides) else None for axis in range(rank)))
        return Linear(1, (None,) * rank)


def _constant(forms: Forms, op: arith.ConstantOp) -> Linear | None:
    if not isinstance(op.value, IntegerAttr):
        return None
    number = op.value.value.data
    return Linear(abs(number), (), number)


def _splat(forms: Forms, op: tile.SplatOp) -> Linear:
    return replace(forms.of(op.source), strides=(0,) * len(shape_of(op.result.type)))


def _multiple(forms: Forms, op: tile.MultipleOp) -> Linear:
    return replace(forms.of(op.source), divisor=lcm(forms.of(op.source).divisor, op.of.value.data))


def _expand(forms: Forms, op: tile.ExpandOp) -> Linear:
    form, axis = forms.of(op.source), op.axis.value.data
    return replace(form, strides=(*form.strides[:axis], 0, *form.strides[axis:]))


def _broadcast(forms: Forms, op: tile.BroadcastOp) -> Linear:
    form = forms.of(op.source)
    lengths = shape_of(op.source.type)
    return replace(form, strides=tuple(0 if n == 1 else stride for n, stride in zip(lengths, form.strides, strict=True)))


def _cast(forms: Forms, op: tile.CastOp) -> Linear | None:
    kinds = [element_of(value.type) for value in (op.source, op.result)]
    if not all(isinstance(kind, IntegerType) and kind.width.data >= 32 for kind in kinds):
        return None
    form = forms.of(op.source)
    return form if form.number is None or 0 <= form.number < 1 << 31 else replace(form, number=None)


def _sum(sign: int) -> Callable[..., Linear]:
    def rule(forms: Forms, op: Operation) -> Linear:
        a, b = (forms.of(x) for x in op.operands)
        strides = [_added(s, t, sign) for s, t in zip(a.strides, b.strides, strict=True)]
        number = None if a.number is None or b.number is None else a.number + sign * b.number
        return Linear(gcd(a.divisor, b.divisor), tuple(strides), number)

    return rule


def _added(s: int | None, t: int | None, sign: int) -> int | None:
    """The stride of a sum. An i32 may wrap before it is widened, so strides are certain modulo 2^32 only: what is 0 or 1 must not come from
    strides that cancel."""
    if s is None or t is None:
        return None
    total = s + sign * t
    return None if total in (0, 1) and (s, sign * t, t) not in ((total, 0, 0), (0, total, total)) else total


def _product(forms: Forms, op: arith.MuliOp) -> Linear | None:
    a, b = (forms.of(x) for x in op.operands)
    if a.number is not None:
        a, b = b, a
    if b.number is not None:
        strides = tuple(0 if b.number == 0 else None if s is None or s * b.number == 1 != s else s * b.number for s in a.strides)
        return Linear(a.divisor * b.divisor, strides, None if a.number is None else a.number * b.number)
    return Linear(a.divisor * b.divisor, a.strides) if a.uniform and b.uniform else None


def _quotient(forms: Forms, op: arith.DivUIOp) -> Linear | None:
    a, b = (forms.of(x) for x in op.operands)
    by = b.number or 0
    if by < 1 or by & (by - 1) or not a.uniform or a.divisor % by:
        return None
    return Linear(a.divisor // by, a.strides)


RULES: dict[type[Operation], Callable[..., Linear | None]] = {
    arith.ConstantOp: _constant,
    tile.RangeOp: lambda forms, op: Linear(0, (1,)),
    tile.SplatOp: _splat,
    tile.MultipleOp: _multiple,
    tile.ExpandOp: _expand,
    tile.BroadcastOp: _broadcast,
    tile.CastOp: _cast,
    arith.AddiOp: _sum(1),
    arith.SubiOp: _sum(-1),
    arith.MuliOp: _product,
    arith.DivUIOp: _quotient,
}
