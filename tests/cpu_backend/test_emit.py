"""The LLVM printer prints the dialect, and it runs: kernels that have nothing to do with caches, and the errors of functions."""

from __future__ import annotations

import ctypes
import math

import ml_dtypes
import numpy as np
import pytest

from kivi.backends.cpu import compile as compiler
from kivi.backends.cpu import emit
from kivi.backends.cpu.kernels import Launch, printed
from kivi.errors import BackendError, InputError
from kivi.ir.interp.tile import UnknownOperationError
from kivi.ir.tile import PtrType, Tile
from kivi.ir.vector import Vec
from kivi.ir.vector_build import iota, kernel, program_id
from kivi.ir.xdsl import f32, i16, parse
from kivi.passes import vector_math, vector_numbers
from kivi.passes.clean import clean
from kivi.passes.tensors import Kernel
from kivi.passes.tile_to_vector import lower
from kivi.passes.vector_target import TARGETS
from tests.cpu_backend.conform import runs_on
from tests.ir.foreign import FOREIGN


def load(lowered: Kernel, target: str) -> Launch:
    return Launch(printed(lowered), compiler.machine(target))


@runs_on
@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda f: f.name)
def test_foreign_kernels_run(foreign, target):
    module = foreign.module()
    clean(module)
    arguments = foreign.make()
    load(lower(Kernel(foreign.name, module, [], list(arguments)), TARGETS[target]), target)(foreign.grid, list(arguments.values()))
    if foreign.exact:
        assert np.array_equal(arguments["o"], foreign.expected(arguments))
    else:
        np.testing.assert_allclose(arguments["o"], foreign.expected(arguments), rtol=2e-6)


def test_signatures_name_types():
    module = lower(Kernel("strided_copy", FOREIGN[2].module(), [], []), TARGETS["x86-64"]).module
    assert emit.signature(module, "strided_copy") == {"x": "*i16", "o": "*i16", "stride": "i64", "n": "i64"}


def test_an_unknown_operation_is_named():
    module = parse("func.func @k(%n: i32) {\n%x = arith.constant 1.0 : f32\n%a = math.sin %x : f32\nfunc.return\n}", Tile, Vec)
    with pytest.raises(UnknownOperationError, match=r"math\.sin"):
        emit.emit(module)


def test_values_that_change_places_in_a_loop():
    text = """
    func.func @fibonacci(%o: !tile.ptr<i32>, %n: i32) {
      %zero = arith.constant 0 : i32
      %one = arith.constant 1 : i32
      %a, %b = scf.for %i = %zero to %n step %one iter_args(%x = %zero, %y = %one) -> (i32, i32) : i32 {
        %z = arith.addi %x, %y : i32
        scf.yield %y, %z : i32, i32
      }
      vec.store %a, %o[%zero] : i32, !tile.ptr<i32>, i32
      vec.store %b, %o[%one] : i32, !tile.ptr<i32>, i32
      func.return
    }"""
    o = np.zeros(2, np.int32)
    load(Kernel("fibonacci", parse(text, Tile, Vec), [], []), compiler.host().target)((1,), [o, 10])
    assert o.tolist() == [55, 89]


def test_a_wide_lookup_and_bad_text_are_refused():
    text = (
        "func.func @k(%p: !tile.ptr<f32>, %n: i32) {\n%t = vec.load %p[%n] : !tile.ptr<f32>, i32 -> vector<16xf32>\n"
        "%i = vec.iota : vector<32xi32>\n%x = vec.lookup %t, %i : vector<16xf32>, vector<32xi32> -> vector<32xf32>\nfunc.return\n}"
    )
    with pytest.raises(UnknownOperationError, match="at most 16 lanes, not 32"):
        emit.emit(parse(text, Tile, Vec))
    with pytest.raises(BackendError, match="refuses a generated kernel"):
        compiler.optimized("define void @k() { ret i32 }", compiler.host())
    with pytest.raises(InputError, match="x86-64-v9"):
        compiler.machine("x86-64-v9")


# -- functions and formats, on every instruction set that is here ---------------------------------------------------------


