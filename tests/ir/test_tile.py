"""The `tile` dialect: text round trip, verifiers, and the interpreter as the meaning of each operation."""

from __future__ import annotations

import numpy as np
import pytest

from kivi.ir.interp.memory import AccessError, Memory
from kivi.ir.interp.tile import BrokenPromiseError, UnknownOperationError, run
from kivi.ir.tile import Tile
from kivi.ir.xdsl import VerifyException, parse
from tests.ir.foreign import FOREIGN


def execute(module, name, grid, arguments):
    """Interpret with every array of `arguments` in memory; returns the memory."""
    memory = Memory({n: a for n, a in arguments.items() if isinstance(a, np.ndarray)})
    run(module, name, grid, {n: n if isinstance(a, np.ndarray) else a for n, a in arguments.items()}, memory)
    return memory


@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda f: f.name)
def test_foreign_kernels_round_trip_and_run(foreign):
    module = foreign.module()
    text = str(module)
    assert str(parse(text, Tile)) == text
    arguments = foreign.make()
    execute(module, foreign.name, foreign.grid, arguments)
    if foreign.exact:
        assert np.array_equal(arguments["o"], foreign.expected(arguments))
    else:
        np.testing.assert_allclose(arguments["o"], foreign.expected(arguments), rtol=2e-6)


def body(text: str, arguments: str = "%p: !tile.ptr<f32>, %n: i32") -> str:
    return f"func.func @k({arguments}) {{\n{text}\nfunc.return\n}}"


INVALID = {
    "grid axis": ("%a = tile.program_id 3", "axes 0, 1 and 2"),
    "range of floats": ("%a = tile.range : tensor<4xf32>", "tensor<Nxi32>"),
    "splat that converts": ("%a = tile.splat %n : i32 -> tensor<4xf32>", "keeps the element type"),
    "expand to a wrong shape": (
        "%a = tile.range : tensor<4xi32>\n%b = tile.expand %a, 0 : tensor<4xi32> -> tensor<4x1xi32>",
        "expected shape",
    ),
    "expand beyond the rank": (
        "%a = tile.range : tensor<4xi32>\n%b = tile.expand %a, 2 : tensor<4xi32> -> tensor<4x1xi32>",
        "outside 0..1",
    ),
    "broadcast of 4 to 8": (
        "%a = tile.range : tensor<4xi32>\n%b = tile.broadcast %a : tensor<4xi32> -> tensor<8xi32>",
        "does not broadcast",
    ),
    "reshape that loses": (
        "%a = tile.range : tensor<4xi32>\n%b = tile.reshape %a : tensor<4xi32> -> tensor<2xi32>",
        "4 elements cannot become 2",
    ),
    "permute with a repetition": (
        "%a = tile.range : tensor<4xi32>\n%b = tile.expand %a, 0 : tensor<4xi32> -> tensor<1x4xi32>\n"
        "%c = tile.permute %b {order = array<i64: 0, 0>} : tensor<1x4xi32> -> tensor<4x1xi32>",
        "not an order",
    ),
    "multiple of a float": ("%x = arith.constant 1.0 : f32\n%a = tile.multiple %x of 4 : f32 -> f32", "i32 or i64 scalar"),
    "cast that reshapes": ("%a = tile.range : tensor<4xi32>\n%b = tile.cast signed %a : tensor<4xi32> -> tensor<8xf32>", "keeps the shape"),
    "float comparison of integers": ("%a = tile.compare olt %n, %n : i32, i32 -> i1", "olt does not compare i32"),
    "integer comparison of floats": (
        "%x = arith.constant 1.0 : f32\n%a = tile.compare slt %x, %x : f32, f32 -> i1",
        "slt does not compare f32",
    ),
    "comparison of two types": ("%x = arith.constant 1.0 : f32\n%a = tile.compare eq %x, %n : f32, i32 -> i1", "one type"),
    "select with a wrong condition": ("%a = tile.select %n, %n, %n : i32, i32, i32 -> i32", "the condition"),
    "load of another type": ("%a = tile.load %p[%n] : !tile.ptr<f32>, i32 -> i32", "the pointer is to f32"),
    "load of another shape": (
        "%r = tile.range : tensor<4xi32>\n%a = tile.load %p[%r] : !tile.ptr<f32>, tensor<4xi32> -> tensor<8xf32>",
        "offsets",
    ),
    "store with a wrong mask": (
        "%x = arith.constant 1.0 : f32\ntile.store %x, %p[%n] mask %n : i32 : f32, !tile.ptr<f32>, i32",
        "the mask must be i1",
    ),
    "reduction along no axis": (
        "%r = tile.range : tensor<4xi32>\n%a = tile.reduce add %r, 1 : tensor<4xi32> -> tensor<1xi32>",
        "outside 0..0",
    ),
    "reduction that drops the axis": (
        "%r = tile.range : tensor<4xi32>\n%a = tile.reduce add %r, 0 : tensor<4xi32> -> tensor<4xi32>",
        "expected shape",
    ),
    "scan along no axis": ("%r = tile.range : tensor<4xi32>\n%a = tile.scan add %r, 1 : tensor<4xi32> -> tensor<4xi32>", "no axis 1"),
    "dot of shapes that do not fit": (
        "%x = arith.constant 1.0 : f32\n%a = tile.splat %x : f32 -> tensor<4x8xf32>\n"
        "%c = tile.dot %a, %a, %a : tensor<4x8xf32>, tensor<4x8xf32>, tensor<4x8xf32> -> tensor<4x8xf32>",
        "times",
    ),
}


