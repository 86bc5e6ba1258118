"""Lowering of `tile` to `simt`: a program becomes a block of threads.

Elements are dealt out in turn: of a tile, thread t computes the elements t, t + threads, and so on, in row-major order, so that neighbours
in memory are neighbours in a warp. What is kept in arrays and what is computed where it is used is decided by `kivi.passes.simt_plan`,
elements are written by `kivi.passes.simt_element`. Reductions with few results are shared: a team of lanes takes each, every lane
combines a part, and shuffles combine the lanes. Scalars are computed by every thread alike, so bounds of loops agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from kivi.ir import tile
from kivi.ir.simt import THREADS, WARP, BlockIdOp, CopyOp, Exchange, ExchangeAttr, ShuffleOp, StoreOp, ThreadIdOp, run_length
from kivi.ir.tile import element_of, is_tile, shape_of
from kivi.ir.xdsl import (
    Block,
    FunctionType,
    IntegerAttr,
    ModuleOp,
    Region,
    SSAValue,
    arith,
    func,
    grouped,
    i32,
    i64,
    memref,
    scf,
)
from kivi.passes import simt_scalar
from kivi.passes.clean import clean
from kivi.passes.simt_element import Array, Elements, Index, Number, count, length, term
from kivi.passes.simt_memory import Hazards, Memory
from kivi.passes.simt_plan import Step, cells, plan

FULL_WARP = (1 << WARP) - 1


def lower(module: ModuleOp, threads: int = 128, verify: bool = True) -> ModuleOp:
    """A `simt` module with the kernels of a `tile` module, for blocks of `threads` threads (whole warps). Backends that lower while a user
    waits do not verify, which would be a fifth of the time; tests do.

    Raises `UnknownOperationError` naming an operation without a rule, `SharedMemoryError`.
    """
    out = ModuleOp([Kernel(op, threads).lower() for op in module.ops if isinstance(op, func.FuncOp)])
    clean(out)
    if verify:
        out.verify()
    return out


class Kernel:
    """One kernel while it is lowered."""

    def __init__(self, kernel: func.FuncOp, threads: int) -> None:
        self.kernel, self.threads = kernel, threads
        self.plan = plan(kernel, threads)
        self.memory, self.hazards = Memory(), Hazards()
        self.stored = {op.pointer for op in kernel.walk() if isinstance(op, tile.StoreOp)}
        self.scalars: dict[SSAValue, SSAValue] = {}
        self.arrays: dict[SSAValue, Array] = {}

    def lower(self) -> func.FuncOp:
        source = self.kernel.body.block
        block = Block(arg_types=[a.type for a in source.args])
        for old, new in zip(source.args, block.args, strict=True):
            new.name_hint = old.name_hint
            self.scalars[old] = new
        place = ThreadIdOp.create(result_types=[i32])
        place.result.name_hint = "thread"
        self.thread = place.result
        block.add_op(place)
        self._block(source, block)
        block.add_op(func.ReturnOp())
        self.memory.check(self.kernel.sym_name.data)
        for op in reversed(self.memory.allocations):
            block.insert_op_before(op, place)
        kind = FunctionType.from_lists([a.type for a in block.args], [])
        out = func.FuncOp(self.kernel.sym_name.data, kind, Region(block), arg_attrs=self.kernel.arg_attrs)
        out.attributes[THREADS] = IntegerAttr(self.threads, i64)
        return out

    # -- steps

    def _block(self, source: Block, block: Block) -> None:
        steps = self.plan.steps[source]
        last = {value: number for number, step in enumerate(steps) for value in step.reads | step.inside}
        made: dict[int, list[SSAValue]] = {}  # step after which arrays are free
        for number, step in enumerate(steps):
            self._step(step, block)
            results = step.tiles or (step.effect.results if step.effect else [])
            for value in results:
                if value in self.arrays:
                    made.setdefault(max(last.get(value, number), number), []).append(value)
            for value in made.pop(number, []):
                self.memory.release(self.arrays[value].memory)

    def _step(self, step: Step, block: Block) -> None:
        op = step.effect
        if op is None:
            self._keep(step, block)
        elif isinstance(op, scf.ForOp):
            self._loop(op, step, block)
        elif isinstance(op, tile.StoreOp):
            self._store(op, step, block)
        elif not isinstance(op, scf.YieldOp | func.ReturnOp):
            self._access(step, block)
            elements = self._elements(block)
            if isinstance(op, tile.ProgramIdOp):
                value = elements.emit(BlockIdOp.create(result_types=[op.result.type], properties={"axis": op.axis}))
            else:
                value = elements.computed(op, ())
            value.name_hint = value.name_hint or op.results[0].name_hint
            self.scalars[op.results[0]] = value

    def _elements(self, block: Block) -> Elements:
        return Elements(block, self.scalars, self.arrays, self.threads, self.thread)

    def _access(self, step: Step, block: Block, writes: Sequence[SSAValue] = ()) -> None:
        self.hazards.access(block, self._memories(step.reads), writes)

    def _memories(self, values: frozenset[SSAValue]) -> list[SSAValue]:
        """Shared arrays and pointers behind what a step reads."""
        found = []
        for value in values:
            if value not in self.arrays:
                if value in self.stored:  # nobody waits for what never changes
                    found.append(self.scalars[value])
            elif self.arrays[value].shared:
                found.append(self.arrays[value].memory)
        return found

    # -- effects

    def _store(self, op: tile.StoreOp, step: Step, block: Block) -> None:
        pointer = self.scalars[op.pointer]
        self._access(step, block, [pointer])
        elements = self._elements(block)

        def put(index: Index) -> None:
            wanted = [op.offset, op.value, *([] if op.mask is None else [op.mask])]
            offset, value, *mask = elements.many([(x, index) for x in wanted])
            write = StoreOp.create(operands=[pointer, offset, value])
            if mask:
                elements.guard(mask[0], lambda: elements.here(write))
            else:
                elements.here(write)

        shape = shape_of(op.value.type)
        if shape:
            elements.own(shape, lambda index, flat, slot: put(index))
        else:
            elements.guard(elements.below(self.thread, 1), lambda: put(()))

    def _loop(self, op: scf.ForOp, step: Step, block: Block) -> None:
        carried = list(cells(op))
        tiles = [c for c in carried if is_tile(c[0])]
        scalars = [c for c in carried if not is_tile(c[0])]
        for _, inside, _, after in tiles:
            self.arrays[inside] = self.arrays[after] = self._array(inside, owned=inside in self.plan.owned)
        self._write(block, [(start, self.arrays[inside]) for start, inside, _, _ in tiles], step)

        counter = op.body.block.args[0]
        body = Block(arg_types=[counter.type, *(inside.type for _, inside, _, _ in scalars)])
        for old, new in zip([counter, *(inside for _, inside, _, _ in scalars)], body.args, strict=True):
            new.name_hint = old.name_hint
            self.scalars[old] = new

        def write() -> None:
            self._block(op.body.block, body)
            end = self.plan.steps[op.body.block][-1]
            self._write(body, [(following, self.arrays[inside]) for _, inside, following, _ in tiles if following is not inside], end)

        self.hazards.loop(body, write)
        body.add_op(scf.YieldOp(*(self.scalars[following] for _, _, following, _ in scalars)))
        low, high, by = (self.scalars[x] for x in (op.lb, op.ub, op.step))
        loop = scf.ForOp(low, high, by, [self.scalars[start] for start, _, _, _ in scalars], Region(body))
        block.add_op(loop)
        for (_, _, _, after), result in zip(scalars, loop.results, strict=True):
            result.name_hint = after.name_hint
            self.scalars[after] = result

    def _write(self, block: Block, moves: Sequence[tuple[SSAValue, Array]], step: Step) -> None:
        """Carried tiles take new values, all at once: shared arrays change when no thread computes from the old ones any more."""
        staged: list[tuple[Array, SSAValue]] = []
        shapes: dict[tuple[int, ...], list[tuple[SSAValue, Array]]] = {}
        for value, array in moves:
            shapes.setdefault(array.shape, []).append((value, array))
        if shapes:
            self._access(step, block)
        for shape, group in shapes.items():
            targets = []
            for value, array in group:
                slots = -(-count(shape) // self.threads)
                targets.append(self.memory.owned(element_of(value.type), slots) if array.shared else array.memory)
                if array.shared:
                    staged.append((array, targets[-1]))
            self._put(block, shape, [value for value, _ in group], targets)
        self.hazards.access(block, writes=[array.memory for array, _ in staged])
        for shape in shapes:
            elements = self._elements(block)

            def copy(index: Index, flat: Number, slot: Number, elements: Elements = elements, shape: tuple[int, ...] = shape) -> None:
                for array, stage in staged:
                    if array.shape == shape:
                        elements.here(memref.StoreOp.get(elements.get(stage, slot), array.memory, [elements.index(flat)]))

            if any(array.shape == shape for array, _ in staged):
                elements.own(shape, copy)

    def _put(self, block: Block, shape: tuple[int, ...], values: Sequence[SSAValue], owned: Sequence[SSAValue]) -> None:
        """Elements of tiles into arrays of their threads."""
        elements = self._elements(block)

        def body(index: Index, flat: Number, slot: Number) -> None:
            found = elements.many([(value, index) for value in values])
            for x, array in zip(found, owned, strict=True):
                elements.put(x, array, slot)

        elements.own(shape, body)

    # -- kept tiles

    def _array(self, value: SSAValue, owned: bool = False) -> Array:
        shape, element = shape_of(value.type), element_of(value.type)
        if owned:
            return Array(self.memory.owned(element, -(-count(shape) // self.threads)), shape, shared=False)
        return Array(self.memory.shared(element, count(shape)), shape, shared=True)

    def _keep(self, step: Step, block: Block) -> None:
        arrays = {value: self._array(value) for value in step.tiles}
        self._access(step, block, [array.memory for array in arrays.values()])
        first = step.tiles[0].owner
        if isinstance(first, tile.ReduceOp):
            self._reduce(arrays, block)
        elif isinstance(first, tile.ScanOp):
            self._scan(arrays, block)
        elif step.tiles[0] in self.plan.copied:
            self._copy(arrays, block)
        else:
            self._compute(arrays, block)
        self.arrays.update(arrays)

    def _copy(self, arrays: Mapping[SSAValue, Array], block: Block) -> None:
        """Loads, a run of neighbours at a time."""
        elements = self._elements(block)
        kind = next(iter(arrays)).type
        length, (*rows, last) = run_length(element_of(kind)), shape_of(kind)

        def body(index: Index, flat: Number, slot: Number) -> None:
            first = (*index[:-1], elements.mul(index[-1], length))
            place = elements.index(elements.mul(flat, length))
            for value, array in arrays.items():
                op = value.owner
                assert isinstance(op, tile.LoadOp)
                wanted = [op.offset, *([] if op.mask is None else [op.mask])]
                offset, *mask = elements.many([(x, first) for x in wanted])
                elements.here(grouped(CopyOp, [[self.scalars[op.pointer]], [offset], mask, [array.memory], [place]]))

        elements.own((*rows, last // length), body)

    def _compute(self, arrays: Mapping[SSAValue, Array], block: Block) -> None:
        elements, values = self._elements(block), list(arrays)

        def body(index: Index, flat: Number, slot: Number) -> None:
            for value, x in zip(values, elements.many([(v, index) for v in values]), strict=True):
                elements.here(memref.StoreOp.get(x, arrays[value].memory, [elements.index(flat)]))

        elements.own(shape_of(values[0].type), body)

    def _scan(self, arrays: Mapping[SSAValue, Array], block: Block) -> None:
        """Each row of the axis by one thread."""
        elements, values = self._elements(block), list(arrays)
        op = values[0].owner
        assert isinstance(op, tile.ScanOp)
        shape, axis, steps = shape_of(op.result.type), op.axis.value.data, length(op)
        rows = (*shape[:axis], 1, *shape[axis + 1 :])

        def body(index: Index, flat: Number, slot: Number) -> None:
            def step(i: Number, so_far: Sequence[SSAValue]) -> list[SSAValue]:
                out = elements.many([term(v.owner, index, i) for v in values])
                out = [simt_scalar.combine(_combining(v), a, b, elements.emit) for v, a, b in zip(values, so_far, out, strict=True)]
                place = elements.index(elements.flat((*index[:axis], i, *index[axis + 1 :]), shape))
                for value, x in zip(values, out, strict=True):
                    elements.here(memref.StoreOp.get(x, arrays[value].memory, [place]))
                return out

            elements.loop(
                steps, [elements.constant(simt_scalar.identity(_combining(v).combine.data, element_of(v.type))) for v in values], step
            )

        elements.own(rows, body)

    def _reduce(self, arrays: Mapping[SSAValue, Array], block: Block) -> None:
        """Each result by a team of `width` lanes: a part of the axis a lane, then shuffles."""
        elements, values = self._elements(block), list(arrays)
        shape = shape_of(values[0].type)
        results, steps = count(shape), length(values[0].owner)
        width = 1
        while width * 2 <= min(WARP, steps) and width * 2 * results <= self.threads:
            width *= 2
        teams = self.threads // width
        lane, team = elements.rem(self.thread, width), elements.div(self.thread, width)

        def each(turn: Number, _: Sequence[SSAValue]) -> Sequence[SSAValue]:
            number = elements.add(elements.mul(turn, teams), team)
            # All lanes of a warp shuffle, so teams without a result of their own repeat the last one.
            index = elements.split(self._at_most(elements, number, results, teams), shape)

            def part(turn: Number, so_far: Sequence[SSAValue]) -> list[SSAValue]:
                i = elements.add(elements.mul(turn, width), lane)
                found = elements.many([term(v.owner, index, self._at_most(elements, i, steps, width)) for v in values])
                if steps % width:
                    inside = elements.below(i, steps)
                    found = [elements.emit(arith.SelectOp(inside, x, s)) for x, s in zip(found, starts, strict=True)]
                return [simt_scalar.combine(_combining(v), a, x, elements.emit) for v, a, x in zip(values, so_far, found, strict=True)]

            starts = [elements.constant(simt_scalar.identity(_combining(v).combine.data, element_of(v.type))) for v in values]
            totals = elements.loop(-(-steps // width), starts, part)
            offset = width // 2
            while offset:
                others = [simt_scalar.shuffled(x, partial(_exchange, elements, offset), elements.emit) for x in totals]
                totals = [simt_scalar.combine(_combining(v), x, y, elements.emit) for v, x, y in zip(values, totals, others, strict=True)]
                offset //= 2

            def write() -> None:
                for value, x in zip(values, totals, strict=True):
                    elements.here(memref.StoreOp.get(x, arrays[value].memory, [elements.index(number)]))

            mine = elements.below(lane, 1) if width > 1 else None
            if results % teams:
                real = elements.below(number, results)
                mine = real if mine is None else elements.emit(arith.AndIOp(mine, real))
            if mine is None:
                write()
            else:
                elements.guard(mine, write)
            return ()

        elements.loop(-(-results // teams), [], each)

    def _at_most(self, elements: Elements, x: Number, size: int, block: int) -> Number:
        """`x`, or the last of `size` where x, which counts in blocks, lies beyond."""
        if size % block == 0:
            return x
        return elements.emit(arith.SelectOp(elements.below(x, size), elements.number(x), elements.number(size - 1)))


def _combining(value: SSAValue) -> tile.ReduceOp | tile.ScanOp:
    op = value.owner
    assert isinstance(op, tile.ReduceOp | tile.ScanOp)
    return op


def _exchange(elements: Elements, offset: int, x: SSAValue) -> SSAValue:
    """The value of the lane whose number differs in one bit. The segment is the warp: a team never straddles two."""
    op = ShuffleOp.create(
        operands=[x],
        result_types=[x.type],
        properties={
            "exchange": ExchangeAttr(Exchange.XOR),
            **{name: IntegerAttr(n, i64) for name, n in (("offset", offset), ("width", WARP), ("mask", FULL_WARP))},
        },
    )
    return elements.emit(op)
