"""Printer of the `tile` dialect as Triton source: one statement an operation, no decision of its own.

What Triton spells differently from the dialect is spelled out: integers are signless in the dialect and signed in Triton, so an
unsigned operation casts the bits around itself; `/` is approximate on a GPU, so a quotient prints as `tl.div_rn`. Kernels must be
compiled with `enable_fp_fusion=False`, or a product and a sum would round once.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable

from kivi.emit import printer
from kivi.emit.printer import SYMBOLS, functions
from kivi.ir import tile
from kivi.ir.tile import element_of, shape_of
from kivi.ir.xdsl import Attribute, ModuleOp, Operation, arith, func, math, scf, spelled

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

#: As the launcher calls them.
SHORT = {"f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64"}

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
    return PRELUDE + "\n\n".join(Printer(op).text() for op in functions(module))


def signature(module: ModuleOp, name: str) -> dict[str, str]:
    """Argument name -> Triton type string of a kernel, e.g. {"x": "*fp16", "n": "i32"}."""
    return Printer(next(op for op in functions(module) if op.sym_name.data == name)).signature()


class Printer(printer.Printer):
    """Prints one kernel."""

    language = "Triton"
    unnamed = "v_"

    def __init__(self, kernel: func.FuncOp) -> None:
        super().__init__(kernel, STATEMENTS, RULES, {*keyword.kwlist, "tl", "triton", "range", "float", "_add", "_min", "_max"})

    def text(self) -> str:
        block = self.kernel.body.block
        scalars = [a for a in block.args if not isinstance(a.type, tile.PtrType)]
        arguments = ", ".join(self.name(a) + (f": {_type(a.type)}" if a in scalars else "") for a in block.args)
        # A launcher would take an int of 1 for a constant, and a small one for 32 bits; kernels are typed.
        typed = f"@triton.jit(do_not_specialize={[self.name(a) for a in scalars]})" if scalars else "@triton.jit"
        self.block(block.ops)
        return "\n".join([typed, f"def {self.kernel.sym_name.data}({arguments}):", *(self.lines or ["    pass"]), ""])

    def signature(self) -> dict[str, str]:
        parts = {name: kind.rpartition("*") for name, kind in super().signature().items()}
        return {name: star + SHORT.get(kind, kind) for name, (_, star, kind) in parts.items()}

    def store(self, op: tile.StoreOp) -> None:
        pointer, offset, value, *mask = (self.name(o) for o in op.operands)
        self.line(f"tl.store({pointer} + {offset}, {value}{', mask=' + mask[0] if mask else ''})")

    def loop(self, op: scf.ForOp) -> None:
        self.start(op)
        counter = op.body.block.args[0]
        low, high, step = (self.name(o) for o in (op.lb, op.ub, op.step))
        at = self.fresh(f"{self.name(counter)}_at")
        self.line(f"for {at} in range({low}, {high}, {step}):")
        self.indent += 1
        self.line(f"{self.name(counter)} = tl.full([], {at}, {_type(counter.type)})")  # a Python int when interpreted
        self.body(op)
        self.indent -= 1
        self.end(op)


def _type(kind: Attribute) -> str:
    return f"tl.{TYPES[spelled(element_of(kind))]}"


def _unsigned(kind: Attribute) -> str:
    return _type(kind).replace("tl.int", "tl.uint")


def _shape(kind: Attribute) -> str:
    return "[" + ", ".join(str(n) for n in shape_of(kind)) + "]"


def _infix(symbol: str) -> Callable[..., str]:
    return lambda printer, op, a, b: f"{a} {symbol} {b}"


def _call(name: str) -> Callable[..., str]:
    return lambda printer, op, *operands: f"{name}({', '.join(operands)})"


def _wrapping(name: str) -> Callable[..., str]:
    """Integers wrap in the dialect; Triton would check for it in debug builds and interpreters."""
    return lambda printer, op, a, b: f"tl.{name}({a}, {b}, sanitize_overflow=False)"


def _unsigned_infix(symbol: str) -> Callable[..., str]:
    """On unsigned readings of both operands, read back as signed."""

    def rule(printer: Printer, op: Operation, a: str, b: str) -> str:
        kind = op.results[0].type
        u = _unsigned(kind)
        return f"({a}.to({u}, bitcast=True) {symbol} {b}.to({u}, bitcast=True)).to({_type(kind)}, bitcast=True)"

    return rule


def _constant(printer: Printer, op: arith.ConstantOp) -> str:
    kind = op.result.type
    value = op.value.value.data  # type: ignore[attr-defined]
    if spelled(kind) == "i1":
        return f"tl.full([], {bool(value)}, tl.int1)"
    text = repr(value) if value == value and abs(value) != float("inf") else f'float("{value}")'
    return f"tl.full([], {text}, {_type(kind)})"


def _cast(printer: Printer, op: tile.CastOp, x: str) -> str:
    source, target = element_of(op.source.type), element_of(op.result.type)
    unsigned = op.sign.data is tile.Sign.UNSIGNED
    if unsigned and spelled(source)[0] == "i" and spelled(source) != "i1":
        x = f"{x}.to({_unsigned(source)}, bitcast=True)"
    if unsigned and spelled(source)[0] != "i" and spelled(target)[0] == "i":
        return f"{x}.to({_unsigned(target)}).to({_type(target)}, bitcast=True)"
    return f"{x}.to({_type(target)})"


def _compare(printer: Printer, op: tile.CompareOp, a: str, b: str) -> str:
    name = op.predicate.data.value
    if name.startswith("u"):
        u = _unsigned(op.lhs.type)
        a, b = f"{a}.to({u}, bitcast=True)", f"{b}.to({u}, bitcast=True)"
    return f"{a} {SYMBOLS[name if name in SYMBOLS else name[1:]]} {b}"


def _load(printer: Printer, op: tile.LoadOp, pointer: str, offset: str, mask: str = "", other: str = "") -> str:
    # Without `other` the masked elements are 0 by the dialect and undefined in Triton.
    rest = f", mask={mask}, other={other or 0}" if mask else ""
    return f"tl.load({pointer} + {offset}{rest})"


def _reduce(printer: Printer, op: tile.ReduceOp, x: str) -> str:
    return f"tl.reduce({x}, {op.axis.value.data}, _{op.combine.data.value}, keep_dims=True)"


def _scan(printer: Printer, op: tile.ScanOp, x: str) -> str:
    return f"tl.associative_scan({x}, {op.axis.value.data}, _scan_{op.combine.data.value})"


def _select(printer: Printer, op: tile.SelectOp, condition: str, a: str, b: str) -> str:
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
    arith.NegfOp: lambda printer, op, x: f"-{x}",
    arith.BitcastOp: lambda printer, op, x: f"{x}.to({_type(op.result.type)}, bitcast=True)",
    math.ExpOp: _call("tl.exp"),
    math.Exp2Op: _call("tl.exp2"),
    math.Log2Op: _call("tl.log2"),
    math.AbsFOp: _call("tl.abs"),
    tile.ProgramIdOp: lambda printer, op: f"tl.program_id({op.axis.value.data})",
    tile.RangeOp: lambda printer, op: f"tl.arange(0, {shape_of(op.result.type)[0]})",
    tile.SplatOp: lambda printer, op, x: f"tl.full({_shape(op.result.type)}, {x}, {_type(op.result.type)})",
    tile.ExpandOp: lambda printer, op, x: f"tl.expand_dims({x}, {op.axis.value.data})",
    tile.BroadcastOp: lambda printer, op, x: f"tl.broadcast_to({x}, {_shape(op.result.type)})",
    tile.ReshapeOp: lambda printer, op, x: f"tl.reshape({x}, {_shape(op.result.type)})",
    tile.PermuteOp: lambda printer, op, x: f"tl.permute({x}, {list(op.order.get_values())})",
    tile.MultipleOp: lambda printer, op, x: f"tl.multiple_of({x}, {op.of.value.data})",
    tile.CastOp: _cast,
    tile.CompareOp: _compare,
    tile.SelectOp: _select,
    tile.LoadOp: _load,
    tile.ReduceOp: _reduce,
    tile.ScanOp: _scan,
    tile.DotOp: lambda printer, op, a, b, c: f"tl.dot({a}, {b}, {c})",
}

STATEMENTS: dict[type, Callable[..., None]] = {
    tile.StoreOp: Printer.store,
    scf.ForOp: Printer.loop,
    scf.YieldOp: lambda printer, op: None,
    func.ReturnOp: lambda printer, op: None,
}
