"""Lowering of `tile` to `vec`: tiles become loops over vectors of the target's width.

A tile that is only computed from others is not stored: it is an expression, evaluated for the elements that somebody needs, so a chain of
elementwise operations becomes one loop, and changes of shape cost nothing but index arithmetic. These are stored in a buffer of their
own, each by one loop nest: results of reductions, scans and dots, tiles that a loop carries, and tiles that would be evaluated too often.
The operations that write memory are loop nests too. A load may move down to its use, but not past a store that may touch its memory.

Which axis lies along the lanes is chosen for each loop nest: the one along which most addresses are neighbours. A width is always a power
of two that divides the axis, so there are no rests.

Half precision and bfloat16 are formats of memory: such a value lives as the float32 that equals it, and is rounded where it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from kivi.errors import KiviError
from kivi.ir import tile
from kivi.ir import vector_build as build
from kivi.ir.tile import PtrType, Sign, element_of, shape_of
from kivi.ir.vector_build import Pointer, Vector, buffer, constant, where
from kivi.ir.xdsl import (
    Attribute,
    BFloat16Type,
    Block,
    FunctionType,
    ImplicitBuilder,
    IntegerType,
    ModuleOp,
    Operation,
    Region,
    SSAValue,
    arith,
    bf16,
    f16,
    f32,
    func,
    i1,
    i8,
    i16,
    i32,
    math,
    scf,
)
from kivi.passes import vector_lane as place
from kivi.passes import vector_math
from kivi.passes.tensors import Kernel
from kivi.passes.vector_lane import Lane, is_place
from kivi.passes.vector_numbers import float_to_half, half_to_float, multiply_add, rounded_to_bfloat16, rounded_to_half
from kivi.passes.vector_target import Target

MOST_COST = 12  # operations that may be done again rather than stored
LOAD_COST = 6


class LoweringError(KiviError, NotImplementedError):
    """A kernel holds something that has no vector form."""


def lower(kernel: Kernel, target: Target, ones: Sequence[str] = ()) -> Kernel:
    """The kernel at `vec` level. `ones`: arguments that are promised to be 1, such as the stride of channels.

    Raises `LoweringError` naming an operation without a rule.
    """
    [function] = [op for op in kernel.module.ops if isinstance(op, func.FuncOp)]
    return replace(kernel, module=lower_function(function, target, ones))


def lower_function(function: func.FuncOp, target: Target, ones: Sequence[str] = ()) -> ModuleOp:
    """A module with one function at `vec` level; see `lower`."""
    old = function.body.block
    kinds = [_argument(a.type, target) for a in old.args]
    block = Block(arg_types=kinds)
    lowering = Lowering(target)
    for given, new in zip(old.args, block.args, strict=True):
        new.name_hint = given.name_hint
        if isinstance(given.type, PtrType):
            lowering.pointers[given] = Pointer(new)
        else:
            lowering.scalars[given] = Lane.known(1, given.type) if given.name_hint in ones else Lane(Vector(new))
    with ImplicitBuilder(block):
        lowering.block(list(old.ops))
        func.ReturnOp()
    module = ModuleOp([func.FuncOp(function.sym_name.data, FunctionType.from_lists(kinds, []), Region(block))])
    module.verify()
    return module


def _argument(kind: Attribute, target: Target) -> Attribute:
    """Types of arguments: what a target cannot convert is bits in memory."""
    if isinstance(kind, PtrType) and (isinstance(kind.element, BFloat16Type) or (kind.element == f16 and not target.half)):
        return PtrType(i16)
    return kind


def _register(element: Attribute) -> Attribute:
    """The type in which values of an element type are held."""
    return f32 if element in (f16, bf16) else element


@dataclass(frozen=True)
class Stored:
    """A tile in a buffer, row-major. Truth values are bytes."""

    buffer: Pointer
    shape: tuple[int, ...]

    @cached_property
    def strides(self) -> list[int]:
        return [prod(self.shape[i + 1 :]) for i in range(len(self.shape))]


class At:
    """Elements of a tile along the lanes of one vector: a place for every axis, and what was evaluated there."""

    def __init__(self, axes: Sequence[Lane], lanes: int) -> None:
        self.axes, self.lanes = list(axes), lanes
        self.seen: dict[SSAValue, Lane] = {}
        self.mapped: dict[tuple, At] = {}

    def to(self, key: tuple, axes: Callable[[], Sequence[Lane]]) -> At:
        """The place of the same elements in a tile of another shape; one object for one key, so that nothing is evaluated twice."""
        if key not in self.mapped:
            self.mapped[key] = At(axes(), self.lanes)
        return self.mapped[key]


class Lowering:
    """One kernel on its way down; operations go to the builder's current block."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.pointers: dict[SSAValue, Pointer] = {}
        self.scalars: dict[SSAValue, Lane] = {}
        self.stored: dict[SSAValue, Stored] = {}
        self.cost: dict[SSAValue, int] = {}
        self.pending: list[tile.LoadOp] = []  # loads that are still expressions
        self.done: set[Operation] = set()
        self.irregular: int | None = None  # accesses that are not of neighbours, counted in a trial

    # statements, in order

    def block(self, ops: Sequence[Operation]) -> None:
        for op in ops:
            if isinstance(op, scf.ForOp):
                self._loop(op)
            elif isinstance(op, tile.StoreOp):
                self._store(op)
            elif isinstance(op, (scf.YieldOp, func.ReturnOp)):
                pass
            elif not shape_of(op.results[0].type):
                self.scalars[op.results[0]] = self._compute(op, At([], 0))
            elif isinstance(op, tile.ReduceOp):
                self._reduce(op)
            elif isinstance(op, tile.ScanOp):
                self._scan(op)
            elif isinstance(op, tile.DotOp):
                self._dot(op)
            else:
                self._expression(op)
            self.done.add(op)

    def _expression(self, op: Operation) -> None:
        """A tile that may stay an expression."""
        result = op.results[0]
        if type(op) not in RULES:
            raise LoweringError(f"there is no vector form of {op.name}")
        sources = [o for o in op.operands if shape_of(o.type) and o not in self.stored]
        self.cost[result] = COST.get(type(op), 1) + sum(self.cost.get(o, 0) for o in sources)
        uses = list(result.uses)
        again = len(uses) > 1 or any(isinstance(u.operation, tile.BroadcastOp) or u.operation.parent is not op.parent for u in uses)
        if again and self.cost[result] > MOST_COST:
            self._keep(result)
        elif isinstance(op, tile.LoadOp):
            self.pending.append(op)

    def _keep(self, value: SSAValue) -> None:
        """Evaluate a tile into a buffer."""
        if value not in self.stored:
            self.stored[value] = self._into(value, self._room(value.type))

    def _room(self, kind: Attribute) -> Stored:
        return Stored(buffer(prod(shape_of(kind)), _memory(kind)), shape_of(kind))

    def _into(self, value: SSAValue, target: Stored) -> Stored:
        self._each(target.shape, [value], lambda at: self._write(target, at, self._value(value, at)))
        return target

    def _flush(self, pointer: SSAValue) -> None:
        """Before a store: do the loads that something still needs from memory that the store may touch, which is memory of its type."""
        for op in [op for op in self.pending if op.pointer.type == pointer.type]:
            if self._is_needed(op.result):
                self._keep(op.result)
            self.pending.remove(op)

    def _is_needed(self, value: SSAValue) -> bool:
        """Whether an operation to come uses a value, perhaps through expressions."""
        return any(
            use.operation not in self.done
            or (type(use.operation) in RULES and any(r not in self.stored and self._is_needed(r) for r in use.operation.results))
            for use in value.uses
        )

    # loop nests

    def _axis(self, shape: tuple[int, ...], values: Sequence[SSAValue], offset: SSAValue | None = None) -> int | None:
        """The axis to lay along the lanes to evaluate `values`, and store them at `offset`: the one with the fewest irregular accesses, the
        last of equals; None for one element."""
        candidates = [i for i, n in enumerate(shape) if n > 1]
        wide = [i for i in candidates if shape[i] % 2 == 0]
        candidates = wide or candidates
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        return min(reversed(candidates), key=lambda axis: self._accesses(shape, axis, values, offset))

    def _accesses(self, shape: tuple[int, ...], axis: int, values: Sequence[SSAValue], offset: SSAValue | None) -> int:
        """Irregular accesses of a loop nest with `axis` along the lanes, by a trial whose operations are thrown away."""
        scratch = Block()
        self.irregular = 0
        with ImplicitBuilder(scratch):
            lanes = self._lanes(shape[axis])
            somewhere = constant(0, i32)
            places = [Lane(somewhere, int(i == axis), lanes if i == axis else 1) if n > 1 else Lane.known(0) for i, n in enumerate(shape)]
            at = At(places, lanes)
            for value in values:
                self._value(value, at)
            if offset is not None:
                target = self._value(offset, at)
                self.irregular += not (target.regular and target.step == 1)
        found, self.irregular = self.irregular, None
        for op in reversed(list(scratch.ops)):
            op.detach()
            op.erase(safe_erase=False)
        return found

    def _lanes(self, extent: int) -> int:
        """The width of vectors along an axis."""
        return min(self.target.lanes, extent & -extent)

    def _each(self, shape: tuple[int, ...], values: Sequence[SSAValue], body: Callable[[At], None], offset: SSAValue | None = None) -> None:
        """body(at) for all elements of a shape; it evaluates `values`, and stores at `offset`."""
        axis = self._axis(shape, values, offset)
        lanes = self._lanes(shape[axis]) if axis is not None else 0

        def nest(i: int, places: list[Lane]) -> None:
            if i == len(shape):
                body(At(places, lanes))
                return
            self._along(shape[i], lanes if i == axis else 0, lambda p: nest(i + 1, [*places, p]))

        nest(0, [])

    def _along(self, extent: int, lanes: int, body: Callable[[Lane], None]) -> None:
        """body(place) for all elements of an axis, `lanes` at a time."""
        step = max(lanes, 1)
        if extent <= step:
            body(Lane(None, 1 if lanes else 0, number=0))
            return

        def one(i: Vector) -> list[Vector]:
            body(Lane(i, 1 if lanes else 0, align=step))
            return []

        build.loop(constant(0, i32), constant(extent, i32), [], one, step=step)

    # memory

    def _offset(self, stored: Stored, at: At) -> Lane:
        total = Lane.known(0)
        for axis, stride, extent in zip(at.axes, stored.strides, stored.shape, strict=True):
            if extent > 1:
                total = place.add(total, place.multiply(axis, Lane.known(stride), at.lanes), at.lanes)
        return total

    def _write(self, stored: Stored, at: At, x: Lane) -> None:
        value = x.full(at.lanes)
        if value.element == i1:
            value = value.to(i8)
        offset = self._offset(stored, at)
        contiguous = offset.regular and (not at.lanes or offset.step == 1)
        stored.buffer.store(offset.first if contiguous else offset.full(at.lanes), value)

    def _read(self, stored: Stored, kind: Attribute, at: At) -> Lane:
        offset = self._offset(stored, at)
        x = self._fetch(stored.buffer, offset, at.lanes, None)
        return Lane.of(x.to(i1) if element_of(kind) == i1 else x)

    def _fetch(self, pointer: Pointer, offset: Lane, lanes: int, mask: Lane | None) -> Vector:
        """Elements at an offset: one, neighbours, or gathered."""
        if offset.uniform and (mask is None or mask.uniform):
            return pointer.load(offset.first, 0, None if mask is None else mask.first)
        condition = None if mask is None else mask.spread(lanes).spread(lanes)
        if offset.regular and offset.step == 1:
            return pointer.load(offset.first, lanes, condition)
        if self.irregular is not None:
            self.irregular += 1
        return pointer.load(offset.full(lanes), lanes, condition)

    def _store(self, op: tile.StoreOp) -> None:
        self._flush(op.pointer)
        shape = shape_of(op.value.type)
        kind = op.pointer.type
        assert isinstance(kind, PtrType)
        pointer = self.pointers[op.pointer]
        parts = [v for v in (op.offset, op.value, op.mask) if v is not None]

        def body(at: At) -> None:
            offset = self._value(op.offset, at)
            mask = None if op.mask is None else self._value(op.mask, at)
            value = self._narrow(self._value(op.value, at).full(at.lanes), kind.element)
            if not at.lanes:
                pointer.store(offset.first, value, None if mask is None else mask.first)
                return
            condition = None if mask is None else mask.full(at.lanes)
            contiguous = offset.regular and offset.step == 1
            pointer.store(offset.first if contiguous else offset.full(at.lanes), value, condition)

        self._each(shape, parts, body, op.offset)

    def _narrow(self, x: Vector, element: Attribute) -> Vector:
        """A value as it is stored."""
        if element == f16:
            return x.to(f16) if self.target.half else float_to_half(x)
        if element == bf16:
            return (x.bits(i32) >> 16).to(i16)
        return x

    def _widen(self, x: Vector, element: Attribute) -> Vector:
        """A value as it is held."""
        if element == f16:
            return x.to(f32) if self.target.half else half_to_float(x)
        if element == bf16:
            return (x.to(i32) << 16).bits(f32)
        return x

    # expressions

    def _value(self, value: SSAValue, at: At) -> Lane:
        """Elements of a tile, or a scalar."""
        if not shape_of(value.type):
            return self.scalars[value]
        if value not in at.seen:
            stored = self.stored.get(value)
            if stored is not None:
                at.seen[value] = self._read(stored, value.type, at)
            else:
                owner = value.owner
                assert isinstance(owner, Operation)
                at.seen[value] = self._compute(owner, at)
        return at.seen[value]

    def _compute(self, op: Operation, at: At) -> Lane:
        rule = RULES.get(type(op))
        if rule is None:
            raise LoweringError(f"there is no vector form of {op.name}")
        return rule(self, op, at)

    # operations that are loop nests of their own

    def _reduce(self, op: tile.ReduceOp) -> None:
        shape, along = shape_of(op.source.type), op.axis.value.data
        out = self._room(op.result.type)
        axis = self._axis(shape, [op.source])
        lanes = self._lanes(shape[axis]) if axis is not None else 0
        element = _register(element_of(op.source.type))
        name = op.combine.data.value
        start = _neutral(name, element)
        horizontal = axis == along

        def combined(places: list[Lane]) -> None:
            """One vector of results."""

            def step(p: Lane, total: Vector) -> Vector:
                x = self._value(op.source, At([*places[:along], p, *places[along + 1 :]], lanes)).full(lanes)
                return _combine(name, total, x)

            width = lanes if horizontal else 0
            extent, by = shape[along], max(width, 1)
            if extent == by:
                here = At([*places[:along], Lane(None, 1 if width else 0, number=0), *places[along + 1 :]], lanes)
                total = self._value(op.source, here).full(lanes)
            else:
                first = constant(start, element, lanes)
                [total] = build.loop(
                    constant(0, i32),
                    constant(extent, i32),
                    [first],
                    lambda i, t: [step(Lane(i, 1 if width else 0, align=by), t)],
                    step=by,
                )
            result = self._rounded(total.reduce(name) if horizontal else total, element_of(op.result.type))
            self._write(out, At(places, 0 if horizontal else lanes), Lane.of(result))

        def nest(i: int, places: list[Lane]) -> None:
            if i == len(shape):
                combined(places)
            elif i == along:
                nest(i + 1, [*places, Lane.known(0)])
            else:
                self._along(shape[i], lanes if i == axis else 0, lambda p: nest(i + 1, [*places, p]))

        nest(0, [])
        self.stored[op.result] = out

    def _scan(self, op: tile.ScanOp) -> None:
        shape, along = shape_of(op.source.type), op.axis.value.data
        out = self._room(op.result.type)
        element, name = _register(element_of(op.source.type)), op.combine.data.value

        def row(places: list[Lane]) -> None:
            def step(i: Vector, total: Vector) -> list[Vector]:
                at = At([*places[:along], Lane(i), *places[along + 1 :]], 0)
                total = self._rounded(_combine(name, total, self._value(op.source, at).first), element_of(op.source.type))
                self._write(out, at, Lane.of(total))
                return [total]

            build.loop(constant(0, i32), constant(shape[along], i32), [constant(_neutral(name, element), element)], step)

        def nest(i: int, places: list[Lane]) -> None:
            if i == len(shape):
                row(places)
            elif i == along:
                nest(i + 1, [*places, Lane.known(0)])
            else:
                self._along(shape[i], 0, lambda p: nest(i + 1, [*places, p]))

        nest(0, [])
        self.stored[op.result] = out

    def _dot(self, op: tile.DotOp) -> None:
        (rows, depth), columns = shape_of(op.lhs.type), shape_of(op.rhs.type)[1]
        for operand in (op.lhs, op.rhs):
            self._keep(operand)
        out = self._room(op.result.type)

        def body(at: At) -> None:
            row, column = at.axes

            def step(k: Vector, total: Vector) -> list[Vector]:
                a = self._value(op.lhs, At([row, Lane(k)], 0)).first
                b = self._value(op.rhs, At([Lane(k), column], at.lanes)).full(at.lanes)
                return [multiply_add(b, a, total, self.target)]

            start = self._value(op.acc, at).full(at.lanes)
            [total] = build.loop(constant(0, i32), constant(depth, i32), [start], step)
            self._write(out, at, Lane.of(total))

        self._each((rows, columns), [op.acc], body)
        self.stored[op.result] = out

    def _loop(self, op: scf.ForOp) -> None:
        """Scalars are carried as values, tiles in buffers that each turn overwrites after it has computed all of them."""
        for written in {s.pointer for s in op.walk() if isinstance(s, tile.StoreOp)}:
            self._flush(written)
        counter, *arguments = op.body.block.args
        yielded = op.body.block.last_op
        assert isinstance(yielded, scf.YieldOp)
        carried = list(zip(arguments, op.iter_args, yielded.operands, op.results, strict=True))
        tiles = [c for c in carried if shape_of(c[0].type)]
        numbers = [c for c in carried if not shape_of(c[0].type)]
        for argument, start, _, _ in tiles:
            self.stored[argument] = self._into(start, self._room(start.type))

        def body(i: Vector, *state: Vector) -> list[Vector]:
            self.scalars[counter] = Lane(i)
            for (argument, *_), value in zip(numbers, state, strict=True):
                self.scalars[argument] = Lane(value)
            self.block(list(op.body.block.ops))
            fresh = [self._into(result, self._room(result.type)) for _, _, result, _ in tiles]
            for (argument, *_), source in zip(tiles, fresh, strict=True):
                self._copy(source, self.stored[argument], argument.type)
            return [self.scalars[result].first for _, _, result, _ in numbers]

        low, high, step = (self.scalars[o].first for o in (op.lb, op.ub, op.step))
        results = build.loop(low, high, [self.scalars[start].first for _, start, _, _ in numbers], body, step=step)
        for (_, _, _, result), value in zip(numbers, results, strict=True):
            self.scalars[result] = Lane(value)
        for argument, _, _, result in tiles:
            self.stored[result] = self.stored[argument]

    def _copy(self, source: Stored, target: Stored, kind: Attribute) -> None:
        flat = (prod(source.shape),)
        a, b = Stored(source.buffer, flat), Stored(target.buffer, flat)
        self._each(flat, [], lambda at: self._write(b, at, self._read(a, kind, at)))

    def _rounded(self, x: Vector, element: Attribute) -> Vector:
        """A result of float32 arithmetic in the element type that the operation has."""
        if element == f16:
            return rounded_to_half(x, self.target)
        return rounded_to_bfloat16(x) if element == bf16 else x


