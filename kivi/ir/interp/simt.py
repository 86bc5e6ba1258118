"""Interpreter of the `simt` dialect: every thread of a block on its own, one after another between barriers, in a chosen order.

Threads run until they wait: at a barrier, or in a shuffle. When all wait, they go on. What a kernel may not leave to chance is an error:

    two threads of a block that touch one element of a shared array, one of them writing, with no barrier between
    a barrier or a shuffle that some threads do not reach, a shuffle whose mask does not name exactly those that arrive
    an element of an array that was never written; a run that is not aligned
    any access to global memory that `kivi.ir.interp.memory` refuses

With `check_races=False` the first is not looked for, so that the order of threads decides, as on a device.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np

from kivi.errors import InputError, KiviError, UnknownOperationError
from kivi.ir import simt
from kivi.ir.interp import tile as tiles
from kivi.ir.interp.memory import AccessError, Memory
from kivi.ir.interp.tile import dtype_of
from kivi.ir.xdsl import MemRefType, ModuleOp, NoneAttr, Operation, SSAValue, arith, func, math, memref, scf

Order = Literal["ascending", "descending", "random"]


class RaceError(KiviError):
    """Two threads of a block touched one element of shared memory with no barrier between them, one of them writing."""


class DivergenceError(KiviError):
    """Threads that must act together do not."""


def run(
    module: ModuleOp,
    name: str,
    grid: Sequence[int],
    arguments: dict[str, Any],
    memory: Memory,
    order: Order = "ascending",
    seed: int = 0,
    check_races: bool = True,
) -> None:
    """Run kernel `name` of a module at every point of `grid`.

    arguments: for a pointer the name of an array of `memory`, for a scalar its value, in the order of the kernel's arguments.
    order: of the threads between two barriers; "random" differs each time, by `seed`.
    """
    if order not in get_args(Order):
        raise InputError(f"order = {order!r}; threads run in {', '.join(get_args(Order))} order")
    kernel = next(op for op in module.ops if isinstance(op, func.FuncOp) and op.sym_name.data == name)
    block, start = kernel.body.block, tiles.bound(kernel, arguments, memory)
    count, rng = simt.threads_of(kernel), random.Random(seed)
    with np.errstate(all="ignore"):
        for number, place in enumerate(itertools.product(*(range(n) for n in grid))):
            shared: dict[Operation, Shared] = {op: Shared(op, check_races) for op in block.ops if isinstance(op, memref.AllocOp)}
            threads = [Thread(number * count + i, i, (*place, 0, 0, 0)[:3], dict(start), memory, shared) for i in range(count)]
            _block([thread.run(list(block.ops)) for thread in threads], shared, order, rng)


def _block(threads: list[Iterator[Operation]], shared: dict[Operation, Shared], order: Order, rng: random.Random) -> None:
    """Let the threads of one block run to their end."""
    values: list[Any] = [None] * len(threads)  # what a shuffle hands to each
    while True:
        turn = list(range(len(threads)))
        if order == "descending":
            turn.reverse()
        elif order == "random":
            rng.shuffle(turn)
        waiting: dict[int, Any] = {}
        for i in turn:
            try:
                waiting[i] = threads[i].send(values[i])  # type: ignore[attr-defined]  # generators
            except StopIteration:
                waiting[i] = None
        values = [None] * len(threads)
        at = {i: None if wait is None else wait[0] for i, wait in waiting.items()}
        if all(op is None for op in at.values()):
            return
        warps = [range(first, first + simt.WARP) for first in range(0, len(threads), simt.WARP)]
        if any(isinstance(op, simt.BarrierOp) for op in at.values()):
            where = {i: op for i, op in at.items() if not isinstance(op, simt.BarrierOp)}
            if where or len(set(at.values())) > 1:
                raise DivergenceError(f"a barrier is reached by {len(at) - len(where)} of {len(at)} threads of a block")
            for array in shared.values():
                array.barrier()
            continue
        for warp in warps:
            ops = {at[i] for i in warp}
            if len(ops) > 1:
                raise DivergenceError(f"a shuffle is reached by some of the threads {warp.start} to {warp.stop - 1} only")
            op = ops.pop()
            if op is not None:
                _exchange(op, {i: waiting[i][1] for i in warp}, values)


def _exchange(op: simt.ShuffleOp, given: dict[int, Any], out: list[Any]) -> None:
    """What each thread of one warp gets."""
    offset, width, mask = op.offset.value.data, op.width.value.data, op.mask.value.data
    first = min(given)
    missing = [i for i in given if not mask >> (i - first) & 1]
    if missing:
        raise DivergenceError(f"thread {missing[0]} takes part in a shuffle whose mask {mask:#x} does not name it")
    for i in given:
        lane = (i - first) % width
        source = lane ^ offset if op.exchange.data is simt.Exchange.XOR else lane + offset
        out[i] = given[i - lane + source] if source < width else given[i]


class Shared:
    """An array of the block, and who touched its elements since the last barrier."""

    def __init__(self, op: Operation, check_races: bool) -> None:
        kind = op.results[0].type
        assert isinstance(kind, MemRefType)
        self.array = Local(kind)
        self.name = op.results[0].name_hint or f"of {kind.get_shape()[0]} {kind.element_type}"
        self.check = check_races
        self.barrier()

    def barrier(self) -> None:
        self.writer: dict[int, int] = {}
        self.readers: dict[int, set[int]] = {}

    def load(self, i: int, thread: int) -> Any:
        if self.check:
            if self.writer.get(i, thread) != thread:
                raise RaceError(f"thread {thread} reads element {i} of the shared array {self.name} that thread {self.writer[i]} writes")
            self.readers.setdefault(i, set()).add(thread)
        return self.array.load(i, thread)

    def store(self, i: int, value: Any, thread: int) -> None:
        if self.check:
            others = (self.readers.get(i, set()) | ({self.writer[i]} if i in self.writer else set())) - {thread}
            if others:
                raise RaceError(f"thread {thread} writes element {i} of the shared array {self.name} that thread {min(others)} uses")
            self.writer[i] = thread
        self.array.store(i, value, thread)


class Local:
    """An array of one thread."""

    def __init__(self, kind: MemRefType) -> None:
        self.values: list[Any] = [None] * kind.get_shape()[0]

    def load(self, i: int, thread: int) -> Any:
        if not 0 <= i < len(self.values) or self.values[i] is None:
            raise AccessError(f"thread {thread} reads element {i} of an array of {len(self.values)}, which was never written")
        return self.values[i]

    def store(self, i: int, value: Any, thread: int) -> None:
        if not 0 <= i < len(self.values):
            raise AccessError(f"thread {thread} writes element {i} of an array of {len(self.values)}")
        self.values[i] = value


class Thread:
    """One thread: its values so far, and a rule for each operation. `number` counts threads of the grid, `lane` those of the block."""

    def __init__(
        self, number: int, lane: int, place: tuple[int, ...], values: dict[SSAValue, Any], memory: Memory, shared: dict[Operation, Shared]
    ) -> None:
        self.number, self.lane, self.place = number, lane, place
        self.values, self.memory, self.shared = values, memory, shared

    def run(self, ops: Sequence[Operation]) -> Iterator[Any]:
        """A generator that yields (operation, value) where the thread waits, and returns what the terminator yields."""
        values = self.values
        for op in ops:
            rule = RULES.get(type(op))
            if rule is not None:
                values[op.results[0]] = rule(self, op, *[values[o] for o in op.operands])
            elif isinstance(op, memref.StoreOp):
                values[op.memref].store(int(values[op.indices[0]]), values[op.value], self.lane)
            elif isinstance(op, simt.StoreOp):
                dtype = dtype_of(op.value.type)
                address = np.array([self._address(op.pointer, op.offset, dtype)])
                self.memory.store(address, np.array([values[op.value]], dtype), np.array([True]), self.number)
            elif isinstance(op, simt.CopyOp):
                self._copy(op)
            elif isinstance(op, scf.ForOp):
                yield from self._loop(op)
            elif isinstance(op, scf.IfOp):
                yield from self._if(op)
            elif isinstance(op, simt.BarrierOp):
                yield op, None
            elif isinstance(op, simt.ShuffleOp):
                values[op.result] = yield op, values[op.value]
            elif isinstance(op, scf.YieldOp):
                return [values[o] for o in op.operands]
            elif not isinstance(op, func.ReturnOp):
                raise UnknownOperationError(f"the simt interpreter has no rule for {op.name}")
        return []

    def _copy(self, op: simt.CopyOp) -> None:
        array, place = self.values[op.array], int(self.values[op.place])
        dtype = dtype_of(op.pointer.type.element)  # type: ignore[attr-defined]
        length = simt.WIDE // dtype.itemsize
        if place % length:
            raise AccessError(f"thread {self.lane} puts a run of {length} elements at element {place}, which is no multiple")
        run = np.zeros(length, dtype)
        if op.mask is None or self.values[op.mask]:
            address = self._address(op.pointer, op.offset, dtype)
            if address % simt.WIDE:
                raise AccessError(f"thread {self.lane} reads {simt.WIDE} bytes at {int(address):#x}, which is no multiple")
            addresses = address + np.arange(length) * dtype.itemsize
            run = self.memory.load(addresses, dtype, np.ones(length, np.bool_), run)
        for i, x in enumerate(run):
            array.store(place + i, x, self.lane)

    def _loop(self, op: scf.ForOp) -> Iterator[Any]:
        low, high, step = (int(self.values[o]) for o in (op.lb, op.ub, op.step))
        counter, *arguments = op.body.block.args
        carried = [self.values[o] for o in op.iter_args]
        ops, dtype = list(op.body.block.ops), dtype_of(counter.type)
        for i in range(low, high, step):
            self.values[counter] = dtype.type(i)
            self.values.update(zip(arguments, carried, strict=True))
            carried = yield from self.run(ops)
        self.values.update(zip(op.results, carried, strict=True))

    def _if(self, op: scf.IfOp) -> Iterator[Any]:
        region = op.true_region if self.values[op.cond] else op.false_region
        results = (yield from self.run(list(region.block.ops))) if region.blocks else []
        self.values.update(zip(op.output, results, strict=True))

    def _address(self, pointer: SSAValue, offset: SSAValue, dtype: np.dtype) -> np.int64:
        return self.values[pointer] + np.int64(self.values[offset]) * dtype.itemsize

    def load(self, op: simt.LoadOp, mask: Any = True, other: Any = 0) -> Any:
        dtype = dtype_of(op.result.type)
        if not mask:
            return other
        address = np.array([self._address(op.pointer, op.offset, dtype)])
        return self.memory.load(address, dtype, np.array([True]), np.zeros(1, dtype))[0]


def _alloc(thread: Thread, op: memref.AllocOp) -> Any:
    kind = op.memref.type
    assert isinstance(kind, MemRefType)
    if kind.memory_space != simt.SpaceAttr(simt.Space.SHARED):
        raise UnknownOperationError(f"memref.alloc makes an array of the block, in space {simt.SpaceAttr(simt.Space.SHARED)}")
    return thread.shared[op]


def _alloca(thread: Thread, op: memref.AllocaOp) -> Any:
    kind = op.memref.type
    assert isinstance(kind, MemRefType)
    if kind.memory_space != NoneAttr():
        raise UnknownOperationError("memref.alloca makes an array of a thread, in no named space")
    return Local(kind)


def _scalar(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule of the tile interpreter, on scalars."""
    return lambda thread, op, *operands: np.asarray(rule(thread, op, *operands))[()]


