"""The `simt` dialect: text round trip, verifiers, and the interpreter as the meaning of each operation."""

from __future__ import annotations

import numpy as np
import pytest

from kivi.ir.interp.memory import AccessError
from kivi.ir.interp.simt import DivergenceError, RaceError
from kivi.ir.interp.tile import BrokenPromiseError, UnknownOperationError
from kivi.ir.simt import Simt
from kivi.ir.tile import Tile
from kivi.ir.xdsl import VerifyException, parse
from tests.ir.foreign import aligned
from tests.simt.interpreted import ORDERS, execute

ALL = 0xFFFFFFFF

#: Every operation of the dialect, and an array of each kind.
REVERSE = """\
builtin.module {
  func.func @reverse(%x: !tile.ptr<f32>, %o: !tile.ptr<f32>, %n: i32) attributes {simt.threads = 64 : i64} {
    %shared = memref.alloc() : memref<64xf32, #simt<space shared>>
    %own = memref.alloca() : memref<1xf32>
    %thread = simt.thread_id
    %block = simt.block_id 0
    %size = arith.constant 64 : i32
    %last = arith.constant 63 : i32
    %zero = arith.constant 0 : i32
    %nothing = arith.constant -1.000000e+00 : f32
    %first = arith.muli %block, %size : i32
    %at = arith.addi %first, %thread : i32
    %inside = arith.cmpi slt, %at, %n : i32
    %v = simt.load %x[%at] mask %inside other %nothing : f32 : !tile.ptr<f32>, i32 -> f32
    %i = arith.index_cast %thread : i32 to index
    memref.store %v, %shared[%i] : memref<64xf32, #simt<space shared>>
    simt.barrier
    %mirrored = arith.subi %last, %thread : i32
    %j = arith.index_cast %mirrored : i32 to index
    %w = memref.load %shared[%j] : memref<64xf32, #simt<space shared>>
    %slot = arith.index_cast %zero : i32 to index
    memref.store %w, %own[%slot] : memref<1xf32>
    %kept = memref.load %own[%slot] : memref<1xf32>
    %other = simt.shuffle xor %kept, 1 width 32 mask 4294967295 : f32 -> f32
    %next = simt.shuffle down %other, 2 width 8 mask 4294967295 : f32 -> f32
    simt.store %next, %o[%at] : f32, !tile.ptr<f32>, i32
    func.return
  }
}
"""