# -- rules of expressions: (lowering, operation, place) -> value ----------------------------------------------------------


def _memory(kind: Attribute) -> Attribute:
    """Element type of a buffer for a tile."""
    element = _register(element_of(kind))
    return i8 if element == i1 else element


def _neutral(name: str, element: Attribute) -> float:
    if name == "add":
        return 0 if isinstance(element, IntegerType) else -0.0
    if not isinstance(element, IntegerType):
        return float("inf") if name == "min" else float("-inf")
    most = (1 << (element.width.data - 1)) - 1
    return most if name == "min" else -most - 1


def _combine(name: str, a: Vector, b: Vector) -> Vector:
    return a + b if name == "add" else a.minimum(b) if name == "min" else a.maximum(b)


def _constant(low: Lowering, op: arith.ConstantOp, at: At) -> Lane:
    element, value = op.result.type, op.value.value.data  # type: ignore[attr-defined]
    if is_place(element):
        return Lane.known(int(value), element)
    return Lane(constant(value, _register(element)))


def _places(integer: Callable[[Lane, Lane, int], Lane], floating: str) -> Callable[..., Lane]:
    """A binary operation that keeps places as places."""

    def rule(low: Lowering, op: Operation, at: At) -> Lane:
        a, b = (low._value(o, at) for o in op.operands)
        if is_place(a.element):
            return integer(a, b, at.lanes)
        return _on_vectors(floating)(low, op, at)

    return rule


