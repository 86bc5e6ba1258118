"""Writing `tile` kernels in Python: a `Tile` wraps an SSA value, operators append operations.

Two tiles of one rank are broadcast against each other, a scalar or a Python number is spread over a tile. Types never change
silently: mixing element types is an error, `to` converts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kivi.ir import tile
from kivi.ir.tile import Combine, CombineAttr, Predicate, PredicateAttr, Sign, SignAttr, element_of, shape_of, tile_of
from kivi.ir.xdsl import (
    ArrayAttr,
    Attribute,
    Block,
    DenseArrayBase,
    DictionaryAttr,
    FloatAttr,
    FunctionType,
    ImplicitBuilder,
    IntegerAttr,
    IntegerType,
    ModuleOp,
    Region,
    SSAValue,
    arith,
    bf16,
    binary,
    f16,
    f32,
    func,
    grouped,
    i1,
    i8,
    i16,
    i32,
    i64,
    integer,
    math,
    scf,
)
from kivi.ir.xdsl import constant as literal

TYPES: dict[str, Attribute] = {
    "float16": f16,
    "bfloat16": bf16,
    "float32": f32,
    "uint8": i8,
    "uint16": i16,
    "uint32": i32,
    "int32": i32,
    "int64": i64,
}


class Tile:
    """A tile or scalar under construction; see the module's docstring."""

    def __init__(self, value: SSAValue) -> None:
        self.value = value

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.value.type)

    @property
    def element(self) -> Attribute:
        return element_of(self.value.type)

    @property
    def is_integer(self) -> bool:
        return isinstance(self.element, IntegerType)

    def named(self, name: str) -> Tile:
        self.value.name_hint = name
        return self

    # arithmetic: integers wrap, floats round once an operation

    def __add__(self, other: Any) -> Tile:
        return _binary(self, other, arith.AddiOp, arith.AddfOp)

    def __radd__(self, other: Any) -> Tile:
        return self + other

    def __sub__(self, other: Any) -> Tile:
        return _binary(self, other, arith.SubiOp, arith.SubfOp)

    def __rsub__(self, other: Any) -> Tile:
        return _pair(self, other)[1] - self

    def __mul__(self, other: Any) -> Tile:
        return _binary(self, other, arith.MuliOp, arith.MulfOp)

    def __rmul__(self, other: Any) -> Tile:
        return self * other

    def __truediv__(self, other: Any) -> Tile:
        """The correctly rounded quotient of floats."""
        return _binary(self, other, None, arith.DivfOp)

    def __floordiv__(self, other: Any) -> Tile:
        """The quotient of unsigned integers."""
        return self if _is_one(other) else _binary(self, other, arith.DivUIOp, None)

    def __mod__(self, other: Any) -> Tile:
        """The remainder of unsigned integers."""
        return _binary(self, other, arith.RemUIOp, None)

    def __rshift__(self, other: Any) -> Tile:
        return _binary(self, other, arith.ShRUIOp, None)

    def __lshift__(self, other: Any) -> Tile:
        return _binary(self, other, arith.ShLIOp, None)

    def __and__(self, other: Any) -> Tile:
        return _binary(self, other, arith.AndIOp, None)

    def __or__(self, other: Any) -> Tile:
        return _binary(self, other, arith.OrIOp, None)

    def __xor__(self, other: Any) -> Tile:
        return _binary(self, other, arith.XOrIOp, None)

    # comparisons: signed integers, ordered floats

    def __lt__(self, other: Any) -> Tile:
        return _compare(self, other, Predicate.SLT, Predicate.OLT)

    def __le__(self, other: Any) -> Tile:
        return _compare(self, other, Predicate.SLE, Predicate.OLE)

    def __gt__(self, other: Any) -> Tile:
        return _compare(self, other, Predicate.SGT, Predicate.OGT)

    def __ge__(self, other: Any) -> Tile:
        return _compare(self, other, Predicate.SGE, Predicate.OGE)

    def equals(self, other: Any) -> Tile:
        return _compare(self, other, Predicate.EQ, Predicate.EQ)

    def differs(self, other: Any) -> Tile:
        return _compare(self, other, Predicate.NE, Predicate.NE)

    # shape and type

    def to(self, element: Attribute, sign: Sign = Sign.UNSIGNED) -> Tile:
        """Converted by value; `sign` says how the integer side reads."""
        if element == self.element:
            return self
        return Tile(_create(tile.CastOp, [self.value], tile_of(self.shape, element), sign=SignAttr(sign)))

    def bits(self, element: Attribute) -> Tile:
        """The same bits as another type of the same width."""
        return Tile(arith.BitcastOp(self.value, tile_of(self.shape, element)).result)

    def expand(self, axis: int) -> Tile:
        shape = [*self.shape[:axis], 1, *self.shape[axis:]]
        return Tile(_create(tile.ExpandOp, [self.value], tile_of(tuple(shape), self.element), axis=_index(axis)))

    def spread(self, shape: Sequence[int]) -> Tile:
        """Broadcast to a shape of the same rank, or a scalar to any shape."""
        if tuple(shape) == self.shape:
            return self
        op = tile.BroadcastOp if self.shape else tile.SplatOp
        return Tile(_create(op, [self.value], tile_of(tuple(shape), self.element)))

    def reshape(self, *shape: int) -> Tile:
        return self if shape == self.shape else Tile(_create(tile.ReshapeOp, [self.value], tile_of(shape, self.element)))

    def permute(self, *order: int) -> Tile:
        moved = tuple(self.shape[i] for i in order)
        return Tile(_create(tile.PermuteOp, [self.value], tile_of(moved, self.element), order=DenseArrayBase.from_list(i64, list(order))))

    def multiple_of(self, n: int) -> Tile:
        """Promise that this scalar is a multiple of n."""
        return Tile(_create(tile.MultipleOp, [self.value], self.value.type, of=_index(n)))

    # combinations

    def reduce(self, combine: str, axis: int) -> Tile:
        """One axis combined to length 1."""
        shape = list(self.shape)
        shape[axis] = 1
        kind = tile_of(tuple(shape), self.element)
        return Tile(_create(tile.ReduceOp, [self.value], kind, combine=CombineAttr(Combine(combine)), axis=_index(axis)))

    def maximum(self, other: Any) -> Tile:
        return _binary(self, other, arith.MaxSIOp, arith.MaxnumfOp)

    def minimum(self, other: Any) -> Tile:
        return _binary(self, other, arith.MinSIOp, arith.MinnumfOp)


