"""Dialect `tile`: one program's work on blocks of elements.

A kernel is a `func.func` whose arguments are pointers and scalars; it runs once for each point of a grid. A tile is a builtin
tensor of static shape, so elementwise arithmetic is upstream `arith` and `math`, and loops are `scf`. The dialect adds what those
lack: the program's place in the grid, tiles made of indices, masked memory access, reductions and shape changes, and tile forms of
the casts, comparisons and selections that upstream defines for scalars only.

The argument attribute `tile.align` promises that a pointer is a multiple of so many bytes; without it, it is one of its element only.

Two choices keep numbers portable. Nothing is contracted or reassociated unless an op says so: `arith.divf` is correctly rounded,
`arith.mulf` followed by `arith.addf` rounds twice, and only `tile.reduce` and `tile.dot` may pick an order of summation, in the
element type of their result. And integer signedness is on the op, never guessed from the type.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar

from kivi.ir.xdsl import (
    Attribute,
    AttrSizedOperandSegments,
    DenseArrayBase,
    Dialect,
    EnumAttribute,
    IntegerAttr,
    IntegerType,
    IRDLOperation,
    MemoryReadEffect,
    MemoryWriteEffect,
    ParametrizedAttribute,
    ParsePropInAttrDict,
    Pure,
    SpacedOpaqueSyntaxAttribute,
    SSAValue,
    StrEnum,
    TensorType,
    TypeAttribute,
    VerifyException,
    f32,
    func,
    i1,
    i32,
    i64,
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    param_def,
    prop_def,
    result_def,
    traits_def,
)

# -- types ------------------------------------------------------------------------------------------------------------


@irdl_attr_definition
class PtrType(ParametrizedAttribute, TypeAttribute):
    """`!tile.ptr<f16>`: the address of elements of one type in global memory."""

    name = "tile.ptr"
    element: Attribute = param_def()


ALIGN = "tile.align"


def alignment(kernel: func.FuncOp) -> dict[SSAValue, int]:
    """The bytes of which each pointer of a kernel is promised to be a multiple; pointers without a promise are left out."""
    given = [] if kernel.arg_attrs is None else kernel.arg_attrs.data
    found = {argument: attributes.data.get(ALIGN) for argument, attributes in zip(kernel.body.block.args, given, strict=False)}
    return {argument: value.value.data for argument, value in found.items() if isinstance(value, IntegerAttr) and value.value.data > 0}


def shape_of(kind: Attribute) -> tuple[int, ...]:
    """The shape of a tile; () for a scalar."""
    return tuple([n.data for n in kind.shape.data]) if type(kind) is TensorType else ()


def is_tile(value: SSAValue) -> bool:
    """Whether a value is a tile, which has at least one axis, or a scalar."""
    return type(value.type) is TensorType


def element_of(kind: Attribute) -> Attribute:
    """The element type of a tile, or the scalar type itself."""
    return kind.element_type if type(kind) is TensorType else kind


@cache
def tile_of(shape: tuple[int, ...], element: Attribute) -> Attribute:
    """The type of a tile; a scalar type for the empty shape."""
    return TensorType(element, shape) if shape else element


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise VerifyException(message)


# -- enums ------------------------------------------------------------------------------------------------------------


class Predicate(StrEnum):
    """Comparisons: `eq ne` of any type, `slt sle sgt sge ult ule ugt uge` of integers, `olt ole ogt oge` of floats."""

    EQ = "eq"
    NE = "ne"
    SLT = "slt"
    SLE = "sle"
    SGT = "sgt"
    SGE = "sge"
    ULT = "ult"
    ULE = "ule"
    UGT = "ugt"
    UGE = "uge"
    OLT = "olt"
    OLE = "ole"
    OGT = "ogt"
    OGE = "oge"


@irdl_attr_definition
class PredicateAttr(EnumAttribute[Predicate], SpacedOpaqueSyntaxAttribute):
    name = "tile.predicate"


class Combine(StrEnum):
    """How a reduction or a scan combines: a sum in any order, the least or the greatest number."""

    ADD = "add"
    MIN = "min"
    MAX = "max"


@irdl_attr_definition
class CombineAttr(EnumAttribute[Combine], SpacedOpaqueSyntaxAttribute):
    name = "tile.combine"


class Sign(StrEnum):
    """How an integer reads."""

    SIGNED = "signed"
    UNSIGNED = "unsigned"


@irdl_attr_definition
class SignAttr(EnumAttribute[Sign], SpacedOpaqueSyntaxAttribute):
    name = "tile.sign"


# -- place and indices ------------------------------------------------------------------------------------------------


@irdl_op_definition
class ProgramIdOp(IRDLOperation):
    """The program's coordinate along a grid axis 0, 1 or 2."""

    name = "tile.program_id"
    axis = prop_def(IntegerAttr.constr(i64))
    result = result_def(i32)
    traits = traits_def(Pure())
    assembly_format = "$axis attr-dict"

    def verify_(self) -> None:
        _expect(0 <= self.axis.value.data <= 2, f"a grid has axes 0, 1 and 2, not {self.axis.value.data}")