def _on_vectors(name: str) -> Callable[..., Lane]:
    """A method of the builder's `Vector`, rounded to the element type of the operation."""

    def rule(low: Lowering, op: Operation, at: At) -> Lane:
        first, *rest = (low._value(o, at).spread(at.lanes) for o in op.operands)
        return Lane.of(low._rounded(getattr(first, name)(*rest), element_of(op.results[0].type)))

    return rule


def _shift(low: Lowering, op: Operation, at: At) -> Lane:
    """Shifts by a known number are products and quotients of places."""
    a, b = (low._value(o, at) for o in op.operands)
    left = isinstance(op, arith.ShLIOp)
    if is_place(a.element) and b.uniform and b.number is not None and 0 <= b.number < 24 and a.regular:
        by = Lane.known(1 << b.number, a.element)
        return place.multiply(a, by, at.lanes) if left else place.divide(a, by, at.lanes)
    x, y = a.spread(at.lanes), b.spread(at.lanes)
    return Lane.of(x << y if left else x >> y)


def _cast(low: Lowering, op: tile.CastOp, at: At) -> Lane:
    x = low._value(op.source, at)
    source, target = element_of(op.source.type), element_of(op.result.type)
    if is_place(source) and is_place(target):
        return place.extend(x, target, op.sign.data, at.lanes)
    if not isinstance(source, IntegerType) and not isinstance(target, IntegerType):
        y = x.spread(at.lanes)
        return Lane.of(low._rounded(y.to(_register(target)), target))
    y, sign = x.spread(at.lanes), op.sign.data
    if source == i1:
        sign = Sign.UNSIGNED
    if isinstance(source, IntegerType):
        if source == i1 and not isinstance(target, IntegerType):
            y, source = y.to(i32), i32
        return Lane.of(low._rounded(y.to(_register(target), sign), target))
    return Lane.of(y.to(target, sign))


