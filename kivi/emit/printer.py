"""What printers of kernels as source text share, whatever the language: one statement an operation, in order, each value with a name.

A language is a subclass with two tables. `statements` prints what has no single result, `rules` gives the expression of what has one:

    statements[operation](printer, op)
    rules[operation](printer, op, *names of the operands) -> text
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kivi.errors import UnknownOperationError
from kivi.ir import tile
from kivi.ir.xdsl import Attribute, FastMathFlag, ModuleOp, Operation, SSAValue, arith, func, scf, spelled

Statements = Mapping[type, Callable[[Any, Any], None]]
Rules = Mapping[type, Callable[..., str]]

#: Comparisons as the languages spell them; those of integers by the number of their predicate, those of floats that are printed.
SYMBOLS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
INTEGER = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
FLOAT = {1: "==", 2: ">", 3: ">=", 4: "<", 5: "<=", 13: "!="}
CONTRACTED: dict[type, str] = {arith.AddfOp: "+", arith.SubfOp: "-", arith.MulfOp: "*"}


def functions(module: ModuleOp) -> list[func.FuncOp]:
    """The kernels of a module."""
    return [op for op in module.ops if isinstance(op, func.FuncOp)]


class Printer(ABC):
    """Prints one kernel. `language` names it in errors; `reserved` are words that no value may be called."""

    language: str
    #: What stands before the number of a value without a name.
    unnamed = "v"

    def __init__(self, kernel: func.FuncOp, statements: Statements, rules: Rules, reserved: Iterable[str]) -> None:
        self.kernel, self.statements, self.rules = kernel, statements, rules
        self.names: dict[SSAValue, str] = {}
        self.used = set(reserved)
        self.lines: list[str] = []
        self.indent = 1

    @abstractmethod
    def text(self) -> str:
        """The whole kernel."""

    def signature(self) -> dict[str, str]:
        """Argument name -> type, e.g. {"x": "*f16", "n": "i32"}."""
        return {self.name(argument): argument_type(argument.type) for argument in self.kernel.body.block.args}

    def name(self, value: SSAValue) -> str:
        """The name of a value: its hint, made unique."""
        if value not in self.names:
            base = value.name_hint or "v"
            self.names[value] = self.fresh(base if value.name_hint else f"{self.unnamed}{len(self.names)}", base)
        return self.names[value]

    def fresh(self, name: str, base: str = "") -> str:
        """`name`, or one like it, that nothing else is called."""
        base, number = base or name, len(self.names)
        while name in self.used:
            name, number = f"{base}_{number}", number + 1
        self.used.add(name)
        return name

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def assign(self, target: str, text: str) -> None:
        """A value that has its name already takes a new value."""
        self.line(f"{target} = {text}")

    def declare(self, value: SSAValue, text: str, name: str = "") -> None:
        """A new value."""
        self.assign(name or self.name(value), text)

    def block(self, ops: Iterable[Operation]) -> None:
        """Raises `UnknownOperationError` naming an operation that is in neither table."""
        for op in ops:
            statement, rule = self.statements.get(type(op)), self.rules.get(type(op))
            if statement is not None:
                statement(self, op)
            elif rule is not None:
                self.declare(op.results[0], rule(self, op, *(self.name(o) for o in op.operands)))
            else:
                raise UnknownOperationError(f"the {self.language} emitter has no rule for {op.name}")

    # -- what a loop carries: variables declared before it, assigned at the end of its body

    def start(self, op: scf.ForOp) -> None:
        """What stands before a loop."""
        for argument, first in zip(op.body.block.args[1:], op.iter_args, strict=True):
            self.declare(argument, self.name(first))

    def body(self, op: scf.ForOp) -> None:
        """The body of a loop, and its next values."""
        self.block(op.body.block.ops)
        arguments: Sequence[SSAValue] = op.body.block.args[1:]
        following = op.body.block.last_op
        assert isinstance(following, scf.YieldOp)
        moved = [(a, r) for a, r in zip(arguments, following.operands, strict=True) if a is not r]
        swapped = {r for _, r in moved} & set(arguments)  # a value carried to another place must be read before it is overwritten
        old = {value: self.fresh(f"{self.name(value)}_old") for value in sorted(swapped, key=self.name)}
        for value, name in old.items():
            self.declare(value, self.name(value), name)
        for argument, value in moved:
            self.assign(self.name(argument), old.get(value) or self.name(value))

    def end(self, op: scf.ForOp) -> None:
        """The results of a loop are what it carried."""
        for result, argument in zip(op.results, op.body.block.args[1:], strict=True):
            self.names[result] = self.name(argument)


def argument_type(kind: Attribute) -> str:
    return f"*{kind.element}" if isinstance(kind, tile.PtrType) else spelled(kind)


def contracts(op: Operation) -> bool:
    """Whether a sum, difference or product may be contracted with another."""
    flags = getattr(op, "fastmath", None) if type(op) in CONTRACTED else None
    return flags is not None and FastMathFlag.ALLOW_CONTRACT in flags.data


def bits_of(kind: Attribute) -> int:
    """Bits of a number; indices have 32."""
    return 32 if spelled(kind) == "index" else int(spelled(kind)[1:])
