"""The `vec` dialect: text round trip, verifiers, and the interpreter as the meaning of each operation."""

from __future__ import annotations

import numpy as np
import pytest

from kivi.ir.interp.memory import AccessError, Memory
from kivi.ir.interp.tile import UnknownOperationError
from kivi.ir.interp.vector import run
from kivi.ir.tile import Tile
from kivi.ir.vector import Vec
from kivi.ir.xdsl import VerifyException, parse


def body(text: str, arguments: str = "%p: !tile.ptr<f32>, %n: i32") -> str:
    return f"func.func @k({arguments}) {{\n{text}\nfunc.return\n}}"


def execute(text: str, arguments: dict, grid=(1,), kinds: str = "%p: !tile.ptr<f32>, %n: i32") -> Memory:
    """Parse, print and parse again, and run; arrays of `arguments` are memory."""
    module = parse(body(text, kinds), Tile, Vec)
    assert str(parse(str(module), Tile, Vec)) == str(module)
    memory = Memory({n: a for n, a in arguments.items() if isinstance(a, np.ndarray)})
    run(module, "k", grid, {n: n if isinstance(a, np.ndarray) else a for n, a in arguments.items()}, memory)
    return memory


ZERO = "%zero = arith.constant 0 : i64\n"


def result(text: str, kind: str = "f32", lanes: int = 4, p=None) -> list:
    """What a text leaves in %out, a vector of `lanes`, stored to an array of its own."""
    dtype = {"f32": np.float32, "i32": np.int32}[kind]
    out = np.zeros(lanes, dtype)
    p = np.arange(1, 9, dtype=np.float32) if p is None else p
    store = f"vec.store %out, %o[%zero] : vector<{lanes}x{kind}>, !tile.ptr<{kind}>, i64"
    execute(ZERO + text + "\n" + store, {"p": p, "o": out}, kinds=f"%p: !tile.ptr<f32>, %o: !tile.ptr<{kind}>")
    return out.tolist()


LOADED = "%x = vec.load %p[%zero] : !tile.ptr<f32>, i64 -> vector<4xf32>\n"
IOTA = "%i = vec.iota : vector<4xi32>\n"

MEANING = {
    "iota": ("%out = vec.iota : vector<4xi32>", "i32", [0, 1, 2, 3]),
    "broadcast": ("%c = arith.constant 7 : i32\n%out = vec.broadcast %c : i32 -> vector<4xi32>", "i32", [7, 7, 7, 7]),
    "load": (LOADED.replace("%x", "%out"), "f32", [1, 2, 3, 4]),
    "masked load": (
        IOTA + "%two = arith.constant 2 : i32\n%twos = vec.broadcast %two : i32 -> vector<4xi32>\n"
        "%m = vec.compare slt %i, %twos : vector<4xi32>, vector<4xi32> -> vector<4xi1>\n"
        "%out = vec.load %p[%zero] mask %m : vector<4xi1> : !tile.ptr<f32>, i64 -> vector<4xf32>",
        "f32",
        [1, 2, 0, 0],
    ),
    "shuffle": (
        LOADED + "%out = vec.shuffle %x {order = array<i64: 3, 3, 0, 1>} : vector<4xf32> -> vector<4xf32>",
        "f32",
        [4, 4, 1, 2],
    ),
    "gather": (
        IOTA + "%out = vec.gather %p[%j] : !tile.ptr<f32>, vector<4xi32> -> vector<4xf32>".replace("%j", "%i"),
        "f32",
        [1, 2, 3, 4],
    ),
    "cast": (
        LOADED + "%out = vec.cast signed %x : vector<4xf32> -> vector<4xi32>",
        "i32",
        [1, 2, 3, 4],
    ),
    "select": (
        LOADED + "%y = arith.negf %x : vector<4xf32>\n%two = arith.constant 2.0 : f32\n"
        "%twos = vec.broadcast %two : f32 -> vector<4xf32>\n"
        "%m = vec.compare olt %x, %twos : vector<4xf32>, vector<4xf32> -> vector<4xi1>\n"
        "%out = vec.select %m, %y, %x : vector<4xi1>, vector<4xf32>, vector<4xf32> -> vector<4xf32>",
        "f32",
        [-1, 2, 3, 4],
    ),
    "reduce": (
        LOADED + "%s = vec.reduce add %x : vector<4xf32> -> f32\n%out = vec.broadcast %s : f32 -> vector<4xf32>",
        "f32",
        [10, 10, 10, 10],
    ),
    "program_id": ("%a = vec.program_id 1\n%out = vec.broadcast %a : i32 -> vector<4xi32>", "i32", [0, 0, 0, 0]),
    "buffer": (
        LOADED + "%b = vec.buffer 4 : !tile.ptr<f32>\nvec.store %x, %b[%zero] : vector<4xf32>, !tile.ptr<f32>, i64\n"
        "%out = vec.load %b[%zero] : !tile.ptr<f32>, i64 -> vector<4xf32>",
        "f32",
        [1, 2, 3, 4],
    ),
    "prefetch": (
        "%far = arith.constant 123456789 : i64\nvec.prefetch %p[%far] : !tile.ptr<f32>, i64\n" + LOADED.replace("%x", "%out"),
        "f32",
        [1, 2, 3, 4],
    ),
}


