"""Printer of the `vec` dialect as LLVM IR: an instruction or an intrinsic an operation, no decision of its own.

A kernel becomes two functions. `NAME.program` is one program. `NAME`, the only visible one, is called by every thread of a launch:

    void NAME(ptr arguments, ptr counters, i64 programs, i64 n1, i64 n2)

`arguments` holds a slot of 8 bytes an argument. A thread takes the number of the next program from the first counter until none is left,
so threads share the work whatever the speed of each, and counts the programs it has finished in the second, a cache line further. n1 and
n2 are the lengths of the grid's axes 1 and 2.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

from kivi.backends.cpu.counters import FINISHED
from kivi.errors import UnknownOperationError
from kivi.ir import tile
from kivi.ir import vector as vec
from kivi.ir.vector import TABLE, element_of, lanes_of
from kivi.ir.xdsl import Attribute, ModuleOp, Operation, SSAValue, arith, func, math, scf

SCALARS = {
    "f16": "half",
    "f32": "float",
    "f64": "double",
    "i1": "i1",
    "i8": "i8",
    "i16": "i16",
    "i32": "i32",
    "i64": "i64",
}
BYTES = {"half": 2, "float": 4, "double": 8, "i8": 1, "i16": 2, "i32": 4, "i64": 8}
SHORT = {"half": "f16", "float": "f32", "double": "f64"}


def emit(module: ModuleOp) -> str:
    """LLVM IR of all kernels of a module. Raises `UnknownOperationError` naming an operation without a rule."""
    printers = [Printer(op) for op in module.ops if isinstance(op, func.FuncOp)]
    texts = [p.text() for p in printers]
    declared = sorted({line for p in printers for line in p.declared})
    return "\n".join([*texts, *declared, ""])


def signature(module: ModuleOp, name: str) -> dict[str, str]:
    """Argument name -> type of a kernel, e.g. {"x": "*f16", "n": "i32"}."""
    kernel = next(op for op in module.ops if isinstance(op, func.FuncOp) and op.sym_name.data == name)
    out = {}
    for i, argument in enumerate(kernel.body.block.args):
        kind = argument.type
        text = f"*{kind.element}" if isinstance(kind, tile.PtrType) else str(kind)
        out[argument.name_hint or f"argument{i}"] = text
    return out


def type_of(kind: Attribute) -> str:
    """The LLVM type of a scalar, vector or pointer."""
    if isinstance(kind, tile.PtrType):
        return "ptr"
    scalar, lanes = SCALARS[str(element_of(kind))], lanes_of(kind)
    return f"<{lanes} x {scalar}>" if lanes else scalar


def mangled(kind: Attribute) -> str:
    """A type as the name of an intrinsic spells it: v16f32."""
    scalar, lanes = SCALARS[str(element_of(kind))], lanes_of(kind)
    return (f"v{lanes}" if lanes else "") + SHORT.get(scalar, scalar)


class Printer:
    """Prints one kernel."""

    def __init__(self, kernel: func.FuncOp) -> None:
        self.kernel = kernel
        self.names: dict[SSAValue, str] = {}
        self.lines: list[str] = []
        self.buffers: list[str] = []
        self.declared: set[str] = set()
        self.count = 0
        self.label = "entry"  # of the block that is being printed

    def text(self) -> str:
        name, block = self.kernel.sym_name.data, self.kernel.body.block
        for i, argument in enumerate(block.args):
            self.names[argument] = f"%{re.sub(r'[^A-Za-z0-9_]', '_', argument.name_hint or 'argument')}.{i}"
        self.block(block.ops)
        arguments = [f"{type_of(a.type)} {self.names[a]}" for a in block.args]
        program = ", ".join([*arguments, "i32 %program.0", "i32 %program.1", "i32 %program.2"])
        body = [f"define internal void @{name}.program({program}) noinline {{", "entry:", *self.buffers, *self.lines, "}", ""]
        return "\n".join([*body, *self.entry(name, [type_of(a.type) for a in block.args])])

    @staticmethod
    def entry(name: str, kinds: list[str]) -> list[str]:
        """The function that threads call."""
        loads = []
        for i, kind in enumerate(kinds):
            loads += [f"  %slot.{i} = getelementptr i64, ptr %arguments, i64 {i}", f"  %a.{i} = load {kind}, ptr %slot.{i}"]
        given = ", ".join([*(f"{kind} %a.{i}" for i, kind in enumerate(kinds)), "i32 %p0", "i32 %p1", "i32 %p2"])
        return [
            f"define void @{name}(ptr %arguments, ptr %counters, i64 %programs, i64 %n1, i64 %n2) {{",
            "entry:",
            *loads,
            f"  %finished = getelementptr i64, ptr %counters, i64 {FINISHED}",
            "  br label %take",
            "take:",
            "  %i = atomicrmw add ptr %counters, i64 1 monotonic",
            "  %left = icmp ult i64 %i, %programs",
            "  br i1 %left, label %run, label %done",
            "run:",
            "  %l2 = urem i64 %i, %n2",
            "  %rest = udiv i64 %i, %n2",
            "  %l1 = urem i64 %rest, %n1",
            "  %l0 = udiv i64 %rest, %n1",
            "  %p0 = trunc i64 %l0 to i32",
            "  %p1 = trunc i64 %l1 to i32",
            "  %p2 = trunc i64 %l2 to i32",
            f"  call void @{name}.program({given})",
            "  %count = atomicrmw add ptr %finished, i64 1 release",
            "  br label %take",
            "done:",
            "  ret void",
            "}",
            "",
        ]

    # statements

    def fresh(self, base: str = "v") -> str:
        self.count += 1
        return f"%{base}{self.count}"

    def let(self, text: str) -> str:
        """A new value."""
        name = self.fresh()
        self.lines.append(f"  {name} = {text}")
        return name

    def do(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def start(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.label = label

    def call(self, name: str, result: str, operands: list[tuple[str, str]], flags: str = "") -> str:
        """A call of an intrinsic; operands are (type, value)."""
        self.declared.add(f"declare {result} @{name}({', '.join(kind for kind, _ in operands)})")
        text = f"call {flags}{result} @{name}({', '.join(f'{kind} {value}' for kind, value in operands)})"
        if result == "void":
            self.do(text)
            return ""
        return self.let(text)

    def block(self, ops: Any) -> None:
        for op in ops:
            if isinstance(op, scf.ForOp):
                self.loop(op)
            elif isinstance(op, scf.IfOp):
                self.branch(op)
            elif isinstance(op, func.ReturnOp):
                self.do("ret void")
            elif not isinstance(op, scf.YieldOp):
                rule = RULES.get(type(op))
                if rule is None:
                    raise UnknownOperationError(f"the LLVM emitter has no rule for {op.name}")
                result = rule(self, op, *(self.names[o] for o in op.operands))
                if op.results:
                    self.names[op.results[0]] = result

    def loop(self, op: scf.ForOp) -> None:
        counter, *arguments = op.body.block.args
        number, before = self.fresh("loop")[1:], self.label
        head, body, latch, after = (f"{number}.{part}" for part in ("head", "body", "latch", "after"))
        low, high, step = (self.names[o] for o in (op.lb, op.ub, op.step))
        starts = [self.names[o] for o in op.iter_args]
        for argument in (counter, *arguments):
            self.names[argument] = self.fresh("p")
        self.do(f"br label %{head}")
        self.start(head)
        at = len(self.lines)  # the phis go here once the values of the last block are known
        kind, here = type_of(counter.type), self.names[counter]
        more = self.let(f"icmp slt {kind} {here}, {high}")
        self.do(f"br i1 {more}, label %{body}, label %{after}")
        self.start(body)
        self.block(op.body.block.ops)
        self.do(f"br label %{latch}")
        self.start(latch)
        following = self.let(f"add nsw {kind} {here}, {step}")
        self.do(f"br label %{head}")
        results = [self.names[o] for o in op.body.block.last_op.operands]  # type: ignore[union-attr]
        phis = [
            f"  {self.names[argument]} = phi {type_of(argument.type)} [ {first}, %{before} ], [ {then}, %{latch} ]"
            for argument, first, then in zip((counter, *arguments), (low, *starts), (following, *results), strict=True)
        ]
        self.lines[at:at] = phis
        self.start(after)
        for result, argument in zip(op.results, arguments, strict=True):
            self.names[result] = self.names[argument]

    def branch(self, op: scf.IfOp) -> None:
        number = self.fresh("if")[1:]
        yes, no, after = (f"{number}.{part}" for part in ("yes", "no", "after"))
        ends: list[tuple[list[str], str]] = []
        self.do(f"br i1 {self.names[op.cond]}, label %{yes}, label %{no}")
        for label, region in ((yes, op.true_region), (no, op.false_region)):
            self.start(label)
            results: list[str] = []
            if region.blocks:
                self.block(region.block.ops)
                results = [self.names[o] for o in region.block.last_op.operands]  # type: ignore[union-attr]
            ends.append((results, self.label))
            self.do(f"br label %{after}")
        self.start(after)
        for i, result in enumerate(op.results):
            choices = ", ".join(f"[ {values[i]}, %{label} ]" for values, label in ends)
            self.names[result] = self.let(f"phi {type_of(result.type)} {choices}")

    def splat(self, value: str, scalar: str, lanes: int) -> str:
        one = self.let(f"insertelement <{lanes} x {scalar}> poison, {scalar} {value}, i32 0")
        return self.let(f"shufflevector <{lanes} x {scalar}> {one}, <{lanes} x {scalar}> poison, <{lanes} x i32> zeroinitializer")

    def address(self, op: Any, pointer: str, offset: str) -> str:
        """pointer + offset; for a vector of offsets a vector of pointers."""
        element = SCALARS[str(op.pointer.type.element)]
        return self.let(f"getelementptr {element}, ptr {pointer}, {type_of(op.offset.type)} {offset}")


# -- rules: (printer, op, operands by name) -> the result -----------------------------------------------------------------


def _infix(name: str) -> Callable[..., str]:
    return lambda p, op, a, b: p.let(f"{name} {type_of(op.results[0].type)} {a}, {b}")


def _intrinsic(name: str) -> Callable[..., str]:
    """An elementwise intrinsic, all operands of the result's type."""

    def rule(p: Printer, op: Operation, *operands: str) -> str:
        kind = op.results[0].type
        return p.call(f"llvm.{name}.{mangled(kind)}", type_of(kind), [(type_of(kind), o) for o in operands])

    return rule