def _bitcast(low: Lowering, op: arith.BitcastOp, at: At) -> Lane:
    x, source, target = low._value(op.input, at).spread(at.lanes), element_of(op.input.type), element_of(op.result.type)
    if source in (f16, bf16):
        bits = float_to_half(x) if source == f16 else (x.bits(i32) >> 16).to(i16)
        return Lane.of(bits if isinstance(target, IntegerType) else low._widen(bits, target))
    if target in (f16, bf16):
        return Lane.of(half_to_float(x) if target == f16 else (x.to(i32) << 16).bits(f32))
    return Lane.of(x.bits(target))


def _compare(low: Lowering, op: tile.CompareOp, at: At) -> Lane:
    a, b = (low._value(o, at).spread(at.lanes) for o in (op.lhs, op.rhs))
    return Lane.of(build.compare(op.predicate.data, a, b))


def _select(low: Lowering, op: Operation, at: At) -> Lane:
    condition, a, b = (low._value(o, at).spread(at.lanes) for o in op.operands)
    return Lane.of(where(condition, a, b))


def _program_id(low: Lowering, op: tile.ProgramIdOp, at: At) -> Lane:
    return Lane(build.program_id(op.axis.value.data))


def _multiple(low: Lowering, op: tile.MultipleOp, at: At) -> Lane:
    x = low._value(op.source, at)
    return Lane(x.first, x.step, max(x.align, op.of.value.data) if x.align else 0, x.number)