@irdl_op_definition
class RangeOp(IRDLOperation):
    """0, 1, ..., n-1."""

    name = "tile.range"
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "attr-dict `:` type($result)"

    def verify_(self) -> None:
        _expect(len(shape_of(self.result.type)) == 1 and element_of(self.result.type) == i32, "a range is a tensor<Nxi32>")


# -- shape ------------------------------------------------------------------------------------------------------------


@irdl_op_definition
class SplatOp(IRDLOperation):
    """A tile with a scalar everywhere."""

    name = "tile.splat"
    source = operand_def()
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$source attr-dict `:` type($source) `->` type($result)"

    def verify_(self) -> None:
        _expect(self.source.type == element_of(self.result.type), "a splat keeps the element type")


@irdl_op_definition
class ExpandOp(IRDLOperation):
    """A new axis of length 1."""

    name = "tile.expand"
    source = operand_def(TensorType)
    axis = prop_def(IntegerAttr.constr(i64))
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$source `,` $axis attr-dict `:` type($source) `->` type($result)"

    def verify_(self) -> None:
        shape = list(shape_of(self.source.type))
        _expect(0 <= self.axis.value.data <= len(shape), f"axis {self.axis.value.data} is outside 0..{len(shape)}")
        shape.insert(self.axis.value.data, 1)
        _expect(self.result.type == tile_of(tuple(shape), element_of(self.source.type)), f"expected shape {shape} of the same element type")


@irdl_op_definition
class BroadcastOp(IRDLOperation):
    """Axes of length 1 repeated."""

    name = "tile.broadcast"
    source = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$source attr-dict `:` type($source) `->` type($result)"

    def verify_(self) -> None:
        a, b = shape_of(self.source.type), shape_of(self.result.type)
        _expect(len(a) == len(b) and all(x in (1, y) for x, y in zip(a, b, strict=True)), f"{a} does not broadcast to {b}")
        _expect(element_of(self.source.type) == element_of(self.result.type), "a broadcast keeps the element type")


@irdl_op_definition
class ReshapeOp(IRDLOperation):
    """The same elements in row-major order under another shape."""

    name = "tile.reshape"
    source = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$source attr-dict `:` type($source) `->` type($result)"

    def verify_(self) -> None:
        sizes = []
        for kind in (self.source.type, self.result.type):
            size = 1
            for n in shape_of(kind):
                size *= n
            sizes.append(size)
        _expect(sizes[0] == sizes[1], f"{sizes[0]} elements cannot become {sizes[1]}")
        _expect(element_of(self.source.type) == element_of(self.result.type), "a reshape keeps the element type")


