"""Printer of the `tile` dialect as Triton source: one statement an operation, no decision of its own.

What Triton spells differently from the dialect is spelled out: integers are signless in the dialect and signed in Triton, so an
unsigned operation casts the bits around itself; `/` is approximate on a GPU, so a quotient prints as `tl.div_rn`. Kernels must be
compiled with `enable_fp_fusion=False`, or a product and a sum would round once.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable
from typing import Any

from kivi.ir import tile
from kivi.ir.interp.tile import UnknownOperationError
from kivi.ir.tile import element_of, shape_of
from kivi.ir.xdsl import Attribute, ModuleOp, Operation, SSAValue, arith, func, math, scf, spelled

TYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "i1": "int1",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
}

PRELUDE = """\
import triton
import triton.language as tl


# Reductions take the combine functions behind tl.sum, tl.min and tl.max: those wrappers cannot run under an interpreter that is
# switched on after Triton was imported, their combine functions can, and it knows them. Scans run functions of this module.
_add = tl.standard._sum_combine
_min = tl.standard._elementwise_min
_max = tl.standard._elementwise_max


@triton.jit
def _scan_add(a, b):
    return a + b


@triton.jit
def _scan_min(a, b):
    return tl.minimum(a, b)


@triton.jit
def _scan_max(a, b):
    return tl.maximum(a, b)


