"""One element of a tile, computed where it is asked for: tiles become scalars without being stored.

A tile that is not kept in an array (`kivi.passes.simt_plan`) is a function of an index. Expansion, broadcast, reshape and permutation only
change the index; a reduction is a loop over one axis, and reductions over axes of one length that are asked for together share a loop, so
that what they have in common is computed once. Each operation is put into the outermost open block that knows its operands: what does
not change in a loop is computed before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kivi.ir import simt, tile
from kivi.ir.tile import element_of, is_tile, shape_of
from kivi.ir.xdsl import (
    Block,
    IndexType,
    Operation,
    Region,
    SSAValue,
    UnitAttr,
    arith,
    comparison,
    grouped,
    i32,
    integer,
    made,
    memref,
    scf,
)
from kivi.passes import simt_scalar

#: A place in a tile: one number an axis, known at compile time or at run time (i32)
Number = int | SSAValue
Index = tuple[Number, ...]
INDEX = IndexType()


@dataclass(frozen=True)
class Array:
    """Where the elements of a kept tile lie: one array for the block in row-major order, or for each thread the elements that it owns."""

    memory: SSAValue
    shape: tuple[int, ...]
    shared: bool


class Elements:
    """Computes elements into `block`, in the state that memory has there.

    scalars and arrays: what tiles of the kernel have become so far. threads: threads of a block, `thread` the number of this one.
    """

    def __init__(
        self, block: Block, scalars: Mapping[SSAValue, SSAValue], arrays: Mapping[SSAValue, Array], threads: int, thread: SSAValue
    ) -> None:
        self.scalars, self.arrays, self.threads, self.thread = scalars, arrays, threads, thread
        self._blocks = [block]
        self._known: list[dict[Any, SSAValue]] = [{}]
        self._depth: dict[SSAValue, int] = {}
        self._registers = False  # whether the loop being written uses an array of a thread
        self._own: tuple[Index, Number, int] | None = None  # of the element being computed: index, slot, and the depth of its block

    # -- writing operations

    def emit(self, op: Operation, least: int = 0) -> SSAValue:
        """Put a pure operation, or a read, into the outermost open block that knows its operands, from depth `least` on; returns its
        first result."""
        depth = max((self._depth.get(o, 0) for o in op.operands), default=0)
        depth = max(depth, least)
        self._blocks[depth].add_op(op)
        for result in op.results:
            self._depth[result] = depth
        return op.results[0]

    def here(self, op: Operation) -> None:
        """Put an operation with an effect at the end of the innermost block."""
        self._blocks[-1].add_op(op)

    def constant(self, value: Any) -> SSAValue:
        """`value`: an integer or float attribute."""
        return self._once(("constant", value), lambda: made(arith.ConstantOp, (), value.get_type(), value=value))

    def number(self, x: Number) -> SSAValue:
        return self.constant(integer(x, i32)) if isinstance(x, int) else x

    def add(self, a: Number, b: Number) -> Number:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        return b if a == 0 else a if b == 0 else self._binary(arith.AddiOp, a, b)

    def mul(self, a: Number, n: int) -> Number:
        if isinstance(a, int):
            return a * n
        return a if n == 1 else self._binary(arith.MuliOp, a, n)

    def div(self, a: Number, n: int) -> Number:
        if isinstance(a, int):
            return a // n
        return a if n == 1 else self._binary(arith.DivUIOp, a, n)

    def rem(self, a: Number, n: int) -> Number:
        if isinstance(a, int):
            return a % n
        return 0 if n == 1 else self._binary(arith.RemUIOp, a, n)

    def below(self, a: Number, n: int) -> SSAValue:
        return self._once(("below", a, n), lambda: comparison(arith.CmpiOp, self.number(a), self.number(n), "slt"))

    def _binary(self, kind: Any, a: Number, b: Number) -> SSAValue:
        return self._once((kind, a, b), lambda: made(kind, (self.number(a), self.number(b)), i32))

    def _once(self, key: Any, make: Callable[[], Operation]) -> SSAValue:
        for known in self._known:
            if key in known:
                return known[key]
        value = self.emit(make())
        self._known[self._depth[value]][key] = value
        return value

    def loop(
        self, count: int, carried: Sequence[SSAValue], body: Callable[[Number, Sequence[SSAValue]], Sequence[SSAValue]]
    ) -> list[SSAValue]:
        """`body(i, carried)` for i in 0..count-1, without a loop if count is 1; returns the last carried values."""
        if count == 1:
            return list(body(0, carried))
        block = Block(arg_types=[i32, *(c.type for c in carried)])
        bounds = [self.number(x) for x in (0, count, 1)]
        outside, self._registers = self._registers, False
        with self._open(block):
            results = body(block.args[0], block.args[1:])
            block.add_op(scf.YieldOp(*results))
        op = scf.ForOp(bounds[0], bounds[1], bounds[2], carried, Region(block))
        if self._registers:
            op.attributes[simt.UNROLL] = UnitAttr()
        self._registers = outside
        self.here(op)
        for result in op.results:
            self._depth[result] = len(self._blocks) - 1
        return list(op.results)

    def guard(self, condition: SSAValue, body: Callable[[], None]) -> None:
        """`body` where the condition holds."""
        block = Block()
        with self._open(block):
            body()
            block.add_op(scf.YieldOp())
        self.here(scf.IfOp(condition, [], Region(block)))

    @contextmanager
    def _open(self, block: Block) -> Iterator[None]:
        self._blocks.append(block)
        self._known.append({})
        for argument in block.args:
            self._depth[argument] = len(self._blocks) - 1
        yield
        self._blocks.pop()
        self._known.pop()

    @contextmanager
    def _at_depth(self, depth: int) -> Iterator[None]:
        """Write as if the blocks inside were not open yet."""
        blocks, known = self._blocks, self._known
        self._blocks, self._known = blocks[: depth + 1], known[: depth + 1]
        yield
        self._blocks, self._known = blocks, known

    # -- indices

    def split(self, flat: Number, shape: Sequence[int]) -> Index:
        """The index of element `flat` in row-major order."""
        out: list[Number] = [0] * len(shape)
        axes = [i for i, n in enumerate(shape) if n != 1]
        for i in reversed(axes[1:]):
            out[i], flat = self.rem(flat, shape[i]), self.div(flat, shape[i])
        for i in axes[:1]:
            out[i] = flat  # what is left
        return tuple(out)

    def flat(self, index: Index, shape: Sequence[int]) -> Number:
        out: Number = 0
        for number, n in zip(index, shape, strict=True):
            out = self.add(self.mul(out, n), number)
        return out

    def reshaped(self, index: Index, shape: tuple[int, ...], target: tuple[int, ...]) -> Index:
        """Where an element of `shape` lies in `target`: axes are split and joined only where the two shapes differ."""
        out: list[Number] = []
        i = j = 0
        while i < len(shape) or j < len(target):
            a, b = 1, 1
            start, begin = i, j
            while True:
                if a <= b and i < len(shape) and (a < b or i == start):
                    a, i = a * shape[i], i + 1
                elif b < a or (j == begin and j < len(target)):
                    b, j = b * target[j], j + 1
                else:
                    break
            flat = self.flat(index[start:i], shape[start:i])
            out.extend(self.split(flat, target[begin:j]))
        return tuple(out)

    # -- elements of tiles

    def own(self, shape: Sequence[int], body: Callable[[Index, Number, Number], None]) -> None:
        """`body(index, flat, slot)` for each element of `shape` that this thread owns: thread t owns t, t + threads, ..."""
        size = count(shape)

        def each(slot: Number, _: Sequence[SSAValue]) -> Sequence[SSAValue]:
            flat = self.add(self.mul(slot, self.threads), self.thread)

            def inside() -> None:
                # A number of its own, known in here only, so that nothing of an element that does not exist is computed.
                place = flat if size % self.threads == 0 else self._rename(flat)
                index = self.split(place, shape)
                self._own = (index, slot, len(self._blocks) - 1)
                body(index, place, slot)
                self._own = None

            if size % self.threads:
                self.guard(self.below(flat, size), inside)
            else:
                inside()
            return ()

        self.loop(-(-size // self.threads), [], each)

    def _rename(self, x: Number) -> SSAValue:
        """`x` as a value of the innermost block."""
        op = arith.AddiOp(self.number(x), self.number(0))
        self.here(op)
        self._depth[op.result] = len(self._blocks) - 1
        return op.result

    def read(self, array: Array, index: Index) -> SSAValue:
        if array.shared:
            return self.emit(_loaded(array.memory, self.index(self.flat(index, array.shape))))
        assert self._own is not None
        mine, slot, depth = self._own
        assert index == mine
        self._registers = True
        return self.emit(_loaded(array.memory, self.index(slot)), depth)  # a thread without this element has no value

    def put(self, x: SSAValue, array: SSAValue, slot: Number) -> None:
        """Write an element of an array of this thread."""
        self._registers = True
        self.here(memref.StoreOp.get(x, array, [self.index(slot)]))

    def get(self, array: SSAValue, slot: Number) -> SSAValue:
        """Read an element of an array of this thread, here."""
        self._registers = True
        op = _loaded(array, self.index(slot))
        self.here(op)
        return op.results[0]

    def index(self, x: Number) -> SSAValue:
        return self._once(("index", x), lambda: made(arith.IndexCastOp, (self.number(x),), INDEX))

    def many(self, wanted: Sequence[tuple[SSAValue, Index]]) -> list[SSAValue]:
        """Elements of several tiles; reductions that they need share loops."""
        found: dict[tuple[SSAValue, Index], None] = {}
        for value, index in wanted:
            self._reductions(value, index, found, set())
        together: dict[tuple[int, int], list[tuple[SSAValue, Index]]] = {}
        for value, index in found:
            depth = max((self._depth.get(n, 0) for n in index if not isinstance(n, int)), default=0)
            together.setdefault((length(value.owner), depth), []).append((value, index))
        for (steps, depth), group in together.items():
            with self._at_depth(depth):
                results = self._reduce(steps, group)
            for key, result in zip(group, results, strict=True):
                self._known[depth][key] = result
        return [self.at(value, index) for value, index in wanted]

    def at(self, value: SSAValue, index: Index) -> SSAValue:
        """One element of a tile, or a scalar for the empty index."""
        if value in self.scalars:
            return self.scalars[value]
        key = (value, index)
        for known in self._known:
            if key in known:
                return known[key]
        if value in self.arrays:
            result = self.read(self.arrays[value], index)
        else:
            op = value.owner
            assert isinstance(op, Operation)
            result = self.many([key])[0] if type(op) in LOOPS else self.computed(op, index)
        self._known[self._depth.get(result, 0)][key] = result
        return result

    def computed(self, op: Operation, index: Index) -> SSAValue:
        """An element of an operation's result that takes no loop."""
        if type(op) is tile.RangeOp:
            return self.number(index[0])
        operands = [self.at(value, place) for value, place in self.sources(op, index)]
        if type(op) is tile.LoadOp:
            return self._load(op, operands)
        if type(op) in MOVES:
            return operands[0]
        return simt_scalar.one_element(op, operands, self.emit)

    def _load(self, op: tile.LoadOp, operands: list[SSAValue]) -> SSAValue:
        kind = element_of(op.result.type)
        pointer, offset, *rest = operands
        if len(rest) == 1:
            zero = simt_scalar.zero(kind)
            rest.append(self.constant(zero))
        groups = [[pointer], [offset], rest[:1], rest[1:]]
        return self.emit(grouped(simt.LoadOp, groups, kind))

    def sources(self, op: Operation, index: Index) -> list[tuple[SSAValue, Index]]:
        """Which elements of its operands an element of a result needs."""
        if type(op) not in _REARRANGED:
            return [(operand, index if is_tile(operand) else ()) for operand in op.operands]
        if isinstance(op, tile.ExpandOp):
            axis = op.axis.value.data
            return [(op.source, index[:axis] + index[axis + 1 :])]
        if isinstance(op, tile.BroadcastOp):
            return [(op.source, tuple(0 if n == 1 else i for i, n in zip(index, shape_of(op.source.type), strict=True)))]
        if isinstance(op, tile.ReshapeOp):
            return [(op.source, self.reshaped(index, shape_of(op.result.type), shape_of(op.source.type)))]
        assert isinstance(op, tile.PermuteOp)
        place = dict(zip(op.order.get_values(), index, strict=True))
        return [(op.source, tuple(place[i] for i in range(len(index))))]

    def _reductions(self, value: SSAValue, index: Index, found: dict[tuple[SSAValue, Index], None], seen: set[Any]) -> None:
        """The reductions that an element needs and that are not computed yet, without those inside them."""
        key = (value, index)
        if key in seen or value in self.scalars or value in self.arrays or any(key in known for known in self._known):
            return
        seen.add(key)
        op = value.owner
        assert isinstance(op, Operation)
        if type(op) in LOOPS:
            found[key] = None
        else:
            for source, place in self.sources(op, index):
                self._reductions(source, place, found, seen)

    def _reduce(self, steps: int, group: list[tuple[SSAValue, Index]]) -> list[SSAValue]:
        """Reductions of one length in one loop."""
        starts = []
        for value, index in group:
            op = value.owner
            if isinstance(op, tile.DotOp):
                starts.append(self.at(op.acc, index))
            else:
                assert isinstance(op, tile.ReduceOp)
                starts.append(self.constant(simt_scalar.identity(op.combine.data, element_of(value.type))))

        def body(i: Number, carried: Sequence[SSAValue]) -> list[SSAValue]:
            wanted: list[tuple[SSAValue, Index]] = []
            for value, index in group:
                op = value.owner
                if isinstance(op, tile.DotOp):
                    wanted += [(op.lhs, (index[0], i)), (op.rhs, (i, index[1]))]
                else:
                    wanted.append(term(op, index, i))
            terms = iter(self.many(wanted))
            out = []
            for (value, _), so_far in zip(group, carried, strict=True):
                op = value.owner
                if isinstance(op, tile.DotOp):
                    out.append(simt_scalar.product_sum(next(terms), next(terms), so_far, self.emit))
                else:
                    assert isinstance(op, tile.ReduceOp)
                    out.append(simt_scalar.combine(op, so_far, next(terms), self.emit))
            return out

        return self.loop(steps, starts, body)


