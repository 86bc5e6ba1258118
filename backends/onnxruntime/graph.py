"""ONNX graphs under construction, without the `onnx` package: nodes, typed values, constants.

A `Value` knows its dtype by name, so that Python numbers become constants of the right type and every conversion is written down:
operators never convert. Shapes are those of the runtime; a graph fixes what the spec fixes, and counts are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

#: A dimension: a number, or the name of one that is counted at run time.
Dim = int | str
BOOLEAN = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "IsNaN", "IsInf", "Not", "Or", "And"})


@dataclass(frozen=True)
class Node:
    """One operator: its name in the standard, names of inputs and outputs, attributes."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Port:
    """An input or output of a graph."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


@dataclass
class Graph:
    """A graph of one function. `opset`: the version of the standard that its operators need."""

    name: str
    opset: int = 21
    nodes: list[Node] = field(default_factory=list)
    inputs: list[Port] = field(default_factory=list)
    outputs: list[Port] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    _known: dict[tuple[str, tuple[int, ...], bytes], str] = field(default_factory=dict)

    def input(self, name: str, dtype: str, shape: Sequence[Dim]) -> Value:
        self.inputs.append(Port(name, dtype, tuple(shape)))
        return Value(self, name, dtype)

    def output(self, name: str, value: Value, shape: Sequence[Dim]) -> None:
        self.nodes.append(Node("Identity", (value.name,), (name,), {}))
        self.outputs.append(Port(name, value.dtype, tuple(shape)))

    def constant(self, array: Any, dtype: str) -> Value:
        """A constant; equal ones are one."""
        a = np.asarray(array, dtype)
        key = (dtype, a.shape, a.tobytes())
        if key not in self._known:
            self._known[key] = f"c{len(self.constants)}"
            self.constants[self._known[key]] = a
        return Value(self, self._known[key], dtype)

    def ints(self, *numbers: int) -> Value:
        """A list of integers, as axes and shapes are given."""
        return self.constant(np.array(numbers, np.int64), "int64")

    def op(self, name: str, *operands: Value, dtype: str | None = None, **attributes: Any) -> Value:
        """The only result of a new node; its dtype is that of the first operand, of a comparison bool, or the given one."""
        return self.split(name, 1, *operands, dtype=dtype, **attributes)[0]

    def split(self, name: str, results: int, *operands: Value, dtype: str | None = None, **attributes: Any) -> list[Value]:
        """The results of a node with several."""
        names = tuple(f"v{len(self.nodes)}" + (f"_{i}" if results > 1 else "") for i in range(results))
        self.nodes.append(Node(name, tuple(o.name for o in operands), names, attributes))
        kind = dtype or ("bool" if name in BOOLEAN else operands[0].dtype)
        return [Value(self, n, kind) for n in names]


@dataclass(frozen=True)
class Value:
    """A tensor of a graph. Operators take values of one dtype and numbers."""

    graph: Graph
    name: str
    dtype: str

    def _with(self, op: str, other: Value | float) -> Value:
        b = other if isinstance(other, Value) else self.graph.constant(other, self.dtype)
        return self.graph.op(op, self, b)

    def __add__(self, other: Value | float) -> Value:
        return self._with("Add", other)

    def __sub__(self, other: Value | float) -> Value:
        return self._with("Sub", other)

    def __mul__(self, other: Value | float) -> Value:
        return self._with("Mul", other)

    def __truediv__(self, other: Value | float) -> Value:
        return self._with("Div", other)

    def __matmul__(self, other: Value) -> Value:
        return self._with("MatMul", other)

    def __lt__(self, other: Value | float) -> Value:
        return self._with("Less", other)

    def __gt__(self, other: Value | float) -> Value:
        return self._with("Greater", other)

    def __or__(self, other: Value | int) -> Value:
        return self._with("Or" if self.dtype == "bool" else "BitwiseOr", other)

    def __and__(self, other: Value | int) -> Value:
        return self._with("And" if self.dtype == "bool" else "BitwiseAnd", other)

    def __lshift__(self, count: Value | int) -> Value:
        return self._shift("LEFT", count)

    def __rshift__(self, count: Value | int) -> Value:
        return self._shift("RIGHT", count)

    def _shift(self, direction: str, count: Value | int) -> Value:
        b = count if isinstance(count, Value) else self.graph.constant(count, self.dtype)
        return self.graph.op("BitShift", self, b, direction=direction)

    def equal(self, other: Value | float) -> Value:
        return self._with("Equal", other)

    def least(self, other: Value | float) -> Value:
        return self._with("Min", other)

    def most(self, other: Value | float) -> Value:
        return self._with("Max", other)

    def to(self, dtype: str) -> Value:
        """Converted; floating-point numbers are rounded half to even."""
        return self if dtype == self.dtype else self.graph.op("Cast", self, dtype=dtype, to=dtype)

    def where(self, yes: Value | float, no: Value | float, dtype: str = "float32") -> Value:
        """`yes` where this boolean holds, else `no`."""
        a, b = (x if isinstance(x, Value) else self.graph.constant(x, dtype) for x in (yes, no))
        return self.graph.op("Where", self, a, b, dtype=a.dtype)

    # shapes

    def reshape(self, *shape: int) -> Value:
        """0 keeps a dimension, -1 takes what is left."""
        return self.graph.op("Reshape", self, self.graph.ints(*shape))

    def transpose(self, *order: int) -> Value:
        return self if order == tuple(range(len(order))) else self.graph.op("Transpose", self, perm=list(order))

    def unsqueeze(self, *axes: int) -> Value:
        return self.graph.op("Unsqueeze", self, self.graph.ints(*axes))

    def squeeze(self, *axes: int) -> Value:
        return self.graph.op("Squeeze", self, self.graph.ints(*axes))

    def size(self, axis: int) -> Value:
        """The length of an axis, int64 [1]."""
        return self.graph.op("Shape", self, dtype="int64", start=axis, end=axis + 1)

    def slice(self, axis: int, first: Value | int, last: Value | int) -> Value:
        """Elements first to last - 1 of an axis; bounds are numbers or int64 [1]."""
        bounds = [b if isinstance(b, Value) else self.graph.ints(b) for b in (first, last)]
        return self.graph.op("Slice", self, *bounds, self.graph.ints(axis))

    def take(self, index: Value, axis: int) -> Value:
        return self.graph.op("Gather", self, index, axis=axis)

    def parts(self, sizes: Sequence[int], axis: int) -> list[Value]:
        """Cut along an axis."""
        if len(sizes) == 1:
            return [self]
        return self.graph.split("Split", len(sizes), self, self.graph.ints(*sizes), axis=axis)

    def reduce(self, how: str, *axes: int, keep: bool = True) -> Value:
        """`how`: "Max", "Min" or "Sum"."""
        return self.graph.op(f"Reduce{how}", self, self.graph.ints(*axes), keepdims=int(keep))


def join(values: Sequence[Value], axis: int) -> Value:
    """One after another along an axis."""
    return values[0] if len(values) == 1 else values[0].graph.op("Concat", *values, axis=axis)