def literal(value: float, kind: str) -> str:
    """A number as LLVM writes it: integers plain, floats as the bits of a double."""
    if kind == "i1":
        return "true" if value else "false"
    if kind.startswith("i"):
        return str(int(value))
    rounded = struct.unpack("<f", struct.pack("<f", value))[0] if kind == "float" else value
    if kind == "half":
        return f"0xH{struct.unpack('<H', struct.pack('<e', value))[0]:04X}"
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"


def _constant(p: Printer, op: arith.ConstantOp) -> str:
    return literal(op.value.value.data, type_of(op.result.type))  # type: ignore[attr-defined]


def _iota(p: Printer, op: vec.IotaOp) -> str:
    scalar = SCALARS[str(element_of(op.result.type))]
    return "<" + ", ".join(f"{scalar} {i}" for i in range(lanes_of(op.result.type))) + ">"


def _broadcast(p: Printer, op: vec.BroadcastOp, x: str) -> str:
    return p.splat(x, type_of(op.source.type), lanes_of(op.result.type))


def _shuffle(p: Printer, op: vec.ShuffleOp, x: str) -> str:
    order, kind = list(op.order.get_values()), type_of(op.source.type)
    positions = ", ".join(f"i32 {i}" for i in order)
    return p.let(f"shufflevector {kind} {x}, {kind} poison, <{len(order)} x i32> <{positions}>")


