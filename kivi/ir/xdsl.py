"""The one place that imports xDSL, whose interface moves with every minor release: pinned exactly, adapted here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from xdsl.builder import Builder as Builder
from xdsl.builder import ImplicitBuilder as ImplicitBuilder
from xdsl.context import Context
from xdsl.dialects import arith as arith
from xdsl.dialects import func as func
from xdsl.dialects import math as math
from xdsl.dialects import memref as memref
from xdsl.dialects import scf as scf
from xdsl.dialects.builtin import DYNAMIC_INDEX as DYNAMIC_INDEX
from xdsl.dialects.builtin import ArrayAttr as ArrayAttr
from xdsl.dialects.builtin import BFloat16Type as BFloat16Type
from xdsl.dialects.builtin import Builtin
from xdsl.dialects.builtin import DenseArrayBase as DenseArrayBase
from xdsl.dialects.builtin import DictionaryAttr as DictionaryAttr
from xdsl.dialects.builtin import FloatAttr as FloatAttr
from xdsl.dialects.builtin import FunctionType as FunctionType
from xdsl.dialects.builtin import IndexType as IndexType
from xdsl.dialects.builtin import IntAttr as IntAttr
from xdsl.dialects.builtin import IntegerAttr as IntegerAttr
from xdsl.dialects.builtin import IntegerType as IntegerType
from xdsl.dialects.builtin import MemRefType as MemRefType
from xdsl.dialects.builtin import ModuleOp as ModuleOp
from xdsl.dialects.builtin import NoneAttr as NoneAttr
from xdsl.dialects.builtin import Signedness as Signedness
from xdsl.dialects.builtin import StringAttr as StringAttr
from xdsl.dialects.builtin import TensorType as TensorType
from xdsl.dialects.builtin import UnitAttr as UnitAttr
from xdsl.dialects.builtin import VectorType as VectorType
from xdsl.dialects.builtin import bf16 as bf16
from xdsl.dialects.builtin import f16 as f16
from xdsl.dialects.builtin import f32 as f32
from xdsl.dialects.builtin import f64 as f64
from xdsl.dialects.builtin import i1 as i1
from xdsl.dialects.builtin import i8 as i8
from xdsl.dialects.builtin import i16 as i16
from xdsl.dialects.builtin import i32 as i32
from xdsl.dialects.builtin import i64 as i64
from xdsl.dialects.utils.enum_attribute import EnumAttribute as EnumAttribute
from xdsl.dialects.utils.fast_math import FastMathFlag as FastMathFlag
from xdsl.ir import Attribute as Attribute
from xdsl.ir import Block as Block
from xdsl.ir import BlockArgument as BlockArgument
from xdsl.ir import Dialect as Dialect
from xdsl.ir import Operation as Operation
from xdsl.ir import ParametrizedAttribute as ParametrizedAttribute
from xdsl.ir import Region as Region
from xdsl.ir import SpacedOpaqueSyntaxAttribute as SpacedOpaqueSyntaxAttribute
from xdsl.ir import SSAValue as SSAValue
from xdsl.ir import TypeAttribute as TypeAttribute
from xdsl.irdl import AttrSizedOperandSegments as AttrSizedOperandSegments
from xdsl.irdl import IRDLOperation as IRDLOperation
from xdsl.irdl import ParsePropInAttrDict as ParsePropInAttrDict
from xdsl.irdl import VarConstraint as VarConstraint
from xdsl.irdl import base as base
from xdsl.irdl import irdl_attr_definition as irdl_attr_definition
from xdsl.irdl import irdl_op_definition as irdl_op_definition
from xdsl.irdl import operand_def as operand_def
from xdsl.irdl import opt_operand_def as opt_operand_def
from xdsl.irdl import param_def as param_def
from xdsl.irdl import prop_def as prop_def
from xdsl.irdl import result_def as result_def
from xdsl.irdl import traits_def as traits_def
from xdsl.parser import AttrParser as AttrParser
from xdsl.parser import Parser
from xdsl.printer import Printer as Printer
from xdsl.rewriter import InsertPoint as InsertPoint
from xdsl.rewriter import Rewriter as Rewriter
from xdsl.traits import Commutative as Commutative
from xdsl.traits import IsTerminator as IsTerminator
from xdsl.traits import MemoryReadEffect as MemoryReadEffect
from xdsl.traits import MemoryWriteEffect as MemoryWriteEffect
from xdsl.traits import NoMemoryEffect as NoMemoryEffect
from xdsl.traits import Pure as Pure
from xdsl.traits import RecursiveMemoryEffect as RecursiveMemoryEffect
from xdsl.utils.exceptions import ParseError as ParseError
from xdsl.utils.exceptions import VerifyException as VerifyException
from xdsl.utils.str_enum import StrEnum as StrEnum

UPSTREAM = (Builtin, arith.Arith, func.Func, math.Math, memref.MemRef, scf.Scf)


def context(*dialects: Dialect) -> Context:
    """A context that knows the upstream dialects in use and `dialects`."""
    out = Context()
    for dialect in (*UPSTREAM, *dialects):
        out.load_dialect(dialect)
    return out


def parse(text: str, *dialects: Dialect) -> ModuleOp:
    """A verified module from text. Raises `ParseError`, `VerifyException`."""
    module = Parser(context(*dialects), text).parse_module()
    module.verify()
    return module


@cache
def spelled(kind: Attribute) -> str:
    """A type as text. xDSL makes a printer each time it is asked, and emitters ask for a handful of types at every operation."""
    return str(kind)


@cache
def integer(value: int, kind: IntegerType) -> IntegerAttr:
    """An integer attribute; xDSL checks its range each time it makes one."""
    return IntegerAttr(value, kind)


_properties: dict[type[Operation], dict[str, Attribute]] = {}


def binary(op: type[Operation], left: SSAValue, right: SSAValue) -> SSAValue:
    """`op(left, right)` of `arith`, whose result has the type of its operands. Constructors of xDSL look at everything that an operation
    could be given, which costs more than the rest of a lowering; so each runs once, for the properties that it gives."""
    known = _properties.get(op)
    if known is None:
        made = op(left, right)  # type: ignore[call-arg]
        _properties[op] = dict(made.properties)
        return made.results[0]
    return op.create(operands=(left, right), result_types=(left.type,), properties=known.copy()).results[0]


def made(op: type[Operation], operands: Sequence[SSAValue], kind: Attribute, **properties: Attribute) -> Operation:
    """An operation with one result and, beside those given, its default properties; for those that have groups of operands, `grouped`."""
    return op.create(operands=operands, result_types=(kind,), properties=properties)


def grouped(op: type[Operation], groups: Sequence[Sequence[SSAValue]], *kinds: Attribute) -> Operation:
    """An operation whose operands are groups of known or unknown length."""
    sizes = _sizes(tuple([len(group) for group in groups]))
    operands = [operand for group in groups for operand in group]
    return op.create(operands=operands, result_types=kinds, properties={"operandSegmentSizes": sizes})


@cache
def _sizes(lengths: tuple[int, ...]) -> DenseArrayBase:
    return DenseArrayBase.from_list(i32, lengths)


_predicates: dict[tuple[type[Operation], str], dict[str, Attribute]] = {}


def comparison(op: type[Operation], left: SSAValue, right: SSAValue, predicate: str) -> Operation:
    """`arith.cmpi` or `arith.cmpf`, by the name of its predicate."""
    known = _predicates.get((op, predicate))
    if known is None:
        first = op(left, right, predicate)  # type: ignore[call-arg]
        _predicates[op, predicate] = dict(first.properties)
        return first
    return op.create(operands=(left, right), result_types=(i1,), properties=known)


def constant(value: IntegerAttr | FloatAttr, kind: Attribute) -> SSAValue:
    """A scalar constant."""
    return arith.ConstantOp.create(result_types=(kind,), properties={"value": value}).results[0]
