"""Printer of the `simt` dialect in languages of the C family: one statement an operation, no decision of its own.

What differs between the languages is data, a `Dialect`. Integers are signless in the IR and unsigned in C, where they wrap; an operation
that reads a sign casts. Sums and products of floats print as calls that no compiler may contract, unless the operation has the flag
`contract`; quotients print as correctly rounded ones. Compile without flushing of subnormals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kivi.emit import printer
from kivi.emit.printer import CONTRACTED, FLOAT, INTEGER, SYMBOLS, bits_of, contracts, functions
from kivi.errors import UnknownOperationError
from kivi.ir import simt, tile
from kivi.ir.xdsl import (
    Attribute,
    FloatAttr,
    IntegerAttr,
    MemRefType,
    ModuleOp,
    Operation,
    SSAValue,
    arith,
    f16,
    func,
    math,
    memref,
    scf,
    spelled,
)


@dataclass(frozen=True)
class Dialect:
    """How a language spells what C lacks. In the strings, {} are filled with C expressions, {t} with a type.

    prelude    text before the kernels; half: text for modules that use half precision. It defines the type f16, of 16 bits, and
               f16_to_f32, f32_to_f16 (half to even), f16_bits, f16_of_bits
    kernel     what stands before a kernel, {threads} the threads of a block
    pointer    what stands before a pointer's type in the arguments
    wide       the type of a run of `simt.WIDE` bytes, aligned to its size; zeros: one of zeros
    aligned    what stands before an array that takes runs
    """

    prelude: str
    half: str
    kernel: str
    pointer: str
    shared: str
    wide: str
    zeros: str
    aligned: str
    thread: str
    block: tuple[str, str, str]
    barrier: str
    unroll: str
    shuffle: dict[str, str]
    calls: dict[tuple[type[Operation], str], str]


TYPEDEFS = """\
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char s8;
typedef short s16;
typedef int s32;
typedef long long s64;
"""

CUDA = Dialect(
    prelude=TYPEDEFS,
    half='#include "kivi_half.h"\n',
    kernel='extern "C" __global__ void __launch_bounds__({threads}) ',
    pointer="",
    shared="__shared__ ",
    wide="uint4",
    zeros="make_uint4(0u, 0u, 0u, 0u)",
    aligned="__align__(16) ",
    thread="threadIdx.x",
    block=("blockIdx.x", "blockIdx.y", "blockIdx.z"),
    barrier="__syncthreads()",
    unroll="#pragma unroll",
    shuffle={
        "xor": "__shfl_xor_sync({mask}u, {value}, {offset}, {width})",
        "down": "__shfl_down_sync({mask}u, {value}, {offset}, {width})",
    },
    calls={
        (arith.AddfOp, "f32"): "__fadd_rn({}, {})",
        (arith.SubfOp, "f32"): "__fsub_rn({}, {})",
        (arith.MulfOp, "f32"): "__fmul_rn({}, {})",
        (arith.DivfOp, "f32"): "__fdiv_rn({}, {})",
        (arith.AddfOp, "f64"): "__dadd_rn({}, {})",
        (arith.SubfOp, "f64"): "__dsub_rn({}, {})",
        (arith.MulfOp, "f64"): "__dmul_rn({}, {})",
        (arith.DivfOp, "f64"): "__ddiv_rn({}, {})",
        (arith.MaxnumfOp, "f32"): "fmaxf({}, {})",
        (arith.MinnumfOp, "f32"): "fminf({}, {})",
        (arith.MaxnumfOp, "f64"): "fmax({}, {})",
        (arith.MinnumfOp, "f64"): "fmin({}, {})",
        (math.ExpOp, "f32"): "expf({})",
        (math.Exp2Op, "f32"): "exp2f({})",
        (math.Log2Op, "f32"): "log2f({})",
        (math.AbsFOp, "f32"): "fabsf({})",
        (math.RoundEvenOp, "f32"): "rintf({})",
        (math.FmaOp, "f32"): "__fmaf_rn({}, {}, {})",
    },
)

TYPES = {"i1": "bool", "i8": "u8", "i16": "u16", "i32": "u32", "i64": "u64", "index": "u32", "f16": "f16", "f32": "float", "f64": "double"}
#: Words that no value may be called: keywords of the C family, and the names of types above.
KEYWORDS = frozenset(
    """
    alignas alignof and asm auto bool break case catch char class const constexpr continue default delete do double else enum explicit
    export extern false float for friend global goto half if inline int kernel local long mutable namespace new not operator or private
    protected public register restrict return short signed sizeof static struct switch template this throw true try typedef typename union
    unsigned using virtual void volatile while xor
    """.split()  # noqa: SIM905
) | {*TYPES.values(), "s8", "s16", "s32", "s64"}


def emit(module: ModuleOp, dialect: Dialect) -> str:
    """The text of all kernels of a module. Raises `UnknownOperationError` naming an operation or a type without a rule."""
    kernels = [Printer(op, dialect).text() for op in functions(module)]
    return "\n".join([dialect.prelude + (dialect.half if _uses_half(module) else ""), *kernels])


def signature(module: ModuleOp, name: str) -> dict[str, str]:
    """Argument name -> type of a kernel, e.g. {"x": "*f16", "n": "i32"}."""
    return Printer(next(op for op in functions(module) if op.sym_name.data == name), CUDA).signature()


def _uses_half(module: ModuleOp) -> bool:
    kinds = {a.type for op in module.walk() for region in op.regions for block in region.blocks for a in block.args}
    kinds |= {r.type for op in module.walk() for r in op.results}
    return any(f16 in (kind, getattr(kind, "element", None), getattr(kind, "element_type", None)) for kind in kinds)


class Printer(printer.Printer):
    """Prints one kernel in one language of the family."""

    language = "C"

    def __init__(self, kernel: func.FuncOp, dialect: Dialect) -> None:
        super().__init__(kernel, STATEMENTS, RULES, {*KEYWORDS, kernel.sym_name.data})
        self.dialect = dialect

    def text(self) -> str:
        threads = simt.threads_of(self.kernel)
        arguments = ", ".join(self._argument(a) for a in self.kernel.body.block.args)
        self.block(self.kernel.body.block.ops)
        head = self.dialect.kernel.format(threads=threads)
        return "\n".join([f"{head}{self.kernel.sym_name.data}({arguments}) {{", *self.lines, "}", ""])

    def _argument(self, value: SSAValue) -> str:
        kind = value.type
        if isinstance(kind, tile.PtrType):
            return f"{self.dialect.pointer}{_type(kind.element)} *{self.name(value)}"
        return f"{_type(kind)} {self.name(value)}"

    def assign(self, target: str, text: str) -> None:
        self.line(f"{target} = {text};")

    def declare(self, value: SSAValue, text: str, name: str = "") -> None:
        self.line(f"{_type(value.type)} {name or self.name(value)} = {text};")

    # -- statements

    def store(self, op: simt.StoreOp) -> None:
        self.line(f"{self.place(op.pointer, op.offset)} = {self.name(op.value)};")

    def keep(self, op: memref.StoreOp) -> None:
        self.line(f"{self.name(op.memref)}[{self.name(op.indices[0])}] = {self.name(op.value)};")

    def array(self, op: memref.AllocOp | memref.AllocaOp) -> None:
        kind = op.memref.type
        assert isinstance(kind, MemRefType)
        space = self.dialect.shared if isinstance(op, memref.AllocOp) else ""
        space += self.dialect.aligned if simt.takes_runs(op.memref) else ""
        self.line(f"{space}{_type(kind.element_type)} {self.name(op.memref)}[{kind.get_shape()[0]}];")

    def copy(self, op: simt.CopyOp) -> None:
        wide = self.dialect.wide
        run = f"*(const {wide} *)&{self.place(op.pointer, op.offset)}"
        if op.mask is not None:
            run = f"{self.name(op.mask)} ? {run} : {self.dialect.zeros}"
        self.line(f"*({wide} *)&{self.name(op.array)}[{self.name(op.place)}] = {run};")

    def loop(self, op: scf.ForOp) -> None:
        self.start(op)
        counter = op.body.block.args[0]
        low, high, step = (self.name(o) for o in (op.lb, op.ub, op.step))
        i, signed = self.name(counter), _signed(counter.type)
        if simt.UNROLL in op.attributes:
            self.line(self.dialect.unroll)
        self.line(f"for ({_type(counter.type)} {i} = {low}; ({signed}){i} < ({signed}){high}; {i} += {step}) {{")
        self.indent += 1
        self.body(op)
        self.indent -= 1
        self.line("}")
        self.end(op)

    def branch(self, op: scf.IfOp) -> None:
        for result in op.output:
            self.line(f"{_type(result.type)} {self.name(result)};")
        for region, word in ((op.true_region, f"if ({self.name(op.cond)}) {{"), (op.false_region, "} else {")):
            if not region.blocks:
                continue
            self.line(word)
            self.indent += 1
            self.block(region.block.ops)
            for result, value in zip(op.output, region.block.last_op.operands, strict=True):  # type: ignore[union-attr]
                self.line(f"{self.name(result)} = {self.name(value)};")
            self.indent -= 1
        self.line("}")

    # -- expressions

    def place(self, pointer: SSAValue, offset: SSAValue) -> str:
        return f"{self.name(pointer)}[({_signed(offset.type)}){self.name(offset)}]"

    def load(self, op: simt.LoadOp, *_: str) -> str:
        place = self.place(op.pointer, op.offset)
        return place if op.mask is None or op.other is None else f"{self.name(op.mask)} ? {place} : {self.name(op.other)}"

    def shuffle(self, op: simt.ShuffleOp, value: str) -> str:
        mask, offset, width = (x.value.data for x in (op.mask, op.offset, op.width))
        return self.dialect.shuffle[op.exchange.data.value].format(mask=hex(mask), value=value, offset=offset, width=width)

    def call(self, op: Operation, *operands: str) -> str:
        kind = spelled(op.results[0].type)
        if contracts(op):
            return f" {CONTRACTED[type(op)]} ".join(operands)
        text = self.dialect.calls.get((type(op), kind))
        if text is None:
            raise UnknownOperationError(f"the C emitter has no rule for {op.name} of {kind}")
        return text.format(*operands)

    def constant(self, op: arith.ConstantOp) -> str:
        kind, value = op.result.type, op.value
        if isinstance(value, IntegerAttr):
            width = bits_of(kind)
            bits = value.value.data & ((1 << width) - 1)
            return ("true" if bits else "false") if width == 1 else f"{bits}{'ull' if width == 64 else 'u'}"
        assert isinstance(value, FloatAttr)
        text = _literal(value.value.data, "" if spelled(kind) == "f64" else "f")
        return f"f32_to_f16({text})" if spelled(kind) == "f16" else text

    def bitcast(self, op: arith.BitcastOp, x: str) -> str:
        source, target = spelled(op.input.type), spelled(op.result.type)
        if source == target:
            return x
        if source == "f16" or target == "f16":
            return f"f16_of_bits({x})" if target == "f16" else f"f16_bits({x})"
        text = BITCASTS.get((source, target))
        if text is None:
            raise UnknownOperationError(f"the C emitter has no rule for arith.bitcast of {source} to {target}")
        return text.format(x)

    def widen(self, op: arith.ExtFOp, x: str) -> str:
        if spelled(op.input.type) == "f16":
            x = f"f16_to_f32({x})"
        return f"({_type(op.result.type)}){x}"

    def narrow(self, op: arith.TruncFOp, x: str) -> str:
        if spelled(op.result.type) != "f16":
            return f"({_type(op.result.type)}){x}"
        if spelled(op.input.type) != "f32":
            raise UnknownOperationError(f"the C emitter rounds f32 to f16, not {op.input.type}: it would round twice")
        return f"f32_to_f16({x})"


def _type(kind: Attribute) -> str:
    name = spelled(kind)
    if name not in TYPES:
        raise UnknownOperationError(f"the C emitter has no type for {name}")
    return TYPES[name]


def _signed(kind: Attribute) -> str:
    return _type(kind).replace("u", "s")


def _literal(x: float, suffix: str) -> str:
    """A C expression with exactly this value."""
    if x != x or abs(x) == float("inf"):
        high = 0x7FC00000 if x != x else 0x7F800000 if x > 0 else 0xFF800000
        return f"__uint_as_float({high}u)"
    text = repr(x)
    return f"{text}{suffix}" if "e" in text or "." in text else f"{text}.0{suffix}"


BITCASTS = {
    ("f32", "i32"): "__float_as_uint({})",
    ("i32", "f32"): "__uint_as_float({})",
    ("f64", "i64"): "(u64)__double_as_longlong({})",
    ("i64", "f64"): "__longlong_as_double((s64){})",
}


def _infix(symbol: str) -> Callable[..., str]:
    """On unsigned integers, which wrap. Short ones are promoted to int, where a product could overflow."""

    def rule(printer: Printer, op: Operation, a: str, b: str) -> str:
        kind = op.results[0].type
        if bits_of(kind) >= 32:
            return f"{a} {symbol} {b}"
        if bits_of(kind) == 1:
            return f"{a} {symbol} {b}"
        return f"({_type(kind)})((u32){a} {symbol} (u32){b})"

    return rule


def _choose(symbol: str) -> Callable[..., str]:
    def rule(printer: Printer, op: Operation, a: str, b: str) -> str:
        s = _signed(op.results[0].type)
        return f"({s}){a} {symbol} ({s}){b} ? {a} : {b}"

    return rule


def _compare_integers(printer: Printer, op: arith.CmpiOp, a: str, b: str) -> str:
    name = INTEGER[op.predicate.value.data]
    cast = f"({_signed(op.lhs.type)})" if name.startswith("s") else ""
    return f"{cast}{a} {SYMBOLS[name if name in SYMBOLS else name[1:]]} {cast}{b}"


def _compare_floats(printer: Printer, op: arith.CmpfOp, a: str, b: str) -> str:
    symbol = FLOAT.get(op.predicate.value.data)
    if symbol is None:
        raise UnknownOperationError("the C emitter compares floats with oeq, ogt, oge, olt, ole and une")
    return f"{a} {symbol} {b}"


def _cast(printer: Printer, op: Operation, x: str) -> str:
    return f"({_type(op.results[0].type)}){x}"


def _cast_signed(printer: Printer, op: Operation, x: str) -> str:
    """A conversion between signed integers, or from one."""
    return f"({_type(op.results[0].type)})({_signed(op.operands[0].type)}){x}"


def _to_signed(printer: Printer, op: arith.FPToSIOp, x: str) -> str:
    return f"({_type(op.result.type)})({_signed(op.result.type)}){x}"


def _truncate(printer: Printer, op: arith.TruncIOp, x: str) -> str:
    return f"({x} & 1u) != 0u" if spelled(op.result.type) == "i1" else _cast(printer, op, x)


RULES: dict[type, Callable[..., str]] = {
    arith.ConstantOp: lambda printer, op: printer.constant(op),
    arith.AddiOp: _infix("+"),
    arith.SubiOp: _infix("-"),
    arith.MuliOp: _infix("*"),
    arith.DivUIOp: _infix("/"),
    arith.RemUIOp: _infix("%"),
    arith.AndIOp: _infix("&"),
    arith.OrIOp: _infix("|"),
    arith.XOrIOp: _infix("^"),
    arith.ShLIOp: _infix("<<"),
    arith.ShRUIOp: _infix(">>"),
    arith.MaxSIOp: _choose(">"),
    arith.MinSIOp: _choose("<"),
    **dict.fromkeys({kind for kind, _ in CUDA.calls}, Printer.call),
    arith.NegfOp: lambda printer, op, x: f"-{x}",
    arith.BitcastOp: Printer.bitcast,
    arith.CmpiOp: _compare_integers,
    arith.CmpfOp: _compare_floats,
    arith.SelectOp: lambda printer, op, c, a, b: f"{c} ? {a} : {b}",
    arith.ExtUIOp: _cast,
    arith.ExtSIOp: _cast_signed,
    arith.TruncIOp: _truncate,
    arith.SIToFPOp: _cast_signed,
    arith.UIToFPOp: _cast,
    arith.FPToSIOp: _to_signed,
    arith.FPToUIOp: _cast,
    arith.ExtFOp: Printer.widen,
    arith.TruncFOp: Printer.narrow,
    arith.IndexCastOp: lambda printer, op, x: x,
    memref.LoadOp: lambda printer, op, array, i: f"{array}[{i}]",
    simt.ThreadIdOp: lambda printer, op: printer.dialect.thread,
    simt.BlockIdOp: lambda printer, op: printer.dialect.block[op.axis.value.data],
    simt.LoadOp: Printer.load,
    simt.ShuffleOp: Printer.shuffle,
}

STATEMENTS: dict[type, Callable[..., None]] = {
    simt.StoreOp: Printer.store,
    simt.CopyOp: Printer.copy,
    simt.BarrierOp: lambda printer, op: printer.line(f"{printer.dialect.barrier};"),
    memref.StoreOp: Printer.keep,
    memref.AllocOp: Printer.array,
    memref.AllocaOp: Printer.array,
    scf.ForOp: Printer.loop,
    scf.IfOp: Printer.branch,
    scf.YieldOp: lambda printer, op: None,
    func.ReturnOp: lambda printer, op: None,
}
