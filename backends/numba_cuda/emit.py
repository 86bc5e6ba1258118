"""Printer of the `simt` dialect as Numba CUDA Python: one statement an operation, no decision of its own.

Numba widens integers to 64 bits and Python has no width at all, so every result is cast to its type: unsigned, since integers are
signless in the IR and wrap. Numba contracts a product and a sum into one operation, and has no switch against it, so floats are added
and multiplied by functions of libdevice that round, unless the operation has the flag `contract`.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable

from kivi.emit import printer
from kivi.emit.printer import CONTRACTED, FLOAT, INTEGER, SYMBOLS, bits_of, contracts, functions
from kivi.errors import UnknownOperationError
from kivi.ir import simt
from kivi.ir.xdsl import (
    Attribute,
    FloatAttr,
    IntegerAttr,
    MemRefType,
    ModuleOp,
    Operation,
    SSAValue,
    arith,
    func,
    math,
    memref,
    scf,
    spelled,
)

TYPES = {
    "i1": "boolean",
    "i8": "uint8",
    "i16": "uint16",
    "i32": "uint32",
    "i64": "uint64",
    "index": "uint32",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
}

PRELUDE = """\
import math

from numba import boolean, float32, float64, int8, int16, int32, int64, uint8, uint16, uint32, uint64
from numba import cuda
from numba.cuda import libdevice
from numba.cuda.types import float16

