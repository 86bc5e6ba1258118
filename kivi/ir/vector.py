"""Dialect `vec`: one program's work as loops over vectors of fixed width.

The level below `tile` for processors with vector registers. A vector is a builtin `vector<NxT>`, loops and branches are `scf`, elementwise
arithmetic is upstream `arith` and `math` with the same meaning as at `tile` level: nothing is contracted or reassociated unless an
operation says so (`math.fma` rounds once, `vec.reduce` picks an order). The dialect adds what upstream lacks for vectors: memory access
through the pointers of `tile` (`!tile.ptr<T>`), contiguous or lane by lane, a table lookup, shuffles, reductions across lanes, and vector
forms of casts, comparisons and selections. It is called `vec`, since upstream MLIR has a dialect `vector` of another design.

Every operation names an instruction or two of a real processor. What a processor may lack (`vec.lookup`, `math.fma`, half precision) is
chosen by the lowering from a `Target` (`kivi.passes.vector_target`), never by a printer.
"""

from __future__ import annotations

from typing import ClassVar

from kivi.ir.tile import CombineAttr, PredicateAttr, PtrType, SignAttr
from kivi.ir.xdsl import (
    Attribute,
    DenseArrayBase,
    Dialect,
    IntegerAttr,
    IntegerType,
    IRDLOperation,
    MemoryReadEffect,
    MemoryWriteEffect,
    ParsePropInAttrDict,
    Pure,
    VectorType,
    VerifyException,
    f32,
    i1,
    i32,
    i64,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    prop_def,
    result_def,
    traits_def,
)

TABLE = 16
"""Entries of a lookup table."""


def lanes_of(kind: Attribute) -> int:
    """The width of a vector; 0 for a scalar."""
    return int(kind.get_shape()[0]) if isinstance(kind, VectorType) else 0


def element_of(kind: Attribute) -> Attribute:
    """The element type of a vector, or the scalar type itself."""
    return kind.element_type if isinstance(kind, VectorType) else kind


def vector_of(lanes: int, element: Attribute) -> Attribute:
    """The type of a vector; a scalar type for 0 lanes."""
    return VectorType(element, [lanes]) if lanes else element


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise VerifyException(message)


def _expect_vector(kind: Attribute) -> None:
    _expect(isinstance(kind, VectorType) and len(kind.get_shape()) == 1, f"a vector has one axis; {kind} is none")


# -- place and lanes --------------------------------------------------------------------------------------------------


@irdl_op_definition
class ProgramIdOp(IRDLOperation):
    """The program's coordinate along a grid axis 0, 1 or 2."""

    name = "vec.program_id"
    axis = prop_def(IntegerAttr.constr(i64))
    result = result_def(i32)
    traits = traits_def(Pure())
    assembly_format = "$axis attr-dict"

    def verify_(self) -> None:
        _expect(0 <= self.axis.value.data <= 2, f"a grid has axes 0, 1 and 2, not {self.axis.value.data}")


@irdl_op_definition
class IotaOp(IRDLOperation):
    """0, 1, ..., N-1."""

    name = "vec.iota"
    result = result_def(VectorType)
    traits = traits_def(Pure())
    assembly_format = "attr-dict `:` type($result)"

    def verify_(self) -> None:
        _expect_vector(self.result.type)
        _expect(element_of(self.result.type) in (i32, i64), "an iota is a vector of i32 or i64")


@irdl_op_definition
class BroadcastOp(IRDLOperation):
    """A scalar in every lane."""

    name = "vec.broadcast"
    source = operand_def()
    result = result_def(VectorType)
    traits = traits_def(Pure())
    assembly_format = "$source attr-dict `:` type($source) `->` type($result)"

    def verify_(self) -> None:
        _expect_vector(self.result.type)
        _expect(self.source.type == element_of(self.result.type), "a broadcast keeps the element type")


@irdl_op_definition
class ShuffleOp(IRDLOperation):
    """Lanes of a vector at constant positions: lane i of the result is lane order[i] of the source."""

    name = "vec.shuffle"
    source = operand_def(VectorType)
    order = prop_def(DenseArrayBase.constr(i64))
    result = result_def(VectorType)
    traits = traits_def(Pure())
    irdl_options = (ParsePropInAttrDict(),)
    assembly_format = "$source attr-dict `:` type($source) `->` type($result)"

    def verify_(self) -> None:
        order, lanes = list(self.order.get_values()), lanes_of(self.source.type)
        _expect(all(0 <= i < lanes for i in order), f"{order} names a lane outside 0..{lanes - 1}")
        _expect(self.result.type == vector_of(len(order), element_of(self.source.type)), f"expected {len(order)} lanes of the same type")


