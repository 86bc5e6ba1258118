"""Writing `vec` kernels in Python: a `Vector` wraps an SSA value, operators append operations.

A scalar or a Python number meets a vector by being broadcast; element types never change silently, `to` converts. Offsets are scalars
of i64, or i32 that the address arithmetic extends with its sign.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kivi.ir import vector as vec
from kivi.ir.tile import Combine, CombineAttr, Predicate, PredicateAttr, PtrType, Sign, SignAttr
from kivi.ir.vector import element_of, lanes_of, vector_of
from kivi.ir.xdsl import (
    Attribute,
    Block,
    DenseArrayBase,
    FloatAttr,
    FunctionType,
    ImplicitBuilder,
    IntegerAttr,
    IntegerType,
    ModuleOp,
    Region,
    SSAValue,
    arith,
    binary,
    func,
    i1,
    i32,
    i64,
    math,
    scf,
)
from kivi.ir.xdsl import constant as literal


class Vector:
    """A vector or scalar under construction; see the module's docstring."""

    def __init__(self, value: SSAValue) -> None:
        self.value = value

    @property
    def lanes(self) -> int:
        """The width; 0 for a scalar."""
        return lanes_of(self.value.type)

    @property
    def element(self) -> Attribute:
        return element_of(self.value.type)

    @property
    def is_integer(self) -> bool:
        return isinstance(self.element, IntegerType)

    # arithmetic: integers wrap, floats round once an operation

    def __add__(self, other: Any) -> Vector:
        return _binary(self, other, arith.AddiOp, arith.AddfOp)

    def __radd__(self, other: Any) -> Vector:
        return self + other

    def __sub__(self, other: Any) -> Vector:
        return _binary(self, other, arith.SubiOp, arith.SubfOp)

    def __mul__(self, other: Any) -> Vector:
        return _binary(self, other, arith.MuliOp, arith.MulfOp)

    def __rmul__(self, other: Any) -> Vector:
        return self * other

    def __truediv__(self, other: Any) -> Vector:
        """The correctly rounded quotient of floats."""
        return _binary(self, other, None, arith.DivfOp)

    def __floordiv__(self, other: Any) -> Vector:
        """The quotient of unsigned integers."""
        return _binary(self, other, arith.DivUIOp, None)

    def __mod__(self, other: Any) -> Vector:
        """The remainder of unsigned integers."""
        return _binary(self, other, arith.RemUIOp, None)

    def __rshift__(self, other: Any) -> Vector:
        return self if _is(other, 0) else _binary(self, other, arith.ShRUIOp, None)

    def __lshift__(self, other: Any) -> Vector:
        return self if _is(other, 0) else _binary(self, other, arith.ShLIOp, None)

    def __and__(self, other: Any) -> Vector:
        return _binary(self, other, arith.AndIOp, None)

    def __or__(self, other: Any) -> Vector:
        return _binary(self, other, arith.OrIOp, None)

    def __xor__(self, other: Any) -> Vector:
        return _binary(self, other, arith.XOrIOp, None)

    def minimum(self, other: Any) -> Vector:
        return _binary(self, other, arith.MinSIOp, arith.MinnumfOp)

    def maximum(self, other: Any) -> Vector:
        return _binary(self, other, arith.MaxSIOp, arith.MaxnumfOp)

    # comparisons: signed integers, ordered floats

    def __lt__(self, other: Any) -> Vector:
        return compare(Predicate.SLT if self.is_integer else Predicate.OLT, self, other)

    def __le__(self, other: Any) -> Vector:
        return compare(Predicate.SLE if self.is_integer else Predicate.OLE, self, other)

    def __gt__(self, other: Any) -> Vector:
        return compare(Predicate.SGT if self.is_integer else Predicate.OGT, self, other)

    def __ge__(self, other: Any) -> Vector:
        return compare(Predicate.SGE if self.is_integer else Predicate.OGE, self, other)

    def equals(self, other: Any) -> Vector:
        return compare(Predicate.EQ, self, other)

    # type and lanes

    def to(self, element: Attribute, sign: Sign = Sign.UNSIGNED) -> Vector:
        """Converted by value; `sign` says how the integer side reads."""
        if element == self.element:
            return self
        return Vector(_create(vec.CastOp, [self.value], vector_of(self.lanes, element), sign=SignAttr(sign)))

    def bits(self, element: Attribute) -> Vector:
        """The same bits as another type of the same width."""
        if element == self.element:
            return self
        return Vector(arith.BitcastOp(self.value, vector_of(self.lanes, element)).result)

    def spread(self, lanes: int) -> Vector:
        """A scalar in every lane; a vector of that width as it is."""
        if self.lanes == lanes:
            return self
        return Vector(_create(vec.BroadcastOp, [self.value], vector_of(lanes, self.element)))

    def shuffle(self, order: Sequence[int]) -> Vector:
        """Lane i of the result is lane order[i]."""
        kind = vector_of(len(order), self.element)
        return Vector(_create(vec.ShuffleOp, [self.value], kind, order=DenseArrayBase.from_list(i64, list(order))))

    def lookup(self, index: Vector) -> Vector:
        """Entries of this table of 16 that each lane of `index` names by its lowest four bits."""
        return Vector(_create(vec.LookupOp, [self.value, index.value], vector_of(index.lanes, self.element)))

    def reduce(self, combine: str) -> Vector:
        """All lanes combined to a scalar; a scalar as it is."""
        if not self.lanes:
            return self
        return Vector(_create(vec.ReduceOp, [self.value], self.element, combine=CombineAttr(Combine(combine))))