LOOPS = frozenset({tile.ReduceOp, tile.DotOp})
MOVES = frozenset({tile.SplatOp, tile.ExpandOp, tile.BroadcastOp, tile.ReshapeOp, tile.PermuteOp, tile.MultipleOp})
_REARRANGED = frozenset({tile.ExpandOp, tile.BroadcastOp, tile.ReshapeOp, tile.PermuteOp})  # of MOVES: to another index
#: Operations whose result may be computed element by element, again wherever it is used.
LAZY = simt_scalar.ELEMENTWISE | MOVES | LOOPS | {tile.RangeOp, tile.LoadOp}


def _loaded(array: SSAValue, place: SSAValue) -> Operation:
    """A read of an array of the block or of a thread."""
    return made(memref.LoadOp, (array, place), array.type.element_type)  # type: ignore[attr-defined]


def term(op: Operation | Block, index: Index, i: Number) -> tuple[SSAValue, Index]:
    """Element i of the axis that a reduction or a scan at `index` walks."""
    assert isinstance(op, tile.ReduceOp | tile.ScanOp)
    axis = op.axis.value.data
    return op.source, (*index[:axis], i, *index[axis + 1 :])


def length(op: Operation | Block) -> int:
    """Steps of a reduction, a scan or a dot."""
    if isinstance(op, tile.DotOp):
        return shape_of(op.lhs.type)[1]
    assert isinstance(op, tile.ReduceOp | tile.ScanOp)
    return shape_of(op.source.type)[op.axis.value.data]


def count(shape: Sequence[int]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out