@pytest.mark.parametrize("what", INVALID)
def test_invalid_modules_are_refused(what):
    text, word = INVALID[what]
    with pytest.raises(VerifyException, match=word.replace("(", r"\(")):
        parse(body(text), Tile)


def test_an_access_outside_the_arrays_is_named():
    module = parse(body("%x = tile.load %p[%n] : !tile.ptr<f32>, i32 -> f32\ntile.store %x, %p[%n] : f32, !tile.ptr<f32>, i32"), Tile)
    with pytest.raises(AccessError, match="reads 1 elements outside"):
        execute(module, "k", (1,), {"p": np.zeros(4, np.float32), "n": 4})
    with pytest.raises(AccessError, match="programs 0 and 1 write one byte of 'p'"):
        execute(module, "k", (2,), {"p": np.zeros(4, np.float32), "n": 3})


def test_two_lanes_of_one_store_may_not_meet():
    text = "%r = tile.splat %n : i32 -> tensor<4xi32>\n%z = arith.constant 0.0 : f32\n%v = tile.splat %z : f32 -> tensor<4xf32>\n"
    module = parse(body(text + "tile.store %v, %p[%r] : tensor<4xf32>, !tile.ptr<f32>, tensor<4xi32>"), Tile)
    with pytest.raises(AccessError, match="twice in one store"):
        execute(module, "k", (1,), {"p": np.zeros(4, np.float32), "n": 1})


def test_a_broken_promise_is_named():
    module = parse(body("%a = tile.multiple %n of 16 : i32 -> i32"), Tile)
    execute(module, "k", (1,), {"p": np.zeros(4, np.float32), "n": 48})
    with pytest.raises(BrokenPromiseError, match="multiple of 16 is 40"):
        execute(module, "k", (1,), {"p": np.zeros(4, np.float32), "n": 40})


def test_an_unknown_operation_is_named():
    module = parse(body("%x = arith.constant 1.0 : f32\n%a = math.sin %x : f32"), Tile)
    with pytest.raises(UnknownOperationError, match=r"math\.sin"):
        execute(module, "k", (1,), {"p": np.zeros(4, np.float32), "n": 0})


def test_bytes_are_counted_by_array():
    foreign = FOREIGN[2]
    memory = execute(foreign.module(), foreign.name, foreign.grid, foreign.make())
    assert dict(memory.read) == {"x": 150}
    assert dict(memory.written) == {"o": 150}