@irdl_op_definition
class LookupOp(IRDLOperation):
    """Entries of a table of 16 at positions that each lane names by its lowest four bits; the bits above are ignored."""

    name = "vec.lookup"
    table = operand_def(VectorType)
    index = operand_def(VectorType)
    result = result_def(VectorType)
    traits = traits_def(Pure())
    assembly_format = "$table `,` $index attr-dict `:` type($table) `,` type($index) `->` type($result)"

    def verify_(self) -> None:
        _expect(self.table.type == vector_of(TABLE, f32), f"a table is a vector<{TABLE}xf32>")
        lanes = lanes_of(self.index.type)
        _expect(self.index.type == vector_of(lanes, i32), "positions are i32")
        _expect(self.result.type == vector_of(lanes, f32), f"expected {lanes} lanes of f32")


# -- elementwise ------------------------------------------------------------------------------------------------------


@irdl_op_definition
class CastOp(IRDLOperation):
    """A conversion by value: integers are extended or truncated, floats rounded half to even, a float to an integer truncated
    (its value must fit). `sign` says how the integer side reads."""

    name = "vec.cast"
    source = operand_def()
    sign = prop_def(SignAttr)
    result = result_def()
    traits = traits_def(Pure())
    assembly_format = "$sign $source attr-dict `:` type($source) `->` type($result)"

    def verify_(self) -> None:
        _expect(lanes_of(self.source.type) == lanes_of(self.result.type), "a cast keeps the lanes")