class Pointer:
    """A value of type `!tile.ptr<T>`."""

    def __init__(self, value: SSAValue) -> None:
        self.value = value
        kind = value.type
        assert isinstance(kind, PtrType)
        self.element = kind.element

    def load(self, offset: Any, lanes: int = 0, mask: Vector | None = None) -> Vector:
        """Neighbouring elements; 0 where masked. A vector of offsets gathers."""
        at = index(offset)
        lanes = at.lanes or lanes
        op = vec.GatherOp if at.lanes else vec.LoadOp
        masks = [] if mask is None else [mask.spread(lanes).value]
        return Vector(_create(op, [self.value, at.value, *masks], vector_of(lanes, self.element)))

    def store(self, offset: Any, x: Vector, mask: Vector | None = None) -> None:
        """Neighbouring elements; a vector of offsets scatters."""
        at = index(offset)
        op = vec.ScatterOp if at.lanes else vec.StoreOp
        x = x.spread(at.lanes) if at.lanes else x
        op.create(operands=[self.value, at.value, x.value, *([] if mask is None else [mask.spread(x.lanes).value])])

    def prefetch(self, offset: Any) -> None:
        vec.PrefetchOp.create(operands=[self.value, index(offset).value])


def kernel(name: str, arguments: dict[str, Attribute], body: Callable[..., None]) -> ModuleOp:
    """A module with one kernel. `body` is called with a `Pointer` or `Vector` for each argument, by name."""
    kinds = list(arguments.values())
    block = Block(arg_types=kinds)
    wrapped: dict[str, Any] = {}
    for argument, (label, kind) in zip(block.args, arguments.items(), strict=True):
        argument.name_hint = label
        wrapped[label] = Pointer(argument) if isinstance(kind, PtrType) else Vector(argument)
    with ImplicitBuilder(block):
        body(**wrapped)
        func.ReturnOp()
    return ModuleOp([func.FuncOp(name, FunctionType.from_lists(kinds, []), Region(block))])


def program_id(axis: int) -> Vector:
    return Vector(_create(vec.ProgramIdOp, [], i32, axis=IntegerAttr(axis, i64)))


def iota(lanes: int, element: Attribute = i32) -> Vector:
    return Vector(_create(vec.IotaOp, [], vector_of(lanes, element)))