def elementwise(f, target: str, x: np.ndarray, out_type=f32, in_type=f32) -> np.ndarray:
    """f of every element of x, whose size is a multiple of 1024."""
    width, block = TARGETS[target].lanes, 1024

    def body(x, o):
        base = program_id(0).to(vector_numbers.i32) * block
        for i in range(0, block, width):
            o.store(base + i, f(x.load(base + i, width), TARGETS[target]))
        iota(width)

    module = kernel("f", {"x": PtrType(in_type), "o": PtrType(out_type)}, body)
    out = np.zeros(x.shape, np.float32 if out_type == f32 else np.int16)
    load(Kernel("f", module, [], []), target)((math.prod(x.shape) // block,), [x, out])
    return out


def ulp(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    spacing = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return np.abs(got.astype(np.float64) - exact) / spacing


@runs_on
def test_powers_of_two(target):
    rng = np.random.default_rng(0)
    x = np.concatenate([-rng.uniform(0, 126, 1 << 18), -np.exp2(rng.uniform(-40, 6, 1 << 18))]).astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    assert ulp(elementwise(vector_math.exp2_below_one, target, x), exact).max() < 2.0
    wide = np.concatenate([x, -x]).astype(np.float32)
    assert ulp(elementwise(vector_math.exp2, target, wide), np.exp2(wide.astype(np.float64))).max() < 2.0
    special = np.resize(np.array([0, -0.0, -np.inf, -127, np.nan, -1e30], np.float32), 1024)
    assert np.array_equal(elementwise(vector_math.exp2_below_one, target, special)[:6], [1, 1, 0, 0, np.nan, 0], equal_nan=True)
    special = np.resize(np.array([-np.inf, np.inf, np.nan, 128, -149, -150.5, 127.5], np.float32), 1024)
    with np.errstate(over="ignore"):
        expected = np.exp2(special[:7].astype(np.float64)).astype(np.float32)
    assert np.allclose(elementwise(vector_math.exp2, target, special)[:7], expected, rtol=2e-7, equal_nan=True)


@runs_on
def test_exponentials_logarithms_and_integers(target):
    rng = np.random.default_rng(1)
    x = rng.uniform(-87, 88, 1 << 18).astype(np.float32)
    assert ulp(elementwise(vector_math.exp, target, x), np.exp(x.astype(np.float64))).max() < 3.0
    y = np.exp2(rng.uniform(-149, 127, 1 << 18)).astype(np.float32)
    got, exact = elementwise(vector_math.log2, target, y), np.log2(y.astype(np.float64))
    assert (np.abs(got - exact) < 3e-7 * np.maximum(np.abs(exact), 1.0)).all()
    special = np.resize(np.array([0.0, -1.0, np.inf, np.nan, 1.0], np.float32), 1024)
    expected = [-np.inf, np.nan, np.inf, np.nan, 0.0]
    assert np.array_equal(elementwise(vector_math.log2, target, special)[:5], expected, equal_nan=True)
    z = np.concatenate([rng.uniform(-1e7, 1e7, 1024), np.arange(-512, 512) + 0.5]).astype(np.float32)
    assert elementwise(vector_math.round_even, target, z).tobytes() == np.rint(z).tobytes()


@runs_on
def test_half_precision(target):
    """All bits of float16 both ways, by instructions or by integers; ties, subnormals, infinities and NaN."""
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
    half = bits.view(np.float16)
    wide = elementwise(lambda x, t: vector_numbers.half_to_float(x), target, bits, in_type=i16)
    assert np.array_equal(wide, half.astype(np.float32), equal_nan=True)
    number = half[np.isfinite(half)].astype(np.float32)
    between = (number[:-1] + number[1:]) / 2
    x = np.concatenate([number, between, np.nextafter(between, 0), np.nextafter(between, np.float32(np.inf))])
    x = np.resize(np.concatenate([x, [65519.9, 65520.0, 1e30, -1e30, np.inf]]).astype(np.float32), len(x) // 1024 * 1024 + 1024)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    got = elementwise(lambda x, t: vector_numbers.float_to_half(x), target, x, out_type=i16).view(np.float16)
    assert got.tobytes() == expected.tobytes()
    nan = np.full(1024, np.nan, np.float32)
    assert np.isnan(elementwise(lambda x, t: vector_numbers.float_to_half(x), target, nan, out_type=i16).view(np.float16)).all()
    brain = elementwise(lambda x, t: vector_numbers.rounded_to_bfloat16(x), target, x)
    assert brain.tobytes() == x.astype(ml_dtypes.bfloat16).astype(np.float32).tobytes()


def test_kernels_take_no_lock():
    """ctypes drops Python's lock around functions of this kind, and keeps it around those of `PyDLL`."""
    from kivi.backends.cpu.kernels import ENTRY

    assert not ENTRY._flags_ & ctypes._FUNCFLAG_PYTHONAPI