@pytest.mark.parametrize("what", MEANING)
def test_meaning(what):
    text, kind, expected = MEANING[what]
    assert result(text, kind) == expected


def test_lookup_reads_four_bits():
    table = np.arange(100, 116, dtype=np.float32)
    text = (
        "%t = vec.load %p[%zero] : !tile.ptr<f32>, i64 -> vector<16xf32>\n" + IOTA + "%c = arith.constant -3 : i32\n"
        "%cs = vec.broadcast %c : i32 -> vector<4xi32>\n%j = arith.addi %i, %cs : vector<4xi32>\n"
        "%out = vec.lookup %t, %j : vector<16xf32>, vector<4xi32> -> vector<4xf32>"
    )
    assert result(text, p=table) == [113, 114, 115, 100]


def test_scatter_writes_where_the_mask_holds():
    text = (
        ZERO + IOTA + "%three = arith.constant 3 : i32\n%threes = vec.broadcast %three : i32 -> vector<4xi32>\n"
        "%at = arith.subi %threes, %i : vector<4xi32>\n%x = vec.cast signed %i : vector<4xi32> -> vector<4xf32>\n"
        "%m = vec.compare ne %i, %threes : vector<4xi32>, vector<4xi32> -> vector<4xi1>\n"
        "vec.scatter %x, %p[%at] mask %m : vector<4xi1> : vector<4xf32>, !tile.ptr<f32>, vector<4xi32>"
    )
    p = np.full(4, -1, np.float32)
    execute(text, {"p": p, "n": 0})
    assert p.tolist() == [-1, 2, 1, 0]


def test_branches_and_loops():
    text = (
        "%zero = arith.constant 0 : i32\n%one = arith.constant 1 : i32\n"
        "%s = scf.for %i = %zero to %n step %one iter_args(%t = %zero) -> (i32) : i32 {\n"
        "%odd = arith.andi %i, %one : i32\n%c = vec.compare eq %odd, %one : i32, i32 -> i1\n"
        "%u = scf.if %c -> (i32) {\n%v = arith.addi %t, %i : i32\nscf.yield %v : i32\n} else {\nscf.yield %t : i32\n}\n"
        "scf.yield %u : i32\n}\n%f = vec.cast signed %s : i32 -> f32\nvec.store %f, %p[%zero] : f32, !tile.ptr<f32>, i32"
    )
    p = np.zeros(1, np.float32)
    execute(text, {"p": p, "n": 6})
    assert p[0] == 1 + 3 + 5


def test_a_fused_product_rounds_once():
    text = (
        ZERO + "%x = vec.load %p[%zero] : !tile.ptr<f32>, i64 -> f32\n%m = arith.constant -1.0 : f32\n"
        "%y = math.fma %x, %x, %m : f32\nvec.store %y, %p[%zero] : f32, !tile.ptr<f32>, i64"
    )
    p = np.array([1 + 2**-12], np.float32)
    execute(text, {"p": p, "n": 0})
    assert p[0] == 2**-11 + 2**-24