@irdl_op_definition
class PermuteOp(IRDLOperation):
    """Axes in another order: axis i of the result is axis order[i] of the source."""

    name = "tile.permute"
    source = operand_def(TensorType)
    order = prop_def(DenseArrayBase.constr(i64))
    result = result_def(TensorType)
    traits = traits_def(Pure())
    irdl_options = (ParsePropInAttrDict(),)
    assembly_format = "$source attr-dict `:` type($source) `->` type($result)"

    def verify_(self) -> None:
        order, shape = list(self.order.get_values()), shape_of(self.source.type)
        _expect(sorted(order) == list(range(len(shape))), f"{order} is not an order of {len(shape)} axes")
        moved = tuple(shape[i] for i in order)
        _expect(self.result.type == tile_of(moved, element_of(self.source.type)), f"expected shape {moved} of the same element type")


@irdl_op_definition
class MultipleOp(IRDLOperation):
    """The source, which is promised to be a multiple of a constant: what a compiler needs to know to widen memory access."""

    name = "tile.multiple"
    source = operand_def()
    of = prop_def(IntegerAttr.constr(i64))
    result = result_def()
    traits = traits_def(Pure())
    assembly_format = "$source `of` $of attr-dict `:` type($source) `->` type($result)"

    def verify_(self) -> None:
        _expect(self.source.type == self.result.type and self.source.type in (i32, i64), "a multiple is an i32 or i64 scalar")
        _expect(self.of.value.data > 0, f"{self.of.value.data} has no multiples to promise")


# -- elementwise ------------------------------------------------------------------------------------------------------


@irdl_op_definition
class CastOp(IRDLOperation):
    """A conversion by value: integers are extended or truncated, floats rounded half to even, a float to an integer truncated
    (its value must fit). `sign` says how the integer side reads."""

    name = "tile.cast"
    source = operand_def()
    sign = prop_def(SignAttr)
    result = result_def()
    traits = traits_def(Pure())
    assembly_format = "$sign $source attr-dict `:` type($source) `->` type($result)"

    def verify_(self) -> None:
        _expect(shape_of(self.source.type) == shape_of(self.result.type), "a cast keeps the shape")


@irdl_op_definition
class CompareOp(IRDLOperation):
    """True where the comparison holds; ordered comparisons of floats are false for NaN, `ne` is true."""

    name = "tile.compare"
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
        _expect(self.result.type == tile_of(shape_of(self.lhs.type), i1), "the result has the operands' shape and type i1")
        wrong = self.FLOAT if isinstance(element_of(self.lhs.type), IntegerType) else self.INTEGER
        _expect(self.predicate.data.value not in wrong, f"{self.predicate.data.value} does not compare {element_of(self.lhs.type)}")


@irdl_op_definition
class SelectOp(IRDLOperation):
    """`lhs` where the condition holds, `rhs` elsewhere."""

    name = "tile.select"
    condition = operand_def()
    lhs = operand_def()
    rhs = operand_def()
    result = result_def()
    traits = traits_def(Pure())
    assembly_format = "$condition `,` $lhs `,` $rhs attr-dict `:` type($condition) `,` type($lhs) `,` type($rhs) `->` type($result)"

    def verify_(self) -> None:
        _expect(self.lhs.type == self.rhs.type == self.result.type, "both choices and the result must have one type")
        _expect(self.condition.type == tile_of(shape_of(self.lhs.type), i1), "the condition has the choices' shape and type i1")


# -- memory -----------------------------------------------------------------------------------------------------------


@irdl_op_definition
class LoadOp(IRDLOperation):
    """Elements at pointer + offset, offsets counted in elements. Where the mask is false nothing is read and the result is
    `other`, or 0 without one."""

    name = "tile.load"
    pointer = operand_def(PtrType)
    offset = operand_def()
    mask = opt_operand_def()
    other = opt_operand_def()
    result = result_def()
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(MemoryReadEffect())
    assembly_format = (
        "$pointer `[` $offset `]` (`mask` $mask^ `:` type($mask))? (`other` $other^ `:` type($other))? attr-dict "
        "`:` type($pointer) `,` type($offset) `->` type($result)"
    )

    def verify_(self) -> None:
        _verify_access(self, self.result.type)
        _expect(self.other is None or self.mask is not None, "`other` without a mask is never used")
        _expect(self.other is None or self.other.type == self.result.type, "`other` must have the result's type")