def _lookup(p: Printer, op: vec.LookupOp, table: str, index: str) -> str:
    """AVX-512's permutation of 16 floats; a narrower index fills its lowest lanes."""
    lanes = lanes_of(op.index.type)
    if lanes > TABLE:
        raise UnknownOperationError(f"the LLVM emitter prints vec.lookup of at most {TABLE} lanes, not {lanes}")
    full, whole = f"<{TABLE} x float>", f"<{TABLE} x i32>"
    if lanes < TABLE:
        positions = ", ".join(f"i32 {min(i, lanes)}" for i in range(TABLE))
        index = p.let(f"shufflevector <{lanes} x i32> {index}, <{lanes} x i32> zeroinitializer, {whole} <{positions}>")
    out = p.call("llvm.x86.avx512.permvar.sf.512", full, [(full, table), (whole, index)])
    if lanes < TABLE:
        positions = ", ".join(f"i32 {i}" for i in range(lanes))
        out = p.let(f"shufflevector {full} {out}, {full} poison, <{lanes} x i32> <{positions}>")
    return out


def _cast(p: Printer, op: vec.CastOp, x: str) -> str:
    source, target = type_of(op.source.type), type_of(op.result.type)
    a, b = (SCALARS[str(element_of(v.type))] for v in (op.source, op.result))
    if a == b:
        return x
    unsigned = op.sign.data is tile.Sign.UNSIGNED or a == "i1"
    if a.startswith("i") and b.startswith("i"):
        name = "trunc" if int(a[1:]) > int(b[1:]) else "zext" if unsigned else "sext"
    elif a.startswith("i"):
        name = "uitofp" if unsigned else "sitofp"
    elif b.startswith("i"):
        name = "fptoui" if unsigned else "fptosi"
    else:
        name = "fptrunc" if BYTES[a] > BYTES[b] else "fpext"
    return p.let(f"{name} {source} {x} to {target}")


