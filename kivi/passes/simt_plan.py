"""Which tiles of a kernel are kept in arrays, and in which order they are computed.

Most tiles never exist: an element is computed where it is used (`kivi.passes.simt_element`). A tile is kept if

    a loop carries it, or it is the result of a scan;
    computing it where it is used would compute it much too often (a broadcast repeats it, a loop repeats it, several uses do);
    it is a reduction that would run twice, or that has fewer results than the block has threads, so that threads must share one;
    it was loaded before a store through the same pointer, and is used after it;
    it is loaded in runs (`kivi.passes.runs`): threads copy a run each.

Carried tiles whose elements only meet elements at their own place stay with the thread that owns them; all others are shared by the block.

A block of the IR becomes a list of steps. What is kept between two effects (a store, a loop) is sorted by what depends on what, and tiles
of one shape that do not depend on each other are computed together, so that they share loads.

What a kernel writes through one pointer it must not read through another: pointers are told apart by argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kivi.errors import UnknownOperationError
from kivi.ir import tile
from kivi.ir.simt import bytes_of
from kivi.ir.tile import element_of, is_tile, shape_of
from kivi.ir.xdsl import Block, Operation, SSAValue, arith, func, math, scf
from kivi.passes.runs import runs
from kivi.passes.simt_element import LAZY, LOOPS, count, length

LOOP_STEPS = 8  # that a loop of the kernel is taken to have
WASTE = 64  # operations an element that may be repeated because a use needs it several times
REPEATS = 1024  # operations an element that may be repeated because several uses need it
SHARED_BYTES = 40 << 10  # of tiles that are kept to save work; 48 KiB are there
SLOW = {arith.DivfOp, arith.DivUIOp, arith.RemUIOp, math.ExpOp, math.Exp2Op, math.Log2Op}


@dataclass
class Step:
    """Kept tiles of one shape that are computed together (`tiles`), or one operation with an effect (`effect`)."""

    tiles: list[SSAValue] = field(default_factory=list)
    effect: Operation | None = None
    reads: frozenset[SSAValue] = frozenset()
    """Kept tiles and pointers that the step reads."""
    inside: frozenset[SSAValue] = frozenset()
    """Kept tiles and pointers that are read inside a loop."""


@dataclass(frozen=True)
class Plan:
    """kept: tiles that lie in arrays; `owned`: those of them that stay with their thread; `copied`: those that are loaded in runs;
    `steps` of each block in order."""

    kept: frozenset[SSAValue]
    owned: frozenset[SSAValue]
    copied: frozenset[SSAValue]
    steps: dict[Block, list[Step]]


def plan(kernel: func.FuncOp, threads: int) -> Plan:
    """Raises `UnknownOperationError` for an operation that is not lowered."""
    return _Planner(kernel, threads).plan()


def cells(op: scf.ForOp) -> Iterator[tuple[SSAValue, SSAValue, SSAValue, SSAValue]]:
    """(initial value, value in the loop, next value, value after the loop) of what a loop carries."""
    following = op.body.block.last_op
    assert isinstance(following, scf.YieldOp)
    yield from zip(op.iter_args, op.body.block.args[1:], following.operands, op.results, strict=True)


class _Planner:
    def __init__(self, kernel: func.FuncOp, threads: int) -> None:
        self.block, self.threads = kernel.body.block, threads
        self.runs = runs(kernel)
        self.order: dict[Operation, int] = {}
        self.depth: dict[SSAValue, int] = {}
        self.tiles: list[tuple[SSAValue, Operation]] = []  # results of operations, in order
        self.forced: set[SSAValue] = set()
        self.sources: dict[Operation, list[SSAValue]] = {}  # the tiles that an operation computes from
        self.sizes: dict[SSAValue, int] = {}
        self._survey(self.block, 0)
        self._reads: dict[SSAValue, frozenset[SSAValue]] = {}

    def plan(self) -> Plan:
        while True:
            self.kept: set[SSAValue] = set()
            for _ in range(3):  # what is kept decides what is repeated, which decides what is kept
                before = self.kept
                self.kept = self._choose(*self._demand())
                if self.kept == before:
                    break
            crossing = self._crossing() - self.forced
            if not crossing:
                break
            self.forced |= crossing
        self._reads = {}
        steps: dict[Block, list[Step]] = {}
        self._steps(self.block, steps)
        return Plan(frozenset(self.kept), frozenset(self._owned()), self.runs & self.kept, steps)

    # -- what there is

    def _survey(self, block: Block, depth: int) -> None:
        self._note(block.args, depth)
        for op in block.ops:
            self.order[op] = len(self.order)
            self.sources[op] = [o for o in op.operands if is_tile(o)]
            self._note(op.results, depth)
            if isinstance(op, scf.ForOp):
                for _, inside, _, after in cells(op):
                    self.forced |= {x for x in (inside, after) if is_tile(x)}
                self._survey(op.body.block, depth + 1)
            elif isinstance(op, tile.ScanOp):
                self.forced.add(op.result)
            elif type(op) not in LAZY and not isinstance(op, tile.StoreOp | tile.ProgramIdOp | scf.YieldOp | func.ReturnOp):
                raise UnknownOperationError(f"there is no lowering of {op.name} to simt")
            if not isinstance(op, scf.ForOp):
                self.tiles += [(result, op) for result in op.results if is_tile(result)]

    def _note(self, values: Sequence[SSAValue], depth: int) -> None:
        self.depth.update((value, depth) for value in values)
        self.sizes.update((value, count(shape_of(value.type))) for value in values)

    # -- how often elements are computed

    def _demand(self) -> tuple[dict[SSAValue, int], dict[SSAValue, int]]:
        """How many elements of each tile are computed: by all uses together, and by the one that needs most."""
        total: dict[SSAValue, int] = dict.fromkeys(self.depth, 0)
        most = dict(total)

        def use(value: SSAValue, all_of: int, largest: int, depth: int) -> None:
            repeated = LOOP_STEPS ** (depth - self.depth[value])
            total[value] += all_of * repeated
            most[value] = max(most[value], largest * repeated)

        def visit(block: Block, depth: int) -> None:
            for op in reversed(list(block.ops)):
                is_loop = isinstance(op, scf.ForOp)
                if isinstance(op, scf.ForOp):
                    visit(op.body.block, depth + 1)
                for operand in self.sources[op]:
                    if op.results and not is_loop:
                        result = op.results[0]
                        factor = length(op) if type(op) in LOOPS and operand is not getattr(op, "acc", None) else 1
                        if type(op) is tile.ScanOp:
                            use(operand, self.sizes[operand], self.sizes[operand], depth)
                        elif result in self.kept:
                            use(operand, self.sizes[result] * factor, self.sizes[result] * factor, depth)
                        elif total[result]:
                            use(operand, total[result] * factor, most[result] * factor, depth)
                    else:
                        use(operand, self.sizes[operand], self.sizes[operand], depth)

        visit(self.block, 0)
        return total, most

    def _choose(self, total: dict[SSAValue, int], most: dict[SSAValue, int]) -> set[SSAValue]:
        kept, room = set(self.forced), SHARED_BYTES
        for value, _ in self.tiles:  # first, since what is loaded twice costs more than what is computed twice
            if value in self.runs - kept and total[value] and self._bytes(value) <= room - SHARED_BYTES // 2:
                kept.add(value)
                room -= self._bytes(value)
        weight: dict[SSAValue, int] = {}
        loops: dict[SSAValue, bool] = {}
        for value, op in self.tiles:
            weight[value], loops[value] = 1, False
            if value in kept:
                continue
            sources, runs_loop = self.sources[op], type(op) in LOOPS
            inner = sum([weight.get(o, 1) for o in sources])
            inner = (inner + 1) * length(op) if runs_loop else inner + _cost(op)
            runs_loop = runs_loop or any(loops[o] for o in sources if o in loops)
            n = self.sizes[value]
            keep = total[value] > 0 and (
                (type(op) is tile.ReduceOp and 2 * n <= self.threads and length(op) >= 8)
                or value in self.runs
                or (
                    not self._passes_on(value)
                    and (
                        inner * (most[value] - n) >= WASTE * n
                        or inner * (total[value] - n) >= REPEATS * n
                        or (runs_loop and total[value] > n)
                    )
                )
            )
            if keep and self._bytes(value) <= room:
                kept.add(value)
                room -= self._bytes(value)
            else:
                weight[value], loops[value] = min(inner, 1 << 20), runs_loop
        return kept

    def _bytes(self, value: SSAValue) -> int:
        return self.sizes[value] * bytes_of(element_of(value.type))

    def _passes_on(self, value: SSAValue) -> bool:
        """Whether the one use is an operation that repeats nothing, so that its result may be kept instead."""
        users = {use.operation for use in value.uses}
        if len(users) != 1:
            return False
        [user] = users
        return type(user) in _REPEATS_NOTHING

    # -- loads that a store overtakes

    def _crossing(self) -> set[SSAValue]:
        """Loads that would be repeated after a store through their pointer."""
        out: set[SSAValue] = set()
        stores = [op for op in self.order if isinstance(op, tile.StoreOp)]
        for root, values in self._roots():
            for load in self._loads(values):
                op = load.owner
                assert isinstance(op, tile.LoadOp)
                end = self._last_run(root, op)
                for store in stores:
                    here = store is root and store.offset is op.offset and end == self.order[root]  # each thread writes what it alone read
                    if store.pointer is op.pointer and not here and (store is root or self.order[op] < self.order[store] <= end):
                        out.add(load)
        return out

    def _roots(self) -> Iterator[tuple[Operation, Sequence[SSAValue]]]:
        """Operations that make elements be computed, and of which tiles."""
        for op in self.order:
            if isinstance(op, tile.StoreOp | scf.ForOp | scf.YieldOp) or any(r in self.kept for r in op.results):
                yield op, self.sources[op]

    def _loads(self, values: Sequence[SSAValue]) -> set[SSAValue]:
        out: set[SSAValue] = set()
        waiting, seen = list(values), set(self.kept)
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            op = value.owner
            assert isinstance(op, Operation)
            if type(op) is tile.LoadOp:
                out.add(value)
            waiting += self.sources[op]
        return out

    def _last_run(self, root: Operation, load: Operation) -> int:
        """The last place in the order at which `root` may run, seen from `load`: loops around it that do not hold the load run on."""
        end, parent = self.order[root], root.parent_op()
        around = set()
        outer: Operation | None = load
        while outer is not None:
            around.add(outer)
            outer = outer.parent_op()
        while parent is not None and parent not in around:
            if isinstance(parent, scf.ForOp):
                end = max(self.order[op] for op in parent.walk() if op in self.order)
            parent = parent.parent_op()
        return end

    # -- steps

    def _steps(self, block: Block, steps: dict[Block, list[Step]]) -> frozenset[SSAValue]:
        """Fill in the steps of a block; returns what they read."""
        out: list[Step] = []
        waiting: list[SSAValue] = []

        def flush() -> None:
            level: dict[SSAValue, int] = {}
            groups: dict[tuple, Step] = {}
            for value in waiting:
                reads = self._needs(value)
                level[value] = 1 + max((level[r] for r in reads if r in level), default=0)
                op = value.owner
                walk: tuple = (shape_of(value.type), value in self.runs and value.type)
                if isinstance(op, tile.ReduceOp | tile.ScanOp):
                    walk = (type(op), shape_of(op.source.type), op.axis.value.data)
                step = groups.setdefault((level[value], *walk), Step())
                step.tiles.append(value)
                step.reads |= reads
            out.extend(groups[key] for key in sorted(groups, key=lambda key: key[0]))
            waiting.clear()

        for op in block.ops:
            if isinstance(op, tile.StoreOp | scf.ForOp | scf.YieldOp | func.ReturnOp):
                flush()
                inside = self._steps(op.body.block, steps) if isinstance(op, scf.ForOp) else frozenset()
                out.append(Step(effect=op, reads=self._of(op.operands), inside=inside))
            else:
                waiting += [r for r in op.results if r in self.kept]
                if not any(is_tile(r) for r in op.results):  # a scalar, which no tile decides
                    out.append(Step(effect=op, reads=frozenset([op.pointer] if isinstance(op, tile.LoadOp) else [])))
        steps[block] = out
        return frozenset().union(*(step.reads | step.inside for step in out))

    def _of(self, values: Sequence[SSAValue]) -> frozenset[SSAValue]:
        return frozenset().union(*(self._reaches(v) for v in values))

    def _reaches(self, value: SSAValue) -> frozenset[SSAValue]:
        """Kept tiles and pointers that computing an element of `value` reads."""
        if value in self.kept:
            return frozenset([value])
        if not is_tile(value):
            return frozenset()
        if value not in self._reads:
            self._reads[value] = self._needs(value)
        return self._reads[value]

    def _needs(self, value: SSAValue) -> frozenset[SSAValue]:
        op = value.owner
        assert isinstance(op, Operation)
        out = self._of(self.sources[op])
        return out | {op.pointer} if isinstance(op, tile.LoadOp) else out

    # -- carried tiles that stay with a thread

    def _owned(self) -> set[SSAValue]:
        """Carried tiles that are only read at the place that is computed."""
        cell: dict[SSAValue, SSAValue] = {}
        for op in self.order:
            if isinstance(op, scf.ForOp):
                for _, inside, _, after in cells(op):
                    if is_tile(inside):
                        cell[inside] = cell[after] = inside
        elsewhere: set[SSAValue] = set()

        def visit(value: SSAValue, place: tuple[int, ...] | None, seen: set) -> None:
            if (value, place) in seen:
                return
            seen.add((value, place))
            if value in self.kept:
                if place != shape_of(value.type):
                    elsewhere.add(cell.get(value, value))
                return
            op = value.owner
            assert isinstance(op, Operation)
            stays = type(op) in _IN_PLACE
            for operand in self.sources[op]:
                visit(operand, place if stays else None, seen)

        for root, values in self._roots():
            shared_walk = isinstance(root, tile.ReduceOp | tile.ScanOp)
            for value in values:
                place = None if shared_walk else shape_of(value.type)
                if any(r in self.kept and (type(root) in _MOVED | LOOPS or r in self.runs) for r in root.results):
                    place = None
                visit(value, place, set())
        return {value for value, name in cell.items() if name not in elsewhere}


_MOVED = {tile.SplatOp, tile.ExpandOp, tile.BroadcastOp, tile.ReshapeOp, tile.PermuteOp}
_IN_PLACE = LAZY - LOOPS - _MOVED  # an element comes from those at the same index
_REPEATS_NOTHING = LAZY - {tile.DotOp, tile.BroadcastOp}
_COSTS = {**dict.fromkeys({tile.LoadOp, *SLOW}, 8), **dict.fromkeys({*_MOVED, tile.RangeOp}, 0)}


def _cost(op: Operation) -> int:
    return _COSTS.get(type(op), 1)