def _range(low: Lowering, op: tile.RangeOp, at: At) -> Lane:
    return at.axes[0]


def _splat(low: Lowering, op: tile.SplatOp, at: At) -> Lane:
    return low._value(op.source, at)


def _expand(low: Lowering, op: tile.ExpandOp, at: At) -> Lane:
    axis = op.axis.value.data
    return low._value(op.source, at.to(("expand", axis), lambda: [*at.axes[:axis], *at.axes[axis + 1 :]]))


def _broadcast(low: Lowering, op: tile.BroadcastOp, at: At) -> Lane:
    shape = shape_of(op.source.type)
    axes = [Lane.known(0) if n == 1 else p for p, n in zip(at.axes, shape, strict=True)]
    return low._value(op.source, at.to(("broadcast", shape), lambda: axes))


def _permute(low: Lowering, op: tile.PermuteOp, at: At) -> Lane:
    order = tuple(op.order.get_values())
    return low._value(op.source, at.to(("permute", order), lambda: [at.axes[order.index(i)] for i in range(len(order))]))


def _reshape(low: Lowering, op: tile.ReshapeOp, at: At) -> Lane:
    old, new = shape_of(op.source.type), shape_of(op.result.type)

    def axes() -> list[Lane]:
        real = [p for p, n in zip(at.axes, new, strict=True) if n > 1]
        if [n for n in old if n > 1] == [n for n in new if n > 1]:  # only axes of length 1 come and go
            rest = iter(real)
            return [next(rest) if n > 1 else Lane.known(0) for n in old]
        linear = Lane.known(0)
        for p, n, below in zip(at.axes, new, range(1, len(new) + 1), strict=True):
            if n > 1:
                linear = place.add(linear, place.multiply(p, Lane.known(prod(new[below:])), at.lanes), at.lanes)
        out: list[Lane] = []
        for i, n in enumerate(old):
            below = prod(old[i + 1 :])
            digit = place.divide(linear, Lane.known(below), at.lanes)
            out.append(digit if i == 0 else place.remainder(digit, Lane.known(n), at.lanes) if n > 1 else Lane.known(0))
        return out

    return low._value(op.source, at.to(("reshape", old), axes))


