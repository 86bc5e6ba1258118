"""The C printer prints the dialect: its text, foreign kernels that run under the shim in every order, and an unknown operation named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kivi.backends.cupy.shim import ShimKernel
from kivi.emit import c
from kivi.ir.interp.tile import UnknownOperationError
from kivi.ir.simt import Simt
from kivi.ir.tile import Tile
from kivi.ir.xdsl import parse
from kivi.passes.tile_to_simt import lower
from tests.ir.foreign import FOREIGN
from tests.simt.interpreted import ORDERS

GOLDEN = Path(__file__).parent / "golden"


def on_shim(module, name, threads) -> ShimKernel:
    return ShimKernel(name, c.emit(module, c.CUDA), c.signature(module, name), threads)


@pytest.mark.parametrize("threads", [32, 128])
@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda f: f.name)
def test_foreign_kernels_run(foreign, threads):
    kernel = on_shim(lower(foreign.module(), threads), foreign.name, threads)
    for order in ORDERS:
        arguments = foreign.make()
        kernel(foreign.grid, list(arguments.values()), order)
        if foreign.exact:
            assert np.array_equal(arguments["o"], foreign.expected(arguments))
        else:
            np.testing.assert_allclose(arguments["o"], foreign.expected(arguments), rtol=2e-6)


@pytest.mark.parametrize("name", ["prefix_minimum", "row_softmax", "row_totals", "strided_copy"])
def test_golden_text(name):
    module = lower(next(f for f in FOREIGN if f.name == name).module(), 32)
    assert c.emit(module, c.CUDA) == (GOLDEN / f"{name}.cu").read_text()


def test_signatures_name_types():
    assert c.signature(lower(FOREIGN[2].module(), 32), "strided_copy") == {"x": "*i16", "o": "*i16", "stride": "i64", "n": "i64"}


def kernel_of(text: str, arguments: str):
    return parse(
        f"func.func @k({arguments}) attributes {{simt.threads = 32 : i64}} {{\n%t = simt.thread_id\n{text}\nfunc.return\n}}", Tile, Simt
    )


def test_an_unknown_operation_is_named():
    module = kernel_of("%x = arith.constant 1.0 : f32\n%a = math.sin %x : f32", "%n: i32")
    with pytest.raises(UnknownOperationError, match=r"math\.sin"):
        c.emit(module, c.CUDA)


def test_what_may_be_fused_is_what_says_so():
    text = "%a = arith.mulf %x, %x : f32\n%b = arith.mulf %x, %x fastmath<contract> : f32\n%c = arith.divf %a, %b : f32"
    lines = c.emit(kernel_of(text, "%x: f32"), c.CUDA).splitlines()
    assert [line.strip() for line in lines[-4:-1]] == ["float a = __fmul_rn(x, x);", "float b = x * x;", "float c = __fdiv_rn(a, b);"]


#: Operation -> (type, text of its result %r for operands %a and %b).
INTEGERS = {
    "addi": lambda a, b: a + b,
    "subi": lambda a, b: a - b,
    "muli": lambda a, b: a * b,
    "divui": lambda a, b: a // b,
    "remui": lambda a, b: a % b,
    "andi": lambda a, b: a & b,
    "ori": lambda a, b: a | b,
    "xori": lambda a, b: a ^ b,
}


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_wrap(name, bits):
    """At the edges of every width, where C promotes and overflows."""
    edges = [1, 2, 3, (1 << (bits - 1)) - 1, 1 << (bits - 1), (1 << bits) - 1, (1 << bits) - 2]
    pairs = [(a, b) for a in edges for b in edges][:32]
    t = f"i{bits}"
    text = f"%a = simt.load %x[%t] : !tile.ptr<{t}>, i32 -> {t}\n%b = simt.load %y[%t] : !tile.ptr<{t}>, i32 -> {t}\n"
    text += f"%r = arith.{name} %a, %b : {t}\nsimt.store %r, %o[%t] : {t}, !tile.ptr<{t}>, i32"
    module = kernel_of(text, ", ".join(f"%{n}: !tile.ptr<{t}>" for n in "xyo"))
    x, y = (np.array(side, f"uint{bits}") for side in zip(*pairs, strict=True))
    out = np.zeros(32, f"uint{bits}")
    on_shim(module, "k", 32)((1,), [x, y, out])
    expected = [INTEGERS[name](a, b) % (1 << bits) for a, b in pairs]
    assert out.tolist() == expected


def test_half_is_rounded_half_to_even():
    """Every half widened, and numbers around every tie narrowed, as NumPy does."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    wide = every.astype(np.float32)
    with np.errstate(all="ignore"):
        ties = ((wide[:-1].astype(np.float64) + wide[1:]) / 2).astype(np.float32)
        around = np.concatenate(
            [ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf)), [65519.0, 65520.0, 1e30]]
        )
        around = around.astype(np.float32)
        narrow = around.astype(np.float16)
    text = (
        "%b = simt.block_id 0\n%s = arith.constant 32 : i32\n%f = arith.muli %b, %s : i32\n%i = arith.addi %f, %t : i32\n"
        "%in = arith.cmpi slt, %i, %n : i32\n%z = arith.constant 0.0 : FROM\n"
        "%a = simt.load %x[%i] mask %in other %z : FROM : !tile.ptr<FROM>, i32 -> FROM\n%r = arith.OP %a : FROM to TO\n"
        "scf.if %in {\nsimt.store %r, %o[%i] : TO, !tile.ptr<TO>, i32\n}"
    )
    for source, target, op, x, want in (("f16", "f32", "extf", every, wide), ("f32", "f16", "truncf", around, narrow)):
        given = text.replace("FROM", source).replace("TO", target).replace("OP", op)
        out = np.zeros(len(x), want.dtype)
        module = kernel_of(given, f"%x: !tile.ptr<{source}>, %o: !tile.ptr<{target}>, %n: i32")
        on_shim(module, "k", 32)((-(-len(x) // 32),), [x, out, len(x)])
        real = ~np.isnan(want)
        assert np.array_equal(out.view(f"u{out.itemsize}")[real], want.view(f"u{out.itemsize}")[real])
        assert np.isnan(out[~real]).all()


#: Carried values that change places: one read after it was overwritten would be wrong. The result is Fibonacci's, and 1 in the branch.
FIBONACCI = """
%zero = arith.constant 0 : i32
%one = arith.constant 1 : i32
%a, %b = scf.for %i = %zero to %n step %one iter_args(%x = %zero, %y = %one) -> (i32, i32) : i32 {
  %z = arith.addi %x, %y : i32
  scf.yield %y, %z : i32, i32
}
%c, %d = scf.for %i = %zero to %one step %one iter_args(%x = %a, %y = %b) -> (i32, i32) : i32 {
  scf.yield %y, %x : i32, i32
}
%first = arith.cmpi eq, %t, %zero : i32
%e = scf.if %first -> (i32) {
  scf.yield %d : i32
} else {
  scf.yield %c : i32
}
simt.store %e, %o[%t] : i32, !tile.ptr<i32>, i32
"""


def test_values_that_change_places_in_a_loop():
    o = np.zeros(32, np.int32)
    on_shim(kernel_of(FIBONACCI, "%o: !tile.ptr<i32>, %n: i32"), "k", 32)((1,), [o, 10])
    assert o.tolist() == [55] + [89] * 31