INVALID = {
    "grid axis": ("%a = vec.program_id 3", "axes 0, 1 and 2"),
    "iota of floats": ("%a = vec.iota : vector<4xf32>", "i32 or i64"),
    "vector with two axes": ("%a = vec.iota : vector<4x4xi32>", "one axis"),
    "broadcast that converts": ("%a = vec.broadcast %n : i32 -> vector<4xf32>", "keeps the element type"),
    "shuffle beyond the lanes": (
        IOTA + "%a = vec.shuffle %i {order = array<i64: 4>} : vector<4xi32> -> vector<1xi32>",
        "outside 0..3",
    ),
    "shuffle to a wrong width": (
        IOTA + "%a = vec.shuffle %i {order = array<i64: 0, 1>} : vector<4xi32> -> vector<4xi32>",
        "expected 2 lanes",
    ),
    "lookup in a short table": (
        IOTA + "%x = vec.cast signed %i : vector<4xi32> -> vector<4xf32>\n"
        "%a = vec.lookup %x, %i : vector<4xf32>, vector<4xi32> -> vector<4xf32>",
        "a table is",
    ),
    "cast that changes the width": (IOTA + "%a = vec.cast signed %i : vector<4xi32> -> vector<8xf32>", "keeps the lanes"),
    "float comparison of integers": ("%a = vec.compare olt %n, %n : i32, i32 -> i1", "olt does not compare i32"),
    "comparison to one truth value": (IOTA + "%a = vec.compare eq %i, %i : vector<4xi32>, vector<4xi32> -> i1", "type i1"),
    "select of two types": ("%x = arith.constant true\n%a = vec.select %x, %n, %p : i1, i32, !tile.ptr<f32> -> i32", "one type"),
    "empty buffer": ("%b = vec.buffer 0 : !tile.ptr<f32>", "holds nothing"),
    "load of another type": ("%a = vec.load %p[%n] : !tile.ptr<f32>, i32 -> vector<4xi32>", "the pointer is to f32"),
    "load at a vector": (IOTA + "%a = vec.load %p[%i] : !tile.ptr<f32>, vector<4xi32> -> vector<4xf32>", "must be an i32 or i64 scalar"),
    "gather with too few offsets": (
        IOTA + "%a = vec.gather %p[%i] : !tile.ptr<f32>, vector<4xi32> -> vector<8xf32>",
        "one a lane",
    ),
    "mask of another width": (
        "%m = arith.constant true\n%a = vec.load %p[%n] mask %m : i1 : !tile.ptr<f32>, i32 -> vector<4xf32>",
        "the mask must be i1",
    ),
    "prefetch at a vector": (IOTA + "vec.prefetch %p[%i] : !tile.ptr<f32>, vector<4xi32>", "i32 or i64 scalar"),
    "reduction that converts": (IOTA + "%a = vec.reduce add %i : vector<4xi32> -> f32", "keeps the element type"),
    "store of another type": (IOTA + "vec.store %i, %p[%n] : vector<4xi32>, !tile.ptr<f32>, i32", "the pointer is to f32"),
    "scatter of another width": (
        IOTA + "%x = arith.constant 1.0 : f32\n%y = vec.broadcast %x : f32 -> vector<8xf32>\n"
        "vec.scatter %y, %p[%i] : vector<8xf32>, !tile.ptr<f32>, vector<4xi32>",
        "one a lane",
    ),
}


@pytest.mark.parametrize("what", INVALID)
def test_invalid_modules_are_refused(what):
    text, word = INVALID[what]
    with pytest.raises(VerifyException, match=word):
        parse(body(text), Tile, Vec)


def test_an_access_outside_is_named():
    text = "%x = vec.load %p[%n] : !tile.ptr<f32>, i32 -> vector<4xf32>"
    with pytest.raises(AccessError, match="reads 1 elements outside"):
        execute(text, {"p": np.zeros(4, np.float32), "n": 1})
    text = "%b = vec.buffer 2 : !tile.ptr<f32>\n%x = vec.load %b[%n] : !tile.ptr<f32>, i32 -> vector<4xf32>"
    with pytest.raises(AccessError, match="reads 2 elements outside"):
        execute(text, {"p": np.zeros(4, np.float32), "n": 0})


def test_two_programs_may_not_write_one_place():
    text = "%x = arith.constant 1.0 : f32\nvec.store %x, %p[%n] : f32, !tile.ptr<f32>, i32"
    with pytest.raises(AccessError, match="programs 0 and 1 write one byte of 'p'"):
        execute(text, {"p": np.zeros(4, np.float32), "n": 1}, grid=(2,))


def test_an_unknown_operation_is_named():
    with pytest.raises(UnknownOperationError, match=r"math\.sin"):
        execute("%x = arith.constant 1.0 : f32\n%a = math.sin %x : f32", {"p": np.zeros(1, np.float32), "n": 0})