def _load(low: Lowering, op: tile.LoadOp, at: At) -> Lane:
    element = element_of(op.result.type)
    offset = low._value(op.offset, at)
    mask = None if op.mask is None else low._value(op.mask, at)
    x = low._widen(low._fetch(low.pointers[op.pointer], offset, at.lanes, mask), element)
    if op.other is not None and mask is not None:
        x = where(mask.spread(at.lanes), x, low._value(op.other, at).spread(at.lanes))
    return Lane.of(x)


def _math(f: Callable[[Vector, Target], Vector]) -> Callable[..., Lane]:
    def rule(low: Lowering, op: Operation, at: At) -> Lane:
        if element_of(op.results[0].type) not in (f16, bf16, f32):
            raise LoweringError(f"{op.name} has a vector form for numbers of at most 32 bits")
        return Lane.of(low._rounded(f(low._value(op.operands[0], at).spread(at.lanes), low.target), element_of(op.results[0].type)))

    return rule


def _sign_of(name: str) -> Callable[..., Lane]:
    """Negation and absolute value: exact in any format."""

    def rule(low: Lowering, op: Operation, at: At) -> Lane:
        x = low._value(op.operands[0], at).spread(at.lanes)
        made = arith.NegfOp(x.value) if name == "neg" else math.AbsFOp(x.value)
        return Lane.of(Vector(made.results[0]))

    return rule


