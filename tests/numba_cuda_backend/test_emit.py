"""The Numba CUDA printer prints the dialect: its text, foreign kernels that run in every order, and an unknown operation named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kivi.backends.numba_cuda import emit
from kivi.backends.numba_cuda.simulator import Simulated, SimulatorError
from kivi.errors import InputError
from kivi.ir.interp.tile import UnknownOperationError
from kivi.ir.simt import ShuffleOp
from kivi.ir.xdsl import IntegerAttr, i64
from kivi.passes.tile_to_simt import lower
from tests.cupy_backend.test_emit import FIBONACCI, INTEGERS, kernel_of
from tests.ir.foreign import FOREIGN
from tests.simt.interpreted import ORDERS
from tests.simt.test_mutants import SCAN, SOFTMAX, ops_of, without_barriers

GOLDEN = Path(__file__).parent / "golden"


def simulated(module, name, threads) -> Simulated:
    return Simulated(name, emit.emit(module), emit.signature(module, name), threads)


@pytest.mark.parametrize("threads", [32, 128])
@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda f: f.name)
def test_foreign_kernels_run(foreign, threads):
    kernel = simulated(lower(foreign.module(), threads), foreign.name, threads)
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
    assert emit.emit(module) == (GOLDEN / f"{name}.py.txt").read_text()


def test_an_unknown_operation_is_named():
    module = kernel_of("%x = arith.constant 1.0 : f32\n%a = math.sin %x : f32", "%n: i32")
    with pytest.raises(UnknownOperationError, match=r"math\.sin"):
        emit.emit(module)
    module = kernel_of("%a = simt.shuffle down %t, 2 width 8 mask 4294967295 : i32 -> i32", "%n: i32")
    with pytest.raises(UnknownOperationError, match="down in segments of 8"):
        emit.emit(module)


def test_what_may_be_fused_is_what_says_so():
    text = "%a = arith.mulf %x, %x : f32\n%b = arith.mulf %x, %x fastmath<contract> : f32\n%c = arith.divf %a, %b : f32"
    lines = [line.strip() for line in emit.emit(kernel_of(text, "%x: f32")).splitlines()]
    assert lines[-3:] == ["a = libdevice.fmul_rn(x, x)", "b = x * x", "c = libdevice.fdiv_rn(a, b)"]


def test_kernels_of_other_types_have_other_texts():
    """A cache by text may not take one for the other."""
    text = "%v = simt.load %x[%t] : !tile.ptr<T>, i32 -> T\nsimt.store %v, %o[%t] : T, !tile.ptr<T>, i32"
    texts = {emit.emit(kernel_of(text.replace("T", t), f"%x: !tile.ptr<{t}>, %o: !tile.ptr<{t}>")) for t in ("i8", "i16", "i32", "f32")}
    assert len(texts) == 4


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_wrap(name, bits):
    edges = [1, 2, 3, (1 << (bits - 1)) - 1, 1 << (bits - 1), (1 << bits) - 1, (1 << bits) - 2]
    pairs = [(a, b) for a in edges for b in edges][:32]
    t = f"i{bits}"
    text = f"%a = simt.load %x[%t] : !tile.ptr<{t}>, i32 -> {t}\n%b = simt.load %y[%t] : !tile.ptr<{t}>, i32 -> {t}\n"
    text += f"%r = arith.{name} %a, %b : {t}\nsimt.store %r, %o[%t] : {t}, !tile.ptr<{t}>, i32"
    module = kernel_of(text, ", ".join(f"%{n}: !tile.ptr<{t}>" for n in "xyo"))
    x, y = (np.array(side, f"uint{bits}") for side in zip(*pairs, strict=True))
    out = np.zeros(32, f"uint{bits}")
    simulated(module, "k", 32)((1,), [x, y, out])
    assert out.tolist() == [INTEGERS[name](a, b) % (1 << bits) for a, b in pairs]


def test_values_that_change_places_in_a_loop():
    o = np.zeros(32, np.int32)
    simulated(kernel_of(FIBONACCI, "%o: !tile.ptr<i32>, %n: i32"), "k", 32)((1,), [o, 10])
    assert o.tolist() == [55] + [89] * 31


# -- mutants ----------------------------------------------------------------------------------------------------------


def survives(foreign, module, order="ascending"):
    arguments = foreign.make()
    try:
        simulated(module, foreign.name, 64)(foreign.grid, list(arguments.values()), order, seed=5)
    except SimulatorError:
        return False
    return np.allclose(arguments["o"], foreign.expected(arguments), rtol=2e-6, atol=0)


@pytest.mark.parametrize(("foreign", "spare"), [(SOFTMAX, 0), (SCAN, 2)], ids=lambda f: getattr(f, "name", ""))
def test_a_missing_barrier_shows_in_some_order(foreign, spare):
    """Of the scan's three one shows: the others guard reads of threads that do not use what they read."""
    whole = lower(foreign.module(), 64)
    assert all(survives(foreign, whole, order) for order in ORDERS)
    alive = [all(survives(foreign, module, order) for order in ORDERS) for module in without_barriers(whole)]
    assert sum(alive) == spare


@pytest.mark.parametrize(("what", "value"), [("mask", 0xFFFF), ("offset", 1)])
def test_a_wrong_shuffle(what, value):
    module = lower(SOFTMAX.module(), 64)
    ops_of(module, ShuffleOp)[-2].properties[what] = IntegerAttr(value, i64)
    assert not survives(SOFTMAX, module)


DIVERGENT = """
from numba import cuda, uint32

def k(o):
    t = cuda.threadIdx.x
    if t < 40:
        WAIT
    o[t] = 1
"""


@pytest.mark.parametrize(("wait", "what"), [("cuda.syncthreads()", "barrier"), ("t = cuda.shfl_xor_sync(0xFFFFFFFF, t, 1)", "shuffle")])
def test_threads_that_do_not_meet(wait, what):
    kernel = Simulated("k", DIVERGENT.replace("WAIT", wait), {"o": "*i32"}, 64)
    with pytest.raises(SimulatorError, match=f"kernel 'k': thread 40 does not reach the {what}"):
        kernel((1,), [np.zeros(64, np.int32)])


def test_an_access_outside():
    kernel = Simulated("k", DIVERGENT.replace("WAIT", "pass"), {"o": "*i32"}, 64)
    with pytest.raises(SimulatorError, match=r"block \(0, 0, 0\): outside its arrays"):
        kernel((1,), [np.zeros(63, np.int32)])
    with pytest.raises(InputError, match="sideways"):
        kernel((1,), [np.zeros(64, np.int32)], "sideways")