def _compare(p: Printer, op: vec.CompareOp, a: str, b: str) -> str:
    name, kind = op.predicate.data.value, type_of(op.lhs.type)
    if SCALARS[str(element_of(op.lhs.type))].startswith("i"):
        return p.let(f"icmp {name} {kind} {a}, {b}")
    return p.let(f"fcmp {({'eq': 'oeq', 'ne': 'une'}).get(name, name)} {kind} {a}, {b}")


def _select(p: Printer, op: vec.SelectOp, condition: str, a: str, b: str) -> str:
    kind = type_of(op.result.type)
    return p.let(f"select {type_of(op.condition.type)} {condition}, {kind} {a}, {kind} {b}")


def _buffer(p: Printer, op: vec.BufferOp) -> str:
    name = p.fresh("buffer")
    kind = op.result.type
    assert isinstance(kind, tile.PtrType)
    p.buffers.append(f"  {name} = alloca [{op.count.value.data} x {SCALARS[str(kind.element)]}], align 64")
    return name


def _load(p: Printer, op: vec.LoadOp, pointer: str, offset: str, mask: str = "") -> str:
    at, kind = p.address(op, pointer, offset), type_of(op.result.type)
    align = BYTES[SCALARS[str(element_of(op.result.type))]]
    if not mask:
        return p.let(f"load {kind}, ptr {at}, align {align}")
    lanes = lanes_of(op.result.type)
    if not lanes:
        return _masked_scalar(p, kind, at, mask)
    operands = [("ptr", at), ("i32", str(align)), (f"<{lanes} x i1>", mask), (kind, "zeroinitializer")]
    return p.call(f"llvm.masked.load.{mangled(op.result.type)}.p0", kind, operands)


def _masked_scalar(p: Printer, kind: str, at: str, mask: str) -> str:
    """A load under a branch."""
    number, before = p.fresh("masked")[1:], p.label
    p.do(f"br i1 {mask}, label %{number}.yes, label %{number}.after")
    p.start(f"{number}.yes")
    value = p.let(f"load {kind}, ptr {at}, align {BYTES[kind]}")
    p.do(f"br label %{number}.after")
    p.start(f"{number}.after")
    return p.let(f"phi {kind} [ {literal(0, kind)}, %{before} ], [ {value}, %{number}.yes ]")


def _store(p: Printer, op: vec.StoreOp, pointer: str, offset: str, value: str, mask: str = "") -> None:
    at, kind = p.address(op, pointer, offset), type_of(op.value.type)
    align, lanes = BYTES[SCALARS[str(element_of(op.value.type))]], lanes_of(op.value.type)
    if mask and lanes:
        operands = [(kind, value), ("ptr", at), ("i32", str(align)), (f"<{lanes} x i1>", mask)]
        p.call(f"llvm.masked.store.{mangled(op.value.type)}.p0", "void", operands)
        return
    if mask:
        number = p.fresh("masked")[1:]
        p.do(f"br i1 {mask}, label %{number}.yes, label %{number}.after")
        p.start(f"{number}.yes")
    p.do(f"store {kind} {value}, ptr {at}, align {align}")
    if mask:
        p.do(f"br label %{number}.after")
        p.start(f"{number}.after")