RULES: dict[type, Callable[..., Lane]] = {
    arith.ConstantOp: _constant,
    arith.AddiOp: _places(place.add, "__add__"),
    arith.SubiOp: _places(place.subtract, "__sub__"),
    arith.MuliOp: _places(place.multiply, "__mul__"),
    arith.DivUIOp: _places(place.divide, "__floordiv__"),
    arith.RemUIOp: _places(place.remainder, "__mod__"),
    arith.ShLIOp: _shift,
    arith.ShRUIOp: _shift,
    arith.AndIOp: _on_vectors("__and__"),
    arith.OrIOp: _on_vectors("__or__"),
    arith.XOrIOp: _on_vectors("__xor__"),
    arith.MaxSIOp: _on_vectors("maximum"),
    arith.MinSIOp: _on_vectors("minimum"),
    arith.AddfOp: _on_vectors("__add__"),
    arith.SubfOp: _on_vectors("__sub__"),
    arith.MulfOp: _on_vectors("__mul__"),
    arith.DivfOp: _on_vectors("__truediv__"),
    arith.MaxnumfOp: _on_vectors("maximum"),
    arith.MinnumfOp: _on_vectors("minimum"),
    arith.NegfOp: _sign_of("neg"),
    arith.BitcastOp: _bitcast,
    arith.SelectOp: _select,
    math.AbsFOp: _sign_of("abs"),
    math.ExpOp: _math(vector_math.exp),
    math.Exp2Op: _math(vector_math.exp2),
    math.Log2Op: _math(vector_math.log2),
    math.RoundEvenOp: _math(vector_math.round_even),
    tile.ProgramIdOp: _program_id,
    tile.RangeOp: _range,
    tile.SplatOp: _splat,
    tile.ExpandOp: _expand,
    tile.BroadcastOp: _broadcast,
    tile.ReshapeOp: _reshape,
    tile.PermuteOp: _permute,
    tile.MultipleOp: _multiple,
    tile.CastOp: _cast,
    tile.CompareOp: _compare,
    tile.SelectOp: _select,
    tile.LoadOp: _load,
}

#: What an operation costs when it is done again; 1 for those not named.
COST: dict[type, int] = {
    tile.RangeOp: 0,
    tile.SplatOp: 0,
    tile.ExpandOp: 0,
    tile.BroadcastOp: 0,
    tile.ReshapeOp: 0,
    tile.PermuteOp: 0,
    tile.LoadOp: LOAD_COST,
    arith.DivfOp: LOAD_COST,
    arith.DivUIOp: 4,
    arith.RemUIOp: 4,
    math.ExpOp: MOST_COST,
    math.Exp2Op: MOST_COST,
    math.Log2Op: MOST_COST,
}