@irdl_op_definition
class StoreOp(IRDLOperation):
    """Elements written at pointer + offset where the mask is true. No two elements of one grid may share an address."""

    name = "tile.store"
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
        _verify_access(self, self.value.type)


def _verify_access(op: LoadOp | StoreOp, kind: Attribute) -> None:
    shape = shape_of(kind)
    pointer = op.pointer.type
    assert isinstance(pointer, PtrType)
    _expect(pointer.element == element_of(kind), f"the pointer is to {pointer.element}, the elements are {element_of(kind)}")
    _expect(op.offset.type in (tile_of(shape, i32), tile_of(shape, i64)), f"offsets must be i32 or i64 of shape {shape}")
    _expect(op.mask is None or op.mask.type == tile_of(shape, i1), f"the mask must be i1 of shape {shape}")


# -- combinations across elements ---------------------------------------------------------------------------------------


@irdl_op_definition
class ReduceOp(IRDLOperation):
    """One axis combined to length 1, kept. A sum may be taken in any order, each step rounded to the element type; `min` and
    `max` of NaN are undefined."""

    name = "tile.reduce"
    combine = prop_def(CombineAttr)
    source = operand_def(TensorType)
    axis = prop_def(IntegerAttr.constr(i64))
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$combine $source `,` $axis attr-dict `:` type($source) `->` type($result)"

    def verify_(self) -> None:
        shape = list(shape_of(self.source.type))
        _expect(0 <= self.axis.value.data < len(shape), f"axis {self.axis.value.data} is outside 0..{len(shape) - 1}")
        shape[self.axis.value.data] = 1
        _expect(self.result.type == tile_of(tuple(shape), element_of(self.source.type)), f"expected shape {shape} of the same element type")


@irdl_op_definition
class ScanOp(IRDLOperation):
    """Running combination along one axis, each element included."""

    name = "tile.scan"
    combine = prop_def(CombineAttr)
    source = operand_def(TensorType)
    axis = prop_def(IntegerAttr.constr(i64))
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$combine $source `,` $axis attr-dict `:` type($source) `->` type($result)"

    def verify_(self) -> None:
        _expect(0 <= self.axis.value.data < len(shape_of(self.source.type)), f"there is no axis {self.axis.value.data}")
        _expect(self.source.type == self.result.type, "a scan keeps the type")


@irdl_op_definition
class DotOp(IRDLOperation):
    """lhs [M, K] times rhs [K, N] plus acc [M, N], products exact, sums in any order in the type of acc."""

    name = "tile.dot"
    lhs = operand_def(TensorType)
    rhs = operand_def(TensorType)
    acc = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$lhs `,` $rhs `,` $acc attr-dict `:` type($lhs) `,` type($rhs) `,` type($acc) `->` type($result)"

    def verify_(self) -> None:
        a, b, c = (shape_of(x.type) for x in (self.lhs, self.rhs, self.acc))
        _expect(len(a) == len(b) == 2 and a[1] == b[0] and c == (a[0], b[1]), f"{a} times {b} is not {c}")
        _expect(element_of(self.lhs.type) == element_of(self.rhs.type), "both operands must have one element type")
        _expect(self.acc.type == self.result.type and element_of(self.acc.type) == f32, "sums are accumulated in f32")


Tile = Dialect(
    "tile",
    [
        ProgramIdOp,
        RangeOp,
        SplatOp,
        ExpandOp,
        BroadcastOp,
        ReshapeOp,
        PermuteOp,
        MultipleOp,
        CastOp,
        CompareOp,
        SelectOp,
        LoadOp,
        StoreOp,
        ReduceOp,
        ScanOp,
        DotOp,
    ],
    [PtrType, PredicateAttr, CombineAttr, SignAttr],
)