"""
COPY = "from kivi.backends.numba_cuda.runs import copy_run\n\n"
USED = frozenset(["math", "cuda", "libdevice", "range", "copy_run", "boolean", "float16", "float32", "float64"]) | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


def emit(module: ModuleOp) -> str:
    """The text of all kernels of a module, as functions. Raises `UnknownOperationError` naming an operation or type without a rule."""
    wide = COPY if any(isinstance(op, simt.CopyOp) for op in module.walk()) else ""
    return PRELUDE + wide + "\n".join("\n" + Printer(op).text() for op in functions(module))


def signature(module: ModuleOp, name: str) -> dict[str, str]:
    """Argument name -> type of a kernel, e.g. {"x": "*f16", "n": "i32"}."""
    return Printer(next(op for op in functions(module) if op.sym_name.data == name)).signature()


class Printer(printer.Printer):
    """Prints one kernel."""

    language = "Numba CUDA"

    def __init__(self, kernel: func.FuncOp) -> None:
        super().__init__(kernel, STATEMENTS, RULES, {*keyword.kwlist, *USED, kernel.sym_name.data})

    def text(self) -> str:
        names = ", ".join(self.name(a) for a in self.kernel.body.block.args)
        # Kernels of different types can read alike, and the types decide what is compiled: they are part of the text.
        kinds = ", ".join(f"{name}: {kind}" for name, kind in self.signature().items())
        self.line(f'"""Blocks of {simt.threads_of(self.kernel)} threads. {kinds}"""')
        self.block(self.kernel.body.block.ops)
        return "\n".join([f"def {self.kernel.sym_name.data}({names}):", *self.lines, ""])

    # -- statements

    def store(self, op: simt.StoreOp) -> None:
        self.line(f"{self.place(op.pointer, op.offset)} = {self.name(op.value)}")

    def keep(self, op: memref.StoreOp) -> None:
        self.line(f"{self.name(op.memref)}[{self.name(op.indices[0])}] = {self.name(op.value)}")

    def array(self, op: memref.AllocOp | memref.AllocaOp) -> None:
        kind = op.memref.type
        assert isinstance(kind, MemRefType)
        space = "shared" if isinstance(op, memref.AllocOp) else "local"
        aligned = f", alignment={simt.WIDE}" if simt.takes_runs(op.memref) else ""
        self.line(f"{self.name(op.memref)} = cuda.{space}.array({kind.get_shape()[0]}, {_type(kind.element_type)}{aligned})")

    def copy(self, op: simt.CopyOp) -> None:
        mask = "True" if op.mask is None else self.name(op.mask)
        places = f"{self.name(op.array)}, {self.name(op.place)}, {self.name(op.pointer)}, {self.index(op.offset)}"
        self.line(f"copy_run({places}, {mask})")

    def loop(self, op: scf.ForOp) -> None:
        self.start(op)
        counter = op.body.block.args[0]
        bounds = ", ".join(f"{_signed(counter.type)}({self.name(o)})" for o in (op.lb, op.ub, op.step))
        i = self.name(counter)
        at = self.fresh(f"{i}_at")
        self.line(f"for {at} in range({bounds}):")
        self.indent += 1
        self.line(f"{i} = {_type(counter.type)}({at} & {(1 << bits_of(counter.type)) - 1})")
        self.body(op)
        self.indent -= 1
        self.end(op)

    def branch(self, op: scf.IfOp) -> None:
        for region, word in ((op.true_region, f"if {self.name(op.cond)}:"), (op.false_region, "else:")):
            if not region.blocks:
                continue
            self.line(word)
            self.indent += 1
            before = len(self.lines)
            self.block(region.block.ops)
            for result, value in zip(op.output, region.block.last_op.operands, strict=True):  # type: ignore[union-attr]
                self.line(f"{self.name(result)} = {self.name(value)}")
            if len(self.lines) == before:
                self.line("pass")
            self.indent -= 1

    # -- expressions

    def place(self, pointer: SSAValue, offset: SSAValue) -> str:
        return f"{self.name(pointer)}[{self.index(offset)}]"

    def index(self, offset: SSAValue) -> str:
        """Indices are unsigned: Numba would count negative ones from the end."""
        name = self.name(offset)
        return name if bits_of(offset.type) == 64 else f"uint64({_signed(offset.type)}({name}))"

    def load(self, op: simt.LoadOp, *_: str) -> str:
        place = self.place(op.pointer, op.offset)
        return place if op.mask is None or op.other is None else f"{place} if {self.name(op.mask)} else {self.name(op.other)}"

    def shuffle(self, op: simt.ShuffleOp, value: str) -> str:
        mask, offset, width = (x.value.data for x in (op.mask, op.offset, op.width))
        down = op.exchange.data is simt.Exchange.DOWN
        if down and width != simt.WARP:
            raise UnknownOperationError(f"the Numba CUDA emitter has no rule for simt.shuffle down in segments of {width}")
        kind, name = op.value.type, "shfl_down_sync" if down else "shfl_xor_sync"
        if not spelled(kind).startswith("i"):
            return f"cuda.{name}({mask}, {value}, {offset})"
        return f"{_type(kind)}(cuda.{name}({mask}, {_signed(kind)}({value}), {offset}))"

    def call(self, op: Operation, *operands: str) -> str:
        kind = spelled(op.results[0].type)
        if contracts(op):
            return f" {CONTRACTED[type(op)]} ".join(operands)
        text = CALLS.get((type(op), kind))
        if text is None:
            raise UnknownOperationError(f"the Numba CUDA emitter has no rule for {op.name} of {kind}")
        return text.format(*operands)

    def constant(self, op: arith.ConstantOp) -> str:
        kind, value = op.result.type, op.value
        if isinstance(value, IntegerAttr):
            bits = value.value.data & ((1 << bits_of(kind)) - 1)
            return str(bool(bits)) if bits_of(kind) == 1 else f"{_type(kind)}({bits})"
        assert isinstance(value, FloatAttr)
        x = value.value.data
        text = "math.nan" if x != x else repr(x) if abs(x) != float("inf") else "math.inf" if x > 0 else "-math.inf"
        return f"{_type(kind)}({text})" if spelled(kind) != "f16" else f"float16(float32({text}))"

    def bitcast(self, op: arith.BitcastOp, x: str) -> str:
        source, target = spelled(op.input.type), spelled(op.result.type)
        text = {("f32", "i32"): "uint32(libdevice.float_as_int({}))", ("i32", "f32"): "libdevice.int_as_float(int32({}))"}.get(
            (source, target)
        )
        if source == target:
            return x
        if text is None:
            raise UnknownOperationError(f"the Numba CUDA emitter has no rule for arith.bitcast of {source} to {target}")
        return text.format(x)


CALLS: dict[tuple[type, str], str] = {
    (arith.AddfOp, "f32"): "libdevice.fadd_rn({}, {})",
    (arith.SubfOp, "f32"): "libdevice.fsub_rn({}, {})",
    (arith.MulfOp, "f32"): "libdevice.fmul_rn({}, {})",
    (arith.DivfOp, "f32"): "libdevice.fdiv_rn({}, {})",
    (arith.MaxnumfOp, "f32"): "libdevice.fmaxf({}, {})",
    (arith.MinnumfOp, "f32"): "libdevice.fminf({}, {})",
    (arith.AddfOp, "f64"): "libdevice.dadd_rn({}, {})",
    (arith.SubfOp, "f64"): "libdevice.dadd_rn({}, -{})",
    (arith.MulfOp, "f64"): "libdevice.dmul_rn({}, {})",
    (arith.DivfOp, "f64"): "libdevice.ddiv_rn({}, {})",
    (math.ExpOp, "f32"): "libdevice.expf({})",
    (math.Exp2Op, "f32"): "libdevice.exp2f({})",
    (math.Log2Op, "f32"): "libdevice.log2f({})",
    (math.AbsFOp, "f32"): "libdevice.fabsf({})",
    (math.RoundEvenOp, "f32"): "libdevice.rintf({})",
    (math.FmaOp, "f32"): "libdevice.fmaf_rn({}, {}, {})",
}


def _type(kind: Attribute) -> str:
    name = spelled(kind)
    if name not in TYPES:
        raise UnknownOperationError(f"the Numba CUDA emitter has no type for {name}")
    return TYPES[name]


def _signed(kind: Attribute) -> str:
    return _type(kind).removeprefix("u")


def _infix(symbol: str) -> Callable[..., str]:
    def rule(printer: Printer, op: Operation, a: str, b: str) -> str:
        kind = op.results[0].type
        return f"{a} {symbol} {b}" if spelled(kind) == "i1" else f"{_type(kind)}({a} {symbol} {b})"

    return rule


def _choose(symbol: str) -> Callable[..., str]:
    def rule(printer: Printer, op: Operation, a: str, b: str) -> str:
        s = _signed(op.results[0].type)
        return f"{a} if {s}({a}) {symbol} {s}({b}) else {b}"

    return rule


def _compare_integers(printer: Printer, op: arith.CmpiOp, a: str, b: str) -> str:
    name = INTEGER[op.predicate.value.data]
    if name.startswith("s"):
        s = _signed(op.lhs.type)
        a, b = f"{s}({a})", f"{s}({b})"
    return f"{a} {SYMBOLS[name if name in SYMBOLS else name[1:]]} {b}"


def _compare_floats(printer: Printer, op: arith.CmpfOp, a: str, b: str) -> str:
    symbol = FLOAT.get(op.predicate.value.data)
    if symbol is None:
        raise UnknownOperationError("the Numba CUDA emitter compares floats with oeq, ogt, oge, olt, ole and une")
    return f"{a} {symbol} {b}"


def _cast(printer: Printer, op: Operation, x: str) -> str:
    return f"{_type(op.results[0].type)}({x})"


def _cast_signed(printer: Printer, op: Operation, x: str) -> str:
    return f"{_type(op.results[0].type)}({_signed(op.operands[0].type)}({x}))"


def _to_integer(printer: Printer, op: Operation, x: str) -> str:
    return f"{_type(op.results[0].type)}(int64({x}))"


def _truncate(printer: Printer, op: arith.TruncIOp, x: str) -> str:
    return f"({x} & 1) != 0" if spelled(op.result.type) == "i1" else _cast(printer, op, x)


RULES: dict[type, Callable[..., str]] = {
    arith.ConstantOp: lambda printer, op: printer.constant(op),
    arith.AddiOp: _infix("+"),
    arith.SubiOp: _infix("-"),
    arith.MuliOp: _infix("*"),
    arith.DivUIOp: _infix("//"),
    arith.RemUIOp: _infix("%"),
    arith.AndIOp: _infix("&"),
    arith.OrIOp: _infix("|"),
    arith.XOrIOp: _infix("^"),
    arith.ShLIOp: _infix("<<"),
    arith.ShRUIOp: _infix(">>"),
    arith.MaxSIOp: _choose(">"),
    arith.MinSIOp: _choose("<"),
    **dict.fromkeys((kind for kind, _ in CALLS), Printer.call),
    arith.NegfOp: lambda printer, op, x: f"-{x}",
    arith.BitcastOp: Printer.bitcast,
    arith.CmpiOp: _compare_integers,
    arith.CmpfOp: _compare_floats,
    arith.SelectOp: lambda printer, op, c, a, b: f"{a} if {c} else {b}",
    arith.ExtUIOp: _cast,
    arith.ExtSIOp: _cast_signed,
    arith.TruncIOp: _truncate,
    arith.SIToFPOp: _cast_signed,
    arith.UIToFPOp: _cast,
    arith.FPToSIOp: _to_integer,
    arith.FPToUIOp: _to_integer,
    arith.ExtFOp: _cast,
    arith.TruncFOp: _cast,
    arith.IndexCastOp: lambda printer, op, x: x,
    memref.LoadOp: lambda printer, op, array, i: f"{array}[{i}]",
    simt.ThreadIdOp: lambda printer, op: "uint32(cuda.threadIdx.x)",
    simt.BlockIdOp: lambda printer, op: f"uint32(cuda.blockIdx.{'xyz'[op.axis.value.data]})",
    simt.LoadOp: Printer.load,
    simt.ShuffleOp: Printer.shuffle,
}

STATEMENTS: dict[type, Callable[..., None]] = {
    simt.StoreOp: Printer.store,
    simt.CopyOp: Printer.copy,
    simt.BarrierOp: lambda printer, op: printer.line("cuda.syncthreads()"),
    memref.StoreOp: Printer.keep,
    memref.AllocOp: Printer.array,
    memref.AllocaOp: Printer.array,
    scf.ForOp: Printer.loop,
    scf.IfOp: Printer.branch,
    scf.YieldOp: lambda printer, op: None,
    func.ReturnOp: lambda printer, op: None,
}
