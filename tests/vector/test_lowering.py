"""Lowering of `tile` to `vec`, executed by the interpreter: bit-identical results for every width of vector."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kivi.errors import KiviError
from kivi.ir.tile import Tile
from kivi.ir.xdsl import func, parse
from kivi.layout import layouts
from kivi.passes.clean import clean
from kivi.passes.tensors import Kernel
from kivi.passes.tile_to_vector import LoweringError, lower, lower_function
from kivi.passes.vector_target import TARGETS
from tests.ir import test_kernels
from tests.ir.foreign import FOREIGN
from tests.vector.interpreted import execute, launch


def lowered(module, target):
    clean(module)
    return lower_function(next(op for op in module.ops if isinstance(op, func.FuncOp)), TARGETS[target])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda f: f.name)
def test_foreign_kernels(foreign, target):
    arguments = foreign.make()
    execute(lowered(foreign.module(), target), foreign.name, foreign.grid, arguments)
    if foreign.exact:
        assert np.array_equal(arguments["o"], foreign.expected(arguments))
    else:
        np.testing.assert_allclose(arguments["o"], foreign.expected(arguments), rtol=2e-6)


CASES = [
    ("x86-64-v4", "key", 2, "lanes32", "float16"),
    ("x86-64-v4", "value", 3, "lanes32", "bfloat16"),
    ("x86-64-v3", "value", 4, "official_int32", "float16"),
    ("x86-64-v3", "key", 8, "planes8", "float32"),
    ("x86-64-v3", "key", 3, "hp16.mma", "float16"),
    ("x86-64", "value", 2, "lanes32", "float16"),
    ("aarch64", "key", 1, "lanes32", "bfloat16"),
]


@pytest.mark.parametrize(("target", "which", "bits", "layout", "dtype"), CASES)
def test_tensors(target, which, bits, layout, dtype):
    """Scales, origins, words, codes, dequantized values and repacked words, bit for bit."""
    spec = test_kernels.spec_of(bits, layout)
    test_kernels.check_tensor(spec, which, dtype, (1, 1, 16 if which == "key" else 5, 20), run=launch(target))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("which", ["key", "value"])
def test_every_tensor(target, layout, bits, which):
    spec = test_kernels.spec_of(bits, layout)
    test_kernels.check_tensor(spec, which, "float16", (1, 2, 24 if which == "key" else 21, 20), run=launch(target))


def run_text(text, arguments, grid=(1,), target="x86-64-v4"):
    module = parse(text, Tile)
    name = next(op for op in module.ops if isinstance(op, func.FuncOp)).sym_name.data
    return execute(lowered(module, target), name, grid, arguments)


def test_a_load_does_not_move_past_a_store_to_its_memory():
    """Reversing in place: every element must be read before the first is written."""
    text = """
    func.func @reverse(%p: !tile.ptr<f32>) {
      %i = tile.range : tensor<32xi32>
      %top = arith.constant 31 : i32
      %tops = tile.splat %top : i32 -> tensor<32xi32>
      %back = arith.subi %tops, %i : tensor<32xi32>
      %x = tile.load %p[%back] : !tile.ptr<f32>, tensor<32xi32> -> tensor<32xf32>
      tile.store %x, %p[%i] : tensor<32xf32>, !tile.ptr<f32>, tensor<32xi32>
      func.return
    }"""
    p = np.arange(32, dtype=np.float32)
    run_text(text, {"p": p}, target="x86-64")
    assert p.tolist() == list(range(31, -1, -1))


def test_tiles_that_change_places_in_a_loop():
    """Both carried tiles are computed before one is overwritten."""
    text = """
    func.func @swap(%p: !tile.ptr<f32>, %n: i32) {
      %zero = arith.constant 0 : i32
      %one = arith.constant 1 : i32
      %i = tile.range : tensor<8xi32>
      %eight = arith.constant 8 : i32
      %eights = tile.splat %eight : i32 -> tensor<8xi32>
      %j = arith.addi %i, %eights : tensor<8xi32>
      %a = tile.load %p[%i] : !tile.ptr<f32>, tensor<8xi32> -> tensor<8xf32>
      %b = tile.load %p[%j] : !tile.ptr<f32>, tensor<8xi32> -> tensor<8xf32>
      %c, %d = scf.for %k = %zero to %n step %one iter_args(%x = %a, %y = %b) -> (tensor<8xf32>, tensor<8xf32>) : i32 {
        %s = arith.addf %x, %y : tensor<8xf32>
        scf.yield %y, %s : tensor<8xf32>, tensor<8xf32>
      }
      tile.store %c, %p[%i] : tensor<8xf32>, !tile.ptr<f32>, tensor<8xi32>
      tile.store %d, %p[%j] : tensor<8xf32>, !tile.ptr<f32>, tensor<8xi32>
      func.return
    }"""
    p = np.ones(16, np.float32)
    run_text(text, {"p": p, "n": 5})
    assert p.tolist() == [8.0] * 8 + [13.0] * 8


def test_shapes():
    """permute, and reshapes that are more than axes of length 1."""
    text = """
    func.func @shapes(%p: !tile.ptr<i32>, %o: !tile.ptr<i32>) {
      %i = tile.range : tensor<24xi32>
      %x = tile.load %p[%i] : !tile.ptr<i32>, tensor<24xi32> -> tensor<24xi32>
      %m = tile.reshape %x : tensor<24xi32> -> tensor<4x6xi32>
      %t = tile.permute %m {order = array<i64: 1, 0>} : tensor<4x6xi32> -> tensor<6x4xi32>
      %u = tile.reshape %t : tensor<6x4xi32> -> tensor<3x8xi32>
      %f = tile.reshape %u : tensor<3x8xi32> -> tensor<24xi32>
      tile.store %f, %o[%i] : tensor<24xi32>, !tile.ptr<i32>, tensor<24xi32>
      func.return
    }"""
    p, o = np.arange(24, dtype=np.int32) * 7, np.zeros(24, np.int32)
    run_text(text, {"p": p, "o": o})
    assert np.array_equal(o, (np.arange(24) * 7).reshape(4, 6).T.reshape(-1))


def test_dot_and_scan():
    text = """
    func.func @both(%a: !tile.ptr<f32>, %o: !tile.ptr<f32>) {
      %i = tile.range : tensor<16xi32>
      %x = tile.load %a[%i] : !tile.ptr<f32>, tensor<16xi32> -> tensor<16xf32>
      %m = tile.reshape %x : tensor<16xf32> -> tensor<4x4xf32>
      %d = tile.dot %m, %m, %m : tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32> -> tensor<4x4xf32>
      %s = tile.scan add %d, 0 : tensor<4x4xf32> -> tensor<4x4xf32>
      %f = tile.reshape %s : tensor<4x4xf32> -> tensor<16xf32>
      tile.store %f, %o[%i] : tensor<16xf32>, !tile.ptr<f32>, tensor<16xi32>
      func.return
    }"""
    a, o = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
    run_text(text, {"a": a, "o": o}, target="x86-64-v3")
    m = a.reshape(4, 4)
    assert np.array_equal(o.reshape(4, 4), np.cumsum(m @ m + m, axis=0))


def test_half_precision_arithmetic_rounds_every_step():
    """Formats of memory are held as float32 and rounded where they are made, on processors with and without conversions."""
    text = """
    func.func @steps(%p: !tile.ptr<f16>, %o: !tile.ptr<f16>) {
      %i = tile.range : tensor<64xi32>
      %x = tile.load %p[%i] : !tile.ptr<f16>, tensor<64xi32> -> tensor<64xf16>
      %y = arith.mulf %x, %x : tensor<64xf16>
      %z = arith.addf %y, %x : tensor<64xf16>
      tile.store %z, %o[%i] : tensor<64xf16>, !tile.ptr<f16>, tensor<64xi32>
      func.return
    }"""
    p = np.random.default_rng(3).standard_normal(64).astype(np.float16)
    for target in ("x86-64-v4", "x86-64"):
        o = np.zeros(64, np.float16)
        run_text(text, {"p": p, "o": o}, target=target)
        assert o.tobytes() == (p * p + p).tobytes()


def test_what_has_no_vector_form_is_named():
    module = parse("func.func @k(%n: i32) {\n%x = arith.constant 1.0 : f32\n%a = math.sin %x : f32\nfunc.return\n}", Tile)
    with pytest.raises(LoweringError, match=r"math\.sin") as caught:
        lower(Kernel("k", module, [], ["n"]), TARGETS["x86-64"])
    assert isinstance(caught.value, KiviError)


def test_neighbours_are_loaded_at_once_and_others_gathered():
    """Golden text of one kernel's access: a stride that is not known gathers, consecutive elements are one vector."""
    text = str(lowered(FOREIGN[2].module(), "x86-64-v4"))
    accesses = [line.strip() for line in text.splitlines() if re.search(r"vec\.(load|store|gather|scatter)", line)]
    assert [re.sub(r"%\w+", "%", line) for line in accesses] == [
        "% = vec.gather %[%] mask % : vector<16xi1> : !tile.ptr<i16>, vector<16xi64> -> vector<16xi16>",
        "vec.store %, %[%] : vector<16xi16>, !tile.ptr<i16>, i32",  # kept, since o may be the memory of x
        "% = vec.load %[%] : !tile.ptr<i16>, i32 -> vector<16xi16>",
        "vec.store %, %[%] mask % : vector<16xi1> : vector<16xi16>, !tile.ptr<i16>, i64",
    ]


def test_a_promised_stride_makes_neighbours():
    """Rows of a tensor whose channels are neighbours are loaded as vectors."""
    kernel = test_kernels.tensors.metadata_kernel(
        "key", test_kernels.Numbers.of(test_kernels.spec_of(2, "lanes32"), "key", "float32", "float32"), 16
    )
    clean(kernel.module)
    assert "vec.gather" in str(lower(kernel, TARGETS["x86-64-v4"]).module)
    assert "vec.gather" not in str(lower(kernel, TARGETS["x86-64-v4"], ["x_channel"]).module)