@irdl_op_definition
class CompareOp(IRDLOperation):
    """True where the comparison holds; ordered comparisons of floats are false for NaN, `ne` is true."""

    name = "vec.compare"
    predicate = prop_def(PredicateAttr)
    lhs = operand_def()
    rhs = operand_def()
    result = result_def()
    traits = traits_def(Pure())
    assembly_format = "$predicate $lhs `,` $rhs attr-dict `:` type($lhs) `,` type($rhs) `->` type($result)"

    INTEGER: ClassVar = ("slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
    FLOAT: ClassVar = ("olt", "ole", "ogt", "oge")

    def verify_(self) -> None:
        _expect(self.lhs.type == self.rhs.type, "both sides must have one type")
        _expect(self.result.type == vector_of(lanes_of(self.lhs.type), i1), "the result has the operands' lanes and type i1")
        wrong = self.FLOAT if isinstance(element_of(self.lhs.type), IntegerType) else self.INTEGER
        _expect(self.predicate.data.value not in wrong, f"{self.predicate.data.value} does not compare {element_of(self.lhs.type)}")


@irdl_op_definition
class SelectOp(IRDLOperation):
    """`lhs` where the condition holds, `rhs` elsewhere; a scalar condition chooses all lanes alike."""

    name = "vec.select"
    condition = operand_def()
    lhs = operand_def()
    rhs = operand_def()
    result = result_def()
    traits = traits_def(Pure())
    assembly_format = "$condition `,` $lhs `,` $rhs attr-dict `:` type($condition) `,` type($lhs) `,` type($rhs) `->` type($result)"

    def verify_(self) -> None:
        _expect(self.lhs.type == self.rhs.type == self.result.type, "both choices and the result must have one type")
        _expect(self.condition.type in (i1, vector_of(lanes_of(self.lhs.type), i1)), "the condition is i1, alone or for every lane")


# -- memory -----------------------------------------------------------------------------------------------------------


@irdl_op_definition
class BufferOp(IRDLOperation):
    """Room for `count` elements that belong to this program, uninitialized; it lives as long as the program."""

    name = "vec.buffer"
    count = prop_def(IntegerAttr.constr(i64))
    result = result_def(PtrType)
    traits = traits_def(MemoryWriteEffect())
    assembly_format = "$count attr-dict `:` type($result)"

    def verify_(self) -> None:
        _expect(self.count.value.data > 0, f"a buffer of {self.count.value.data} elements holds nothing")


def _verify_access(pointer: Attribute, offset: Attribute, kind: Attribute, mask: Attribute | None, lanes: int) -> None:
    """`lanes`: those of the offset."""
    assert isinstance(pointer, PtrType)
    _expect(pointer.element == element_of(kind), f"the pointer is to {pointer.element}, the elements are {element_of(kind)}")
    wanted = "offsets must be i32 or i64, one a lane" if lanes else "the offset must be an i32 or i64 scalar"
    _expect(offset in (vector_of(lanes, i32), vector_of(lanes, i64)), wanted)
    _expect(mask is None or mask == vector_of(lanes_of(kind), i1), "the mask must be i1, one a lane")


@irdl_op_definition
class LoadOp(IRDLOperation):
    """Neighbouring elements from pointer + offset on, offsets counted in elements. Where the mask is false nothing is read and the
    result is 0."""

    name = "vec.load"
    pointer = operand_def(PtrType)
    offset = operand_def()
    mask = opt_operand_def()
    result = result_def()
    traits = traits_def(MemoryReadEffect())
    assembly_format = (
        "$pointer `[` $offset `]` (`mask` $mask^ `:` type($mask))? attr-dict `:` type($pointer) `,` type($offset) `->` type($result)"
    )

    def verify_(self) -> None:
        mask = None if self.mask is None else self.mask.type
        _verify_access(self.pointer.type, self.offset.type, self.result.type, mask, 0)


@irdl_op_definition
class StoreOp(IRDLOperation):
    """Neighbouring elements written from pointer + offset on, where the mask is true."""

    name = "vec.store"
    pointer = operand_def(PtrType)
    offset = operand_def()
    value = operand_def()
    mask = opt_operand_def()
    traits = traits_def(MemoryWriteEffect())
    assembly_format = (
        "$value `,` $pointer `[` $offset `]` (`mask` $mask^ `:` type($mask))? attr-dict "
        "`:` type($value) `,` type($pointer) `,` type($offset)"
    )

    def verify_(self) -> None:
        mask = None if self.mask is None else self.mask.type
        _verify_access(self.pointer.type, self.offset.type, self.value.type, mask, 0)


@irdl_op_definition
class GatherOp(IRDLOperation):
    """Elements at pointer + offset, an offset a lane. Where the mask is false nothing is read and the result is 0."""

    name = "vec.gather"
    pointer = operand_def(PtrType)
    offset = operand_def(VectorType)
    mask = opt_operand_def()
    result = result_def(VectorType)
    traits = traits_def(MemoryReadEffect())
    assembly_format = (
        "$pointer `[` $offset `]` (`mask` $mask^ `:` type($mask))? attr-dict `:` type($pointer) `,` type($offset) `->` type($result)"
    )

    def verify_(self) -> None:
        mask = None if self.mask is None else self.mask.type
        _verify_access(self.pointer.type, self.offset.type, self.result.type, mask, lanes_of(self.result.type))


@irdl_op_definition
class ScatterOp(IRDLOperation):
    """Elements written at pointer + offset, an offset a lane, where the mask is true. No two lanes may share an address."""

    name = "vec.scatter"
    pointer = operand_def(PtrType)
    offset = operand_def(VectorType)
    value = operand_def(VectorType)
    mask = opt_operand_def()
    traits = traits_def(MemoryWriteEffect())
    assembly_format = (
        "$value `,` $pointer `[` $offset `]` (`mask` $mask^ `:` type($mask))? attr-dict "
        "`:` type($value) `,` type($pointer) `,` type($offset)"
    )

    def verify_(self) -> None:
        mask = None if self.mask is None else self.mask.type
        _verify_access(self.pointer.type, self.offset.type, self.value.type, mask, lanes_of(self.value.type))


@irdl_op_definition
class PrefetchOp(IRDLOperation):
    """A hint that the memory at pointer + offset will be read soon, though not at once: the second cache is near enough, and takes more
    requests at a time than the first. It changes no value and may name any address."""

    name = "vec.prefetch"
    pointer = operand_def(PtrType)
    offset = operand_def()
    traits = traits_def(MemoryWriteEffect())  # nothing is written; without an effect it would be dead
    assembly_format = "$pointer `[` $offset `]` attr-dict `:` type($pointer) `,` type($offset)"

    def verify_(self) -> None:
        _expect(self.offset.type in (i32, i64), "the offset must be an i32 or i64 scalar")


# -- across lanes -----------------------------------------------------------------------------------------------------


@irdl_op_definition
class ReduceOp(IRDLOperation):
    """All lanes combined. A sum may be taken in any order, each step rounded to the element type; `min` and `max` of NaN are
    undefined."""

    name = "vec.reduce"
    combine = prop_def(CombineAttr)
    source = operand_def(VectorType)
    result = result_def()
    traits = traits_def(Pure())
    assembly_format = "$combine $source attr-dict `:` type($source) `->` type($result)"

    def verify_(self) -> None:
        _expect(self.result.type == element_of(self.source.type), "a reduction keeps the element type")


Vec = Dialect(
    "vec",
    [
        ProgramIdOp,
        IotaOp,
        BroadcastOp,
        ShuffleOp,
        LookupOp,
        CastOp,
        CompareOp,
        SelectOp,
        BufferOp,
        LoadOp,
        StoreOp,
        GatherOp,
        ScatterOp,
        PrefetchOp,
        ReduceOp,
    ],
    [],
)