def _signed(x: Any) -> Any:
    return np.asarray(x)


def _unsigned(x: Any) -> Any:
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}") if x.dtype.kind == "i" else x


def _convert(reading: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda thread, op, x: reading(x).astype(dtype_of(op.results[0].type))[()]


def _to_integer(thread: Thread, op: Operation, x: Any) -> Any:
    return np.asarray(x).astype(np.int64).astype(dtype_of(op.results[0].type))[()]


def _truncate(thread: Thread, op: arith.TruncIOp, x: Any) -> Any:
    target = dtype_of(op.result.type)
    return np.bool_(int(x) & 1) if target == np.bool_ else np.asarray(x).astype(target)[()]


INTEGER = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
FLOAT = {1: np.equal, 2: np.greater, 3: np.greater_equal, 4: np.less, 5: np.less_equal, 13: np.not_equal}
COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _compare_integers(thread: Thread, op: arith.CmpiOp, a: Any, b: Any) -> Any:
    name = INTEGER[op.predicate.value.data]
    if name.startswith("u"):
        a, b = _unsigned(a), _unsigned(b)
    return COMPARE[name if name in COMPARE else name[1:]](a, b)


def _compare_floats(thread: Thread, op: arith.CmpfOp, a: Any, b: Any) -> Any:
    rule = FLOAT.get(op.predicate.value.data)
    if rule is None:
        raise UnknownOperationError("the simt interpreter compares floats with oeq, ogt, oge, olt, ole and une")
    return rule(a, b)


def _fused(thread: Thread, op: math.FmaOp, a: Any, b: Any, c: Any) -> Any:
    """The product of two f32 is exact in f64; its sum with a third rounds there first, which a sum in any order may."""
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


RULES: dict[type, Callable[..., Any]] = {
    **{op: _scalar(rule) for op, rule in tiles.RULES.items() if not op.__module__.endswith("ir.tile")},
    arith.CmpiOp: _compare_integers,
    arith.CmpfOp: _compare_floats,
    arith.SelectOp: lambda thread, op, c, a, b: a if c else b,
    arith.ExtUIOp: _convert(_unsigned),
    arith.ExtSIOp: _convert(_signed),
    arith.TruncIOp: _truncate,
    arith.SIToFPOp: _convert(_signed),
    arith.UIToFPOp: _convert(_unsigned),
    arith.FPToSIOp: _to_integer,
    arith.FPToUIOp: _to_integer,
    arith.ExtFOp: _convert(_signed),
    arith.TruncFOp: _convert(_signed),
    arith.IndexCastOp: lambda thread, op, x: x,
    math.FmaOp: _fused,
    memref.AllocOp: _alloc,
    memref.AllocaOp: _alloca,
    memref.LoadOp: lambda thread, op, array, i: array.load(int(i), thread.lane),
    simt.ThreadIdOp: lambda thread, op: np.int32(thread.lane),
    simt.BlockIdOp: lambda thread, op: np.int32(thread.place[op.axis.value.data]),
    simt.LoadOp: lambda thread, op, pointer, offset, mask=True, other=0: thread.load(op, mask, other),
}
