"""Dialect `simt`: one thread's work in a block of threads.

A kernel is a `func.func` with the attribute `simt.threads`, the number of threads of a block; a block runs for each point of the grid,
and every thread of it runs the same text on scalars. Arithmetic is upstream `arith` and `math`, control flow `scf`. Arrays are `memref`:
`memref.alloc` in the space `#simt<space shared>` makes one array for the block, `memref.alloca` one for each thread. The dialect adds
what those lack: a thread's place, the barrier, exchange between threads of a warp, and access to global memory through `!tile.ptr`, one
element or one run of neighbours at a time.

Two choices keep kernels portable. Half precision exists in memory and registers but is never computed with: arithmetic is in f32, with a
rounding where the dialect above asks for one. And what all threads of a block must reach together, barriers and shuffles, may stand
in loops whose bounds are the same for all threads, and never in an `scf.if`.
"""

from __future__ import annotations

from kivi.ir.tile import PtrType
from kivi.ir.xdsl import (
    Attribute,
    AttrSizedOperandSegments,
    Dialect,
    EnumAttribute,
    IndexType,
    IntegerAttr,
    IRDLOperation,
    MemoryReadEffect,
    MemoryWriteEffect,
    MemRefType,
    Operation,
    Pure,
    SpacedOpaqueSyntaxAttribute,
    SSAValue,
    StrEnum,
    VerifyException,
    f32,
    f64,
    func,
    i1,
    i32,
    i64,
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    prop_def,
    result_def,
    scf,
    traits_def,
)

WARP = 32  # threads that shuffle with each other
MOST_THREADS = 1024
WIDE = 16  # bytes of a run that a thread moves at once
MOST_SHARED = 48 << 10  # bytes of the arrays of a block, on every GPU without asking for more
THREADS = "simt.threads"
UNROLL = "simt.unroll"  # on a loop with constant bounds: its arrays of a thread are registers only if every index is a constant


class Space(StrEnum):
    """Whose an array is: `shared` belongs to the block."""

    SHARED = "shared"


@irdl_attr_definition
class SpaceAttr(EnumAttribute[Space], SpacedOpaqueSyntaxAttribute):
    name = "simt.space"


class Exchange(StrEnum):
    """Whose value a thread gets: that of the lane whose number differs in the bits of the offset, or of the lane `offset` above."""

    XOR = "xor"
    DOWN = "down"


@irdl_attr_definition
class ExchangeAttr(EnumAttribute[Exchange], SpacedOpaqueSyntaxAttribute):
    name = "simt.exchange"


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise VerifyException(message)


def threads_of(kernel: func.FuncOp) -> int:
    """Threads of a block of this kernel. Raises `VerifyException` if it has no valid number."""
    given = kernel.attributes.get(THREADS)
    count = given.value.data if isinstance(given, IntegerAttr) else None
    if count is None or count % WARP or not 0 < count <= MOST_THREADS:
        raise VerifyException(
            f"kernel {kernel.sym_name.data!r} has {THREADS} = {count}; a block is whole warps of {WARP} threads, at most {MOST_THREADS}"
        )
    return count


# -- place ------------------------------------------------------------------------------------------------------------


@irdl_op_definition
class ThreadIdOp(IRDLOperation):
    """The thread's number in its block, from 0."""

    name = "simt.thread_id"
    result = result_def(i32)
    traits = traits_def(Pure())
    assembly_format = "attr-dict"


@irdl_op_definition
class BlockIdOp(IRDLOperation):
    """The block's coordinate along a grid axis 0, 1 or 2."""

    name = "simt.block_id"
    axis = prop_def(IntegerAttr.constr(i64))
    result = result_def(i32)
    traits = traits_def(Pure())
    assembly_format = "$axis attr-dict"

    def verify_(self) -> None:
        _expect(0 <= self.axis.value.data <= 2, f"a grid has axes 0, 1 and 2, not {self.axis.value.data}")


# -- together ---------------------------------------------------------------------------------------------------------


@irdl_op_definition
class BarrierOp(IRDLOperation):
    """All threads of the block wait for each other; what they wrote, to shared or global memory, all of them see afterwards."""

    name = "simt.barrier"
    assembly_format = "attr-dict"

    def verify_(self) -> None:
        _expect_together(self)