"""


def emit(module: ModuleOp) -> str:
    """Triton source of all kernels of a module. Raises `UnknownOperationError` naming an operation without a rule."""
    return PRELUDE + "\n\n".join(Printer(op).text() for op in module.ops if isinstance(op, func.FuncOp))


def signature(module: ModuleOp, name: str) -> dict[str, str]:
    """Argument name -> Triton type string of a kernel, e.g. {"x": "*fp16", "n": "i32"}."""
    kernel = next(op for op in module.ops if isinstance(op, func.FuncOp) and op.sym_name.data == name)
    short = {"f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64"}
    printer, out = Printer(kernel), {}
    for argument in kernel.body.block.args:
        kind = argument.type
        text = str(kind.element if isinstance(kind, tile.PtrType) else kind)
        out[printer.name(argument)] = ("*" if isinstance(kind, tile.PtrType) else "") + short.get(text, text)
    return out


class Printer:
    """Prints one kernel."""

    def __init__(self, kernel: func.FuncOp) -> None:
        self.kernel = kernel
        self.names: dict[SSAValue, str] = {}
        self.used: set[str] = {*keyword.kwlist, "tl", "triton", "range", "float", "_add", "_min", "_max"}
        self.lines: list[str] = []
        self.indent = 1

    def text(self) -> str:
        block = self.kernel.body.block
        scalars = [a for a in block.args if not isinstance(a.type, tile.PtrType)]
        arguments = ", ".join(self.name(a) + (f": {_type(a.type)}" if a in scalars else "") for a in block.args)
        # A launcher would take an int of 1 for a constant, and a small one for 32 bits; kernels are typed.
        typed = f"@triton.jit(do_not_specialize={[self.name(a) for a in scalars]})" if scalars else "@triton.jit"
        self.block(block.ops)
        return "\n".join([typed, f"def {self.kernel.sym_name.data}({arguments}):", *self.lines, ""])

    def name(self, value: SSAValue) -> str:
        """The Python name of a value: its hint, made unique."""
        if value not in self.names:
            base = value.name_hint or "v"
            number = len(self.names)
            name = base if value.name_hint else f"v_{number}"
            while name in self.used:
                name, number = f"{base}_{number}", number + 1
            self.used.add(name)
            self.names[value] = name
        return self.names[value]

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def block(self, ops: Any) -> None:
        for op in ops:
            if isinstance(op, scf.ForOp):
                self.loop(op)
            elif isinstance(op, func.ReturnOp):
                if not self.lines:
                    self.line("pass")
            elif isinstance(op, tile.StoreOp):
                pointer, offset, value, *mask = (self.name(o) for o in op.operands)
                self.line(f"tl.store({pointer} + {offset}, {value}{', mask=' + mask[0] if mask else ''})")
            elif not isinstance(op, scf.YieldOp):
                rule = RULES.get(type(op))
                if rule is None:
                    raise UnknownOperationError(f"the Triton emitter has no rule for {op.name}")
                text = rule(op, *(self.name(o) for o in op.operands))
                self.line(f"{self.name(op.results[0])} = {text}")

    def loop(self, op: scf.ForOp) -> None:
        counter, *arguments = op.body.block.args
        for argument, start in zip(arguments, op.iter_args, strict=True):
            self.line(f"{self.name(argument)} = {self.name(start)}")
        low, high, step = (self.name(o) for o in (op.lb, op.ub, op.step))
        self.line(f"for {self.name(counter)}_at in range({low}, {high}, {step}):")
        self.indent += 1
        self.line(f"{self.name(counter)} = tl.full([], {self.name(counter)}_at, {_type(counter.type)})")  # a Python int when interpreted
        self.block(op.body.block.ops)
        results = list(op.body.block.last_op.operands)  # type: ignore[union-attr]
        swapped = set(results) & set(arguments)  # a value carried to another place must be read before it is overwritten
        for value in swapped:
            self.line(f"{self.name(value)}_old = {self.name(value)}")
        for argument, value in zip(arguments, results, strict=True):
            self.line(f"{self.name(argument)} = {self.name(value)}{'_old' if value in swapped else ''}")
        self.indent -= 1
        for result, argument in zip(op.results, arguments, strict=True):
            self.names[result] = self.name(argument)


def _type(kind: Attribute) -> str:
    return f"tl.{TYPES[spelled(element_of(kind))]}"


def _unsigned(kind: Attribute) -> str:
    return _type(kind).replace("tl.int", "tl.uint")


def _shape(kind: Attribute) -> str:
    return "[" + ", ".join(str(n) for n in shape_of(kind)) + "]"


def _infix(symbol: str) -> Callable[..., str]:
    return lambda op, a, b: f"{a} {symbol} {b}"


def _call(name: str) -> Callable[..., str]:
    return lambda op, *operands: f"{name}({', '.join(operands)})"


def _wrapping(name: str) -> Callable[..., str]:
    """Integers wrap in the dialect; Triton would check for it in debug builds and interpreters."""
    return lambda op, a, b: f"tl.{name}({a}, {b}, sanitize_overflow=False)"


def _unsigned_infix(symbol: str) -> Callable[..., str]:
    """On unsigned readings of both operands, read back as signed."""

    def rule(op: Operation, a: str, b: str) -> str:
        kind = op.results[0].type
        u = _unsigned(kind)
        return f"({a}.to({u}, bitcast=True) {symbol} {b}.to({u}, bitcast=True)).to({_type(kind)}, bitcast=True)"

    return rule


def _constant(op: arith.ConstantOp) -> str:
    kind = op.result.type
    value = op.value.value.data  # type: ignore[attr-defined]
    if spelled(kind) == "i1":
        return f"tl.full([], {bool(value)}, tl.int1)"
    text = repr(value) if value == value and abs(value) != float("inf") else f'float("{value}")'
    return f"tl.full([], {text}, {_type(kind)})"


def _cast(op: tile.CastOp, x: str) -> str:
    source, target = element_of(op.source.type), element_of(op.result.type)
    unsigned = op.sign.data is tile.Sign.UNSIGNED
    if unsigned and spelled(source)[0] == "i" and spelled(source) != "i1":
        x = f"{x}.to({_unsigned(source)}, bitcast=True)"
    if unsigned and spelled(source)[0] != "i" and spelled(target)[0] == "i":
        return f"{x}.to({_unsigned(target)}).to({_type(target)}, bitcast=True)"
    return f"{x}.to({_type(target)})"


SYMBOLS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _compare(op: tile.CompareOp, a: str, b: str) -> str:
    name = op.predicate.data.value
    if name.startswith("u"):
        u = _unsigned(op.lhs.type)
        a, b = f"{a}.to({u}, bitcast=True)", f"{b}.to({u}, bitcast=True)"
    return f"{a} {SYMBOLS[name if name in SYMBOLS else name[1:]]} {b}"


def _load(op: tile.LoadOp, pointer: str, offset: str, mask: str = "", other: str = "") -> str:
    # Without `other` the masked elements are 0 by the dialect and undefined in Triton.
    rest = f", mask={mask}, other={other or 0}" if mask else ""
    return f"tl.load({pointer} + {offset}{rest})"


def _reduce(op: tile.ReduceOp, x: str) -> str:
    return f"tl.reduce({x}, {op.axis.value.data}, _{op.combine.data.value}, keep_dims=True)"


def _scan(op: tile.ScanOp, x: str) -> str:
    return f"tl.associative_scan({x}, {op.axis.value.data}, _scan_{op.combine.data.value})"


def _select(op: tile.SelectOp, condition: str, a: str, b: str) -> str:
    return f"tl.where({condition}, {a}, {b})"


RULES: dict[type, Callable[..., str]] = {
    arith.ConstantOp: _constant,
    arith.AddiOp: _wrapping("add"),
    arith.SubiOp: _wrapping("sub"),
    arith.MuliOp: _wrapping("mul"),
    arith.MaxSIOp: _call("tl.maximum"),
    arith.MinSIOp: _call("tl.minimum"),
    arith.DivUIOp: _unsigned_infix("//"),
    arith.RemUIOp: _unsigned_infix("%"),
    arith.ShRUIOp: _unsigned_infix(">>"),
    arith.ShLIOp: _infix("<<"),
    arith.AndIOp: _infix("&"),
    arith.OrIOp: _infix("|"),
    arith.XOrIOp: _infix("^"),
    arith.AddfOp: _infix("+"),
    arith.SubfOp: _infix("-"),
    arith.MulfOp: _infix("*"),
    arith.DivfOp: _call("tl.div_rn"),
    arith.MaxnumfOp: _call("tl.maximum"),
    arith.MinnumfOp: _call("tl.minimum"),
    arith.NegfOp: lambda op, x: f"-{x}",
    arith.BitcastOp: lambda op, x: f"{x}.to({_type(op.result.type)}, bitcast=True)",
    math.ExpOp: _call("tl.exp"),
    math.Exp2Op: _call("tl.exp2"),
    math.Log2Op: _call("tl.log2"),
    math.AbsFOp: _call("tl.abs"),
    tile.ProgramIdOp: lambda op: f"tl.program_id({op.axis.value.data})",
    tile.RangeOp: lambda op: f"tl.arange(0, {shape_of(op.result.type)[0]})",
    tile.SplatOp: lambda op, x: f"tl.full({_shape(op.result.type)}, {x}, {_type(op.result.type)})",
    tile.ExpandOp: lambda op, x: f"tl.expand_dims({x}, {op.axis.value.data})",
    tile.BroadcastOp: lambda op, x: f"tl.broadcast_to({x}, {_shape(op.result.type)})",
    tile.ReshapeOp: lambda op, x: f"tl.reshape({x}, {_shape(op.result.type)})",
    tile.PermuteOp: lambda op, x: f"tl.permute({x}, {list(op.order.get_values())})",
    tile.MultipleOp: lambda op, x: f"tl.multiple_of({x}, {op.of.value.data})",
    tile.CastOp: _cast,
    tile.CompareOp: _compare,
    tile.SelectOp: _select,
    tile.LoadOp: _load,
    tile.ReduceOp: _reduce,
    tile.ScanOp: _scan,
    tile.DotOp: lambda op, a, b, c: f"tl.dot({a}, {b}, {c})",
}