def reversed_by_hand(x):
    """What REVERSE does to blocks of 64."""
    padded = np.full(-(-len(x) // 64) * 64, -1, np.float32)
    padded[: len(x)] = x
    swapped = padded.reshape(-1, 64)[:, ::-1].reshape(-1, 2)[:, ::-1].reshape(-1, 8)
    return np.concatenate([swapped[:, 2:], swapped[:, 6:]], 1).reshape(-1)


@pytest.mark.parametrize("order", ORDERS)
def test_every_operation(order):
    module = parse(REVERSE, Tile, Simt)
    assert str(module) == REVERSE.rstrip()
    x, o = np.arange(100, dtype=np.float32), np.zeros(128, np.float32)
    execute(module, "reverse", (2,), {"x": x, "o": o, "n": 100}, order=order)
    assert np.array_equal(o, reversed_by_hand(x))


def without_barrier(again: str = "") -> str:
    return REVERSE.replace("    simt.barrier\n", again)


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_barrier(order):
    arguments = {"x": np.arange(64, dtype=np.float32), "o": np.zeros(64, np.float32), "n": 64}
    with pytest.raises((RaceError, AccessError), match=r"of the shared array|never written"):
        execute(parse(without_barrier(), Tile, Simt), "reverse", (1,), arguments, order=order)
    # Here every element was written once before, so the race is all that is wrong.
    again = "    simt.barrier\n    memref.store %v, %shared[%i] : memref<64xf32, #simt<space shared>>\n"
    with pytest.raises(RaceError, match="the shared array shared"):
        execute(parse(without_barrier(again), Tile, Simt), "reverse", (1,), arguments, order=order)


def test_the_order_decides_where_a_barrier_is_missing():
    """Nobody looks for races here: the first thread that reads too early differs."""
    module = parse(without_barrier(), Tile, Simt)
    seen = set()
    for order in ORDERS:
        arguments = {"x": np.arange(64, dtype=np.float32), "o": np.zeros(64, np.float32), "n": 64}
        with pytest.raises(AccessError) as caught:
            execute(module, "reverse", (1,), arguments, order=order, check_races=False)
        seen.add(str(caught.value))
    assert len(seen) == 3


def test_a_tail_mask_that_is_too_wide():
    wrong = REVERSE.replace("arith.cmpi slt, %at, %n", "arith.cmpi sle, %at, %n")
    arguments = {"x": np.arange(100, dtype=np.float32), "o": np.zeros(128, np.float32), "n": 100}
    with pytest.raises(AccessError, match="reads 1 elements outside"):
        execute(parse(wrong, Tile, Simt), "reverse", (2,), arguments)


def test_a_shuffle_whose_mask_forgets_a_thread():
    wrong = REVERSE.replace("width 32 mask 4294967295", "width 32 mask 2147483647")
    arguments = {"x": np.arange(64, dtype=np.float32), "o": np.zeros(64, np.float32), "n": 64}
    with pytest.raises(DivergenceError, match="thread 31 takes part in a shuffle whose mask 0x7fffffff does not name it"):
        execute(parse(wrong, Tile, Simt), "reverse", (1,), arguments)


def body(text: str, arguments: str = "%p: !tile.ptr<f32>, %n: i32") -> str:
    return f"func.func @k({arguments}) attributes {{simt.threads = 32 : i64}} {{\n%t = simt.thread_id\n{text}\nfunc.return\n}}"


DIVERGENT_LOOP = """\
%zero = arith.constant 0 : i32
%one = arith.constant 1 : i32
%x = arith.constant 1.0 : f32
scf.for %i = %zero to %t step %one : i32 {
  WAIT
}"""


@pytest.mark.parametrize(
    ("wait", "message"),
    [
        ("simt.barrier", "a barrier is reached by 31 of 32 threads"),
        (f"%y = simt.shuffle xor %x, 1 width 32 mask {ALL} : f32 -> f32", "a shuffle is reached by some of the threads 0 to 31"),
    ],
)
def test_threads_that_do_not_meet(wait, message):
    module = parse(body(DIVERGENT_LOOP.replace("WAIT", wait)), Tile, Simt)
    with pytest.raises(DivergenceError, match=message):
        execute(module, "k", (1,), {"p": np.zeros(1, np.float32), "n": 0})


def test_an_array_is_read_before_it_is_written():
    text = "%a = memref.alloca() : memref<2xf32>\n%i = arith.index_cast %n : i32 to index\n%x = memref.load %a[%i] : memref<2xf32>"
    for n, message in ((1, "element 1 of an array of 2, which was never written"), (2, "element 2 of an array of 2")):
        with pytest.raises(AccessError, match=message):
            execute(parse(body(text), Tile, Simt), "k", (1,), {"p": np.zeros(1, np.float32), "n": n})


def test_two_threads_may_not_write_one_address():
    module = parse(body("%x = arith.constant 1.0 : f32\nsimt.store %x, %p[%n] : f32, !tile.ptr<f32>, i32"), Tile, Simt)
    with pytest.raises(AccessError, match="programs 0 and 1 write one byte of 'p'"):
        execute(module, "k", (1,), {"p": np.zeros(1, np.float32), "n": 0})


COPY = """\
builtin.module {
  func.func @runs(%x: !tile.ptr<i16> {tile.align = 16 : i64}, %o: !tile.ptr<i16>, %n: i32, %by: i32) attributes {simt.threads = 32 : i64} {
    %shared = memref.alloc() : memref<256xi16, #simt<space shared>>
    %thread = simt.thread_id
    %eight = arith.constant 8 : i32
    %first = arith.muli %thread, %eight : i32
    %at = arith.addi %first, %by : i32
    %inside = arith.cmpi slt, %thread, %n : i32
    %place = arith.index_cast %first : i32 to index
    simt.copy %x[%at] mask %inside to %shared[%place] : !tile.ptr<i16>, i32, memref<256xi16, #simt<space shared>>
    simt.barrier
    %back = arith.index_cast %thread : i32 to index
    %v = memref.load %shared[%back] : memref<256xi16, #simt<space shared>>
    simt.store %v, %o[%thread] : i16, !tile.ptr<i16>, i32
    func.return
  }
}
"""


@pytest.mark.parametrize("order", ORDERS)
def test_runs_are_copied(order):
    module = parse(COPY, Tile, Simt)
    assert str(module) == COPY.rstrip()
    x, o = aligned(np.arange(1, 257, dtype=np.int16)), np.zeros(32, np.int16)
    memory = execute(module, "runs", (1,), {"x": x, "o": o, "n": 3, "by": 16}, order=order)
    assert np.array_equal(o, np.where(np.arange(32) < 24, np.arange(17, 49), 0))
    assert memory.read["x"] == 3 * 16


def copied(x, late=0, text=COPY):
    return execute(parse(text, Tile, Simt), "runs", (1,), {"x": x, "o": np.zeros(32, np.int16), "n": 32, "by": late})


def test_runs_are_aligned_and_inside():
    x = aligned(np.arange(257, dtype=np.int16))
    with pytest.raises(AccessError, match=r"thread 0 reads 16 bytes at 0x.*no multiple"):
        copied(x, late=1)
    with pytest.raises(AccessError, match="outside its arrays"):
        copied(x, late=8)
    with pytest.raises(AccessError, match="puts a run of 8 elements at element 1, which is no multiple"):
        copied(x, text=COPY.replace("%place = arith.index_cast %first", "%place = arith.index_cast %thread"))
    with pytest.raises(RaceError, match="of the shared array shared"):
        copied(x, text=COPY.replace("    simt.barrier\n", ""))
    with pytest.raises(BrokenPromiseError, match="argument 'x' of kernel 'runs' was promised to be a multiple of 16 bytes and is 0x"):
        copied(x[1:])


SHARED = "%a = memref.alloc() : memref<8xf32, #simt<space shared>>\n%i = arith.index_cast %n : i32 to index\n"
INVALID = {
    "run into an array of a thread": (
        "%a = memref.alloca() : memref<8xf32>\n%i = arith.index_cast %n : i32 to index\n"
        "simt.copy %p[%n] to %a[%i] : !tile.ptr<f32>, i32, memref<8xf32>",
        "a run is put into an array of the block",
    ),
    "run into an array that ends within it": (
        SHARED.replace("8xf32", "6xf32") + "simt.copy %p[%n] to %a[%i] : !tile.ptr<f32>, i32, memref<6xf32, #simt<space shared>>",
        "an array of 6 elements does not end with a run of 4",
    ),
    "run of another type": (
        SHARED.replace("f32", "i32") + "simt.copy %p[%n] to %a[%i] : !tile.ptr<f32>, i32, memref<8xi32, #simt<space shared>>",
        "the pointer is to f32, the element is i32",
    ),
    "grid axis": ("%a = simt.block_id 3", "axes 0, 1 and 2"),
    "barrier in a branch": ("%c = arith.cmpi slt, %t, %n : i32\nscf.if %c {\nsimt.barrier\n}", "simt.barrier may not stand in an scf.if"),
    "shuffle in a branch": (
        f"%c = arith.cmpi slt, %t, %n : i32\nscf.if %c {{\n%a = simt.shuffle xor %t, 1 width 32 mask {ALL} : i32 -> i32\n}}",
        "simt.shuffle may not stand in an scf.if",
    ),
    "shuffle that converts": (f"%a = simt.shuffle xor %t, 1 width 32 mask {ALL} : i32 -> f32", "keeps the type"),
    "shuffle of half": (
        f"%x = arith.constant 1.0 : f16\n%a = simt.shuffle xor %x, 1 width 32 mask {ALL} : f16 -> f16",
        "i32, i64, f32 or f64, not f16",
    ),
    "segment of 12": (f"%a = simt.shuffle xor %t, 1 width 12 mask {ALL} : i32 -> i32", "not 12"),
    "offset beyond the segment": (f"%a = simt.shuffle down %t, 8 width 8 mask {ALL} : i32 -> i32", "outside 1..7"),
    "mask of nobody": ("%a = simt.shuffle xor %t, 1 width 32 mask 0 : i32 -> i32", "does not name threads"),
    "load of another type": ("%x = simt.load %p[%n] : !tile.ptr<f32>, i32 -> f16", "the pointer is to f32, the element is f16"),
    "load at a float": ("%z = arith.constant 0.0 : f32\n%x = simt.load %p[%z] : !tile.ptr<f32>, f32 -> f32", "an offset is i32 or i64"),
    "other of another type": (
        "%c = arith.cmpi slt, %t, %n : i32\n%x = simt.load %p[%n] mask %c other %n : i32 : !tile.ptr<f32>, i32 -> f32",
        "`other` must have the result's type",
    ),
    "mask without other": (
        "%c = arith.cmpi slt, %t, %n : i32\n%x = simt.load %p[%n] mask %c : !tile.ptr<f32>, i32 -> f32",
        "`mask` and `other` go together",
    ),
    "store of another type": ("simt.store %n, %p[%n] : i32, !tile.ptr<f32>, i32", "the pointer is to f32, the element is i32"),
}


@pytest.mark.parametrize("what", INVALID)
def test_invalid_modules_are_refused(what):
    text, message = INVALID[what]
    with pytest.raises(VerifyException, match=message):
        parse(body(text), Tile, Simt)


@pytest.mark.parametrize("threads", ["33 : i64", "0 : i64", "2048 : i64", '"many"'])
def test_a_block_is_whole_warps(threads):
    module = parse(body("").replace("32 : i64", threads), Tile, Simt)
    with pytest.raises(VerifyException, match="a block is whole warps of 32 threads, at most 1024"):
        execute(module, "k", (1,), {"p": np.zeros(1, np.float32), "n": 0})


def test_an_unknown_operation_is_named():
    module = parse(body("%x = arith.constant 1.0 : f32\n%a = math.sin %x : f32"), Tile, Simt)
    with pytest.raises(UnknownOperationError, match=r"math\.sin"):
        execute(module, "k", (1,), {"p": np.zeros(1, np.float32), "n": 0})