@irdl_op_definition
class ShuffleOp(IRDLOperation):
    """The value that another thread of the warp passes here. Lanes are counted in segments of `width` threads; a lane that `down` does not
    find in its segment keeps its own value. `mask` names the threads of the warp that take part, by bit: all that arrive, no others."""

    name = "simt.shuffle"
    exchange = prop_def(ExchangeAttr)
    value = operand_def()
    offset = prop_def(IntegerAttr.constr(i64))
    width = prop_def(IntegerAttr.constr(i64))
    mask = prop_def(IntegerAttr.constr(i64))
    result = result_def()
    assembly_format = "$exchange $value `,` $offset `width` $width `mask` $mask attr-dict `:` type($value) `->` type($result)"

    def verify_(self) -> None:
        offset, width, mask = self.offset.value.data, self.width.value.data, self.mask.value.data
        _expect(self.value.type == self.result.type, "a shuffle keeps the type")
        _expect(self.value.type in (i32, i64, f32, f64), f"a shuffle moves i32, i64, f32 or f64, not {self.value.type}")
        _expect(width in (2, 4, 8, 16, 32), f"a segment has 2, 4, 8, 16 or 32 lanes, not {width}")
        _expect(0 < offset < width, f"offset {offset} is outside 1..{width - 1}")
        _expect(0 < mask < 1 << WARP, f"mask {mask} does not name threads of a warp of {WARP}")
        _expect_together(self)


def _expect_together(op: Operation) -> None:
    parent = op.parent_op()
    while parent is not None:
        _expect(not isinstance(parent, scf.IfOp), f"{op.name} may not stand in an scf.if: all threads must reach it")
        parent = parent.parent_op()


# -- global memory ----------------------------------------------------------------------------------------------------


@irdl_op_definition
class LoadOp(IRDLOperation):
    """The element at pointer + offset, offset counted in elements and signed. If the mask is false nothing is read and the result is
    `other`."""

    name = "simt.load"
    pointer = operand_def(PtrType)
    offset = operand_def()
    mask = opt_operand_def(i1)
    other = opt_operand_def()
    result = result_def()
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(MemoryReadEffect())
    assembly_format = (
        "$pointer `[` $offset `]` (`mask` $mask^)? (`other` $other^ `:` type($other))? attr-dict "
        "`:` type($pointer) `,` type($offset) `->` type($result)"
    )

    def verify_(self) -> None:
        _verify_access(self.pointer.type, self.offset.type, self.result.type)
        _expect((self.mask is None) == (self.other is None), "`mask` and `other` go together")
        _expect(self.other is None or self.other.type == self.result.type, "`other` must have the result's type")


@irdl_op_definition
class StoreOp(IRDLOperation):
    """An element written at pointer + offset. No two threads of one grid may write to one address."""

    name = "simt.store"
    pointer = operand_def(PtrType)
    offset = operand_def()
    value = operand_def()
    traits = traits_def(MemoryWriteEffect())
    assembly_format = "$value `,` $pointer `[` $offset `]` attr-dict `:` type($value) `,` type($pointer) `,` type($offset)"

    def verify_(self) -> None:
        _verify_access(self.pointer.type, self.offset.type, self.value.type)


@irdl_op_definition
class CopyOp(IRDLOperation):
    """A run of `WIDE` bytes from pointer + offset on, put into an array of the block from `place` on, with one access to each. Both places
    are multiples of a run. If the mask is false nothing is read, and zeros are put."""

    name = "simt.copy"
    pointer = operand_def(PtrType)
    offset = operand_def()
    mask = opt_operand_def(i1)
    array = operand_def(MemRefType)
    place = operand_def(IndexType)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = (
        "$pointer `[` $offset `]` (`mask` $mask^)? `to` $array `[` $place `]` attr-dict "
        "`:` type($pointer) `,` type($offset) `,` type($array)"
    )

    def verify_(self) -> None:
        kind = self.array.type
        assert isinstance(kind, MemRefType)
        _verify_access(self.pointer.type, self.offset.type, kind.element_type)
        _expect(kind.memory_space == SpaceAttr(Space.SHARED), f"a run is put into an array of the block, not into {kind}")
        elements = run_length(kind.element_type)
        _expect(elements > 1, f"a run of {kind.element_type} is one element: load it")
        _expect(kind.get_shape()[0] % elements == 0, f"an array of {kind.get_shape()[0]} elements does not end with a run of {elements}")


def takes_runs(array: SSAValue) -> bool:
    """Whether runs are put into an array, which then must be aligned to them."""
    return any(isinstance(use.operation, CopyOp) for use in array.uses)


def run_length(kind: Attribute) -> int:
    """Elements of a run."""
    return WIDE // bytes_of(kind)


def bytes_of(kind: Attribute) -> int:
    """Bytes of an element in memory."""
    return max(1, kind.bitwidth // 8)  # type: ignore[attr-defined]  # of integers and floats alike


def _verify_access(pointer: Attribute, offset: Attribute, kind: Attribute) -> None:
    assert isinstance(pointer, PtrType)
    _expect(pointer.element == kind, f"the pointer is to {pointer.element}, the element is {kind}")
    _expect(offset in (i32, i64), f"an offset is i32 or i64, not {offset}")


Simt = Dialect("simt", [ThreadIdOp, BlockIdOp, BarrierOp, ShuffleOp, LoadOp, StoreOp, CopyOp], [SpaceAttr, ExchangeAttr])