def constant(value: float, element: Attribute, lanes: int = 0) -> Vector:
    attribute: IntegerAttr | FloatAttr
    if isinstance(element, IntegerType):
        attribute = IntegerAttr(int(value), element)
    else:
        attribute = FloatAttr(float(value), element)  # type: ignore[call-overload]  # any float type
    return Vector(literal(attribute, element)).spread(lanes)


def index(value: Any) -> Vector:
    """An offset or loop bound: a vector of the builder, or an int as i64."""
    return value if isinstance(value, Vector) else constant(value, i64)


def buffer(count: int, element: Attribute) -> Pointer:
    """Room for `count` elements of this program."""
    return Pointer(_create(vec.BufferOp, [], PtrType(element), count=IntegerAttr(count, i64)))


def where(condition: Vector, a: Any, b: Any) -> Vector:
    """a where the condition holds, else b; at least one of a, b a vector of the builder."""
    first, second = pair(a, b) if isinstance(a, Vector) else tuple(reversed(pair(b, a)))
    lanes = max(condition.lanes, first.lanes)
    first, second = first.spread(lanes), second.spread(lanes)
    return Vector(_create(vec.SelectOp, [condition.value, first.value, second.value], first.value.type))


def compare(predicate: Predicate, a: Vector, b: Any) -> Vector:
    left, right = pair(a, b)
    return Vector(_create(vec.CompareOp, [left.value, right.value], vector_of(left.lanes, i1), predicate=PredicateAttr(predicate)))


def fma(a: Vector, b: Vector, c: Vector) -> Vector:
    """a * b + c, rounded once."""
    lanes = max(a.lanes, b.lanes, c.lanes)
    x, y, z = (part.spread(lanes).value for part in (a, b, c))
    return Vector(math.FmaOp(x, y, z).result)


def loop(start: Any, stop: Any, carried: Sequence[Vector], body: Callable[..., Sequence[Vector]], step: Any = 1) -> list[Vector]:
    """`for i in range(start, stop, step)`: body(i, *carried) returns the next carried values. Bounds are i64, or all i32."""
    low, high = index(start), index(stop)
    by = step if isinstance(step, Vector) else constant(step, low.element)
    block = Block(arg_types=[low.element, *(c.value.type for c in carried)])
    with ImplicitBuilder(block):
        results = body(*(Vector(a) for a in block.args))
        scf.YieldOp(*(r.value for r in results))
    op = scf.ForOp(low.value, high.value, by.value, [c.value for c in carried], Region(block))
    return [Vector(r) for r in op.results]


def when(condition: Vector, body: Callable[[], None]) -> None:
    """`body`, whose effects are all in memory, where the scalar condition holds."""
    block, other = Block(), Block()
    with ImplicitBuilder(block):
        body()
        scf.YieldOp()
    with ImplicitBuilder(other):
        scf.YieldOp()
    scf.IfOp(condition.value, [], Region(block), Region(other))


# -- helpers ----------------------------------------------------------------------------------------------------------


def pair(a: Vector, b: Any) -> tuple[Vector, Vector]:
    """Both operands at one width; `b` may be a Python number."""
    other = b if isinstance(b, Vector) else constant(b, a.element)
    if a.element != other.element:
        raise TypeError(f"a vector of {a.element} meets one of {other.element}; convert with .to()")
    lanes = max(a.lanes, other.lanes)
    return a.spread(lanes), other.spread(lanes)


def _binary(a: Vector, b: Any, integer: Any, floating: Any) -> Vector:
    left, right = pair(a, b)
    op = integer if left.is_integer else floating
    if op is None:
        raise TypeError(f"this operator is not defined for {left.element}")
    return Vector(binary(op, left.value, right.value))


def _create(op: Any, operands: Sequence[SSAValue], kind: Attribute, **properties: Attribute) -> SSAValue:
    return op.create(operands=operands, result_types=[kind], properties=properties).results[0]


def _is(x: Any, value: int) -> bool:
    return isinstance(x, int) and x == value