def _gather(p: Printer, op: vec.GatherOp, pointer: str, offset: str, mask: str = "") -> str:
    at, kind, lanes = p.address(op, pointer, offset), type_of(op.result.type), lanes_of(op.result.type)
    align = BYTES[SCALARS[str(element_of(op.result.type))]]
    operands = [(f"<{lanes} x ptr>", at), ("i32", str(align)), (f"<{lanes} x i1>", mask or _all(lanes)), (kind, "zeroinitializer")]
    return p.call(f"llvm.masked.gather.{mangled(op.result.type)}.v{lanes}p0", kind, operands)


def _scatter(p: Printer, op: vec.ScatterOp, pointer: str, offset: str, value: str, mask: str = "") -> None:
    at, kind, lanes = p.address(op, pointer, offset), type_of(op.value.type), lanes_of(op.value.type)
    align = BYTES[SCALARS[str(element_of(op.value.type))]]
    operands = [(kind, value), (f"<{lanes} x ptr>", at), ("i32", str(align)), (f"<{lanes} x i1>", mask or _all(lanes))]
    p.call(f"llvm.masked.scatter.{mangled(op.value.type)}.v{lanes}p0", "void", operands)


def _all(lanes: int) -> str:
    return "<" + ", ".join(["i1 true"] * lanes) + ">"


def _prefetch(p: Printer, op: vec.PrefetchOp, pointer: str, offset: str) -> None:
    """To be read, locality 2 of 3, data."""
    p.call("llvm.prefetch.p0", "void", [("ptr", p.address(op, pointer, offset)), ("i32", "0"), ("i32", "2"), ("i32", "1")])


def _reduce(p: Printer, op: vec.ReduceOp, x: str) -> str:
    kind, scalar, name = type_of(op.source.type), type_of(op.result.type), op.combine.data.value
    if scalar.startswith("i"):
        return p.call(
            f"llvm.vector.reduce.{ {'add': 'add', 'min': 'smin', 'max': 'smax'}[name] }.{mangled(op.source.type)}", scalar, [(kind, x)]
        )
    if name == "add":
        operands = [(scalar, literal(-0.0, scalar)), (kind, x)]
        return p.call(f"llvm.vector.reduce.fadd.{mangled(op.source.type)}", scalar, operands, "reassoc ")
    return p.call(f"llvm.vector.reduce.f{name}.{mangled(op.source.type)}", scalar, [(kind, x)])


RULES: dict[type, Callable[..., Any]] = {
    arith.ConstantOp: _constant,
    arith.AddiOp: _infix("add"),
    arith.SubiOp: _infix("sub"),
    arith.MuliOp: _infix("mul"),
    arith.MaxSIOp: _intrinsic("smax"),
    arith.MinSIOp: _intrinsic("smin"),
    arith.DivUIOp: _infix("udiv"),
    arith.RemUIOp: _infix("urem"),
    arith.AndIOp: _infix("and"),
    arith.OrIOp: _infix("or"),
    arith.XOrIOp: _infix("xor"),
    arith.ShLIOp: _infix("shl"),
    arith.ShRUIOp: _infix("lshr"),
    arith.AddfOp: _infix("fadd"),
    arith.SubfOp: _infix("fsub"),
    arith.MulfOp: _infix("fmul"),
    arith.DivfOp: _infix("fdiv"),
    arith.MaxnumfOp: _intrinsic("maxnum"),
    arith.MinnumfOp: _intrinsic("minnum"),
    arith.NegfOp: lambda p, op, x: p.let(f"fneg {type_of(op.result.type)} {x}"),
    arith.BitcastOp: lambda p, op, x: p.let(f"bitcast {type_of(op.input.type)} {x} to {type_of(op.result.type)}"),
    math.AbsFOp: _intrinsic("fabs"),
    math.FmaOp: _intrinsic("fma"),
    vec.ProgramIdOp: lambda p, op: f"%program.{op.axis.value.data}",
    vec.IotaOp: _iota,
    vec.BroadcastOp: _broadcast,
    vec.ShuffleOp: _shuffle,
    vec.LookupOp: _lookup,
    vec.CastOp: _cast,
    vec.CompareOp: _compare,
    vec.SelectOp: _select,
    vec.BufferOp: _buffer,
    vec.LoadOp: _load,
    vec.StoreOp: _store,
    vec.GatherOp: _gather,
    vec.ScatterOp: _scatter,
    vec.PrefetchOp: _prefetch,
    vec.ReduceOp: _reduce,
}
