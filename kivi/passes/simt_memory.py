"""Arrays of a block, and the barriers between those who write and those who read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kivi.errors import KiviError
from kivi.ir.simt import MOST_SHARED, WIDE, BarrierOp, Space, SpaceAttr, bytes_of
from kivi.ir.xdsl import Attribute, Block, MemRefType, NoneAttr, Operation, SSAValue, memref


class SharedMemoryError(KiviError):
    """The arrays of a block do not fit into shared memory."""


class Memory:
    """The arrays of a kernel, allocated at its start. Shared ones are used again once nothing reads them any more."""

    def __init__(self) -> None:
        self.allocations: list[Operation] = []
        self._free: dict[tuple[Attribute, int], list[SSAValue]] = {}

    def shared(self, element: Attribute, count: int) -> SSAValue:
        """An array of the block; its contents are undefined, and other threads may still read what was there."""
        spare = self._free.get((element, count))
        if spare:
            return spare.pop()
        op = memref.AllocOp.get(element, shape=[count], memory_space=SpaceAttr(Space.SHARED))
        self.allocations.append(op)
        return op.memref

    def check(self, kernel: str) -> None:
        """Raise `SharedMemoryError` if the shared arrays are more than a block may have."""
        kinds = [op.memref.type for op in self.allocations if isinstance(op, memref.AllocOp)]
        sizes = [kind.get_shape()[0] * bytes_of(kind.element_type) for kind in kinds]
        total = sum(-(-size // WIDE) * WIDE for size in sizes)  # arrays that take runs are aligned to them
        if total > MOST_SHARED:
            raise SharedMemoryError(
                f"kernel {kernel!r} keeps {total} bytes in shared memory, a block has {MOST_SHARED}: choose a schedule with fewer queries "
                f"or tokens a program"
            )

    def owned(self, element: Attribute, count: int) -> SSAValue:
        """An array of each thread."""
        op = memref.AllocaOp.get(element, shape=[count])
        self.allocations.append(op)
        return op.memref

    def release(self, array: SSAValue) -> None:
        """Nothing that is still to come reads this shared array."""
        kind = array.type
        assert isinstance(kind, MemRefType)
        if kind.memory_space != NoneAttr():
            self._free.setdefault((kind.element_type, kind.get_shape()[0]), []).append(array)


class Hazards:
    """What threads of the block may have read and written since the last barrier: shared arrays, and global memory by pointer.

    A barrier is needed before memory is read that was written, and before it is written when it was read or written.
    """

    def __init__(self) -> None:
        self._read: set[SSAValue] = set()
        self._written: set[SSAValue] = set()

    def access(self, block: Block, reads: Iterable[SSAValue] = (), writes: Iterable[SSAValue] = ()) -> None:
        """Threads go on to read and write these, all reads first; a barrier is put at the end of `block` if that needs one."""
        reads, writes = set(reads), set(writes)
        if reads & self._written or writes & (self._read | self._written):
            self.barrier(block)
        self._read |= reads
        self._written |= writes

    def barrier(self, block: Block) -> None:
        block.add_op(BarrierOp())
        self._read.clear()
        self._written.clear()

    def loop(self, block: Block, body: Callable[[], None]) -> None:
        """A loop whose body is written by `body` into `block`; it may run any number of times, so it starts and ends in one state."""
        before = set(self._read), set(self._written)
        body()
        touched = (self._read - before[0]) | (self._written - before[1])
        if touched:
            self.barrier(block)
        self._read |= before[0]
        self._written |= before[1]