class Pointer:
    """A kernel argument of type `!tile.ptr<...>`."""

    def __init__(self, value: SSAValue) -> None:
        self.value = value
        self.element = value.type.element  # type: ignore[attr-defined]

    def load(self, offset: Tile, mask: Tile | None = None, other: Any = None) -> Tile:
        """Elements at `offset`; where the mask is false, `other` (default 0) and no access."""
        kind = tile_of(offset.shape, self.element)
        rest = None if other is None else _constant(other, self.element).spread(offset.shape)
        groups = [[self.value], [offset.value], _optional(mask, offset.shape), [] if rest is None else [rest.value]]
        return Tile(grouped(tile.LoadOp, groups, kind).results[0])

    def store(self, offset: Tile, value: Tile, mask: Tile | None = None) -> None:
        operands = [self.value, offset.value, value.spread(offset.shape).value, *_optional(mask, offset.shape)]
        tile.StoreOp.create(operands=operands)


@dataclass(frozen=True)
class Aligned:
    """An argument that is a pointer, promised to be a multiple of `bytes`."""

    kind: tile.PtrType
    bytes: int


def kernel(name: str, arguments: Mapping[str, Attribute | Aligned], body: Callable[..., None]) -> ModuleOp:
    """A module with one kernel, not verified: who prints it does that. `body` gets a `Pointer` or `Tile` for each argument, by name."""
    kinds = [kind.kind if isinstance(kind, Aligned) else kind for kind in arguments.values()]
    block = Block(arg_types=kinds)
    wrapped: dict[str, Any] = {}
    for argument, label in zip(block.args, arguments, strict=True):
        argument.name_hint = label
        wrapped[label] = Pointer(argument) if isinstance(argument.type, tile.PtrType) else Tile(argument)
    with ImplicitBuilder(block):
        body(**wrapped)
        func.ReturnOp()
    promises = [{tile.ALIGN: _index(kind.bytes)} if isinstance(kind, Aligned) else {} for kind in arguments.values()]
    attributes = ArrayAttr([DictionaryAttr(promise) for promise in promises]) if any(promises) else None
    return ModuleOp([func.FuncOp(name, FunctionType.from_lists(kinds, []), Region(block), arg_attrs=attributes)])


def pointer(element: str | Attribute) -> tile.PtrType:
    """The type of a pointer to elements, by dtype name or type."""
    return tile.PtrType(TYPES[element] if isinstance(element, str) else element)


def program_id(axis: int) -> Tile:
    return Tile(_create(tile.ProgramIdOp, [], i32, axis=_index(axis)))


def indices(n: int, axis: int = 0, rank: int = 1) -> Tile:
    """0..n-1 along one axis of a tile of `rank` axes, the others of length 1."""
    out = Tile(_create(tile.RangeOp, [], tile_of((n,), i32)))
    for i in range(rank):
        if i != axis:
            out = out.expand(i)
    return out


def constant(value: float, element: Attribute) -> Tile:
    """A scalar."""
    return _constant(value, element)


def full(shape: Sequence[int], value: float, element: Attribute) -> Tile:
    return _constant(value, element).spread(tuple(shape))


def where(condition: Tile, a: Any, b: Any) -> Tile:
    """a where the condition holds, else b; at least one of a, b a tile."""
    first, second = _pair(a, b) if isinstance(a, Tile) else tuple(reversed(_pair(b, a)))
    shape = _joined(condition.shape, first.shape)
    condition, first, second = condition.spread(shape), first.spread(shape), second.spread(shape)
    return Tile(_create(tile.SelectOp, [condition.value, first.value, second.value], first.value.type))


def exp2(x: Tile) -> Tile:
    return Tile(math.Exp2Op(x.value).result)


def dot(a: Tile, b: Tile, acc: Tile) -> Tile:
    return Tile(_create(tile.DotOp, [a.value, b.value, acc.value], acc.value.type))


def loop(start: Any, stop: Any, carried: Sequence[Tile], body: Callable[..., Sequence[Tile]], step: int = 1) -> list[Tile]:
    """`for i in range(start, stop, step)`: body(i, *carried) returns the next carried values. Bounds are i32."""
    low, high, by = (x if isinstance(x, Tile) else _constant(x, i32) for x in (start, stop, step))
    block = Block(arg_types=[i32, *(c.value.type for c in carried)])
    with ImplicitBuilder(block):
        results = body(*(Tile(a) for a in block.args))
        scf.YieldOp(*(r.value for r in results))
    op = scf.ForOp(low.value, high.value, by.value, [c.value for c in carried], Region(block))
    return [Tile(r) for r in op.results]


# -- helpers ----------------------------------------------------------------------------------------------------------


def _create(op: Any, operands: Sequence[SSAValue], kind: Attribute, **properties: Attribute) -> SSAValue:
    return op.create(operands=operands, result_types=[kind], properties=properties).results[0]


def _index(value: int) -> IntegerAttr:
    return integer(value, i64)


def _constant(value: Any, element: Attribute) -> Tile:
    if isinstance(value, Tile):
        return value
    attribute: IntegerAttr | FloatAttr
    if isinstance(element, IntegerType):
        attribute = integer(int(value), element)
    else:
        attribute = FloatAttr(float(value), element)  # type: ignore[call-overload]  # any float type
    return Tile(literal(attribute, element))


def _pair(a: Tile, b: Any) -> tuple[Tile, Tile]:
    """Both operands in one shape; `b` may be a Python number."""
    other = _constant(b, a.element)
    if a.element != other.element:
        raise TypeError(f"a tile of {a.element} meets one of {other.element}; convert with .to()")
    shape = _joined(a.shape, other.shape)
    return a.spread(shape), other.spread(shape)


def _joined(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    if not a or not b:
        return a or b
    if len(a) != len(b) or any(x != y and 1 not in (x, y) for x, y in zip(a, b, strict=True)):
        raise TypeError(f"shapes {a} and {b} do not broadcast")
    return tuple(max(x, y) for x, y in zip(a, b, strict=True))


def _binary(a: Tile, b: Any, integer: Any, floating: Any) -> Tile:
    left, right = _pair(a, b)
    op = integer if left.is_integer else floating
    if op is None:
        raise TypeError(f"this operator is not defined for {left.element}")
    return Tile(binary(op, left.value, right.value))


def _compare(a: Tile, b: Any, integer: Predicate, floating: Predicate) -> Tile:
    left, right = _pair(a, b)
    predicate = PredicateAttr(integer if left.is_integer else floating)
    return Tile(_create(tile.CompareOp, [left.value, right.value], tile_of(left.shape, i1), predicate=predicate))


def _optional(mask: Tile | None, shape: tuple[int, ...]) -> list[SSAValue]:
    return [] if mask is None else [mask.spread(shape).value]


def _is_one(x: Any) -> bool:
    return isinstance(x, int) and x == 1
