"""The thread shim: orders of threads show a missing barrier, what would hang is reported, and kernels have no undefined behaviour."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import kivi
from kivi import plugins
from kivi.backends.cupy import shim
from kivi.backends.cupy.shim import ShimError, ShimKernel
from kivi.emit import c
from kivi.errors import BackendError, BackendUnavailableError, InputError
from kivi.ir.simt import BarrierOp, ShuffleOp
from kivi.ir.xdsl import IntegerAttr, i64
from kivi.passes.tile_to_simt import lower
from tests.ir.foreign import FOREIGN
from tests.simt.interpreted import ORDERS
from tests.simt.test_mutants import SCAN, SOFTMAX, ops_of, without_barriers


def run(foreign, module, order="ascending", threads=64):
    arguments = foreign.make()
    kernel = ShimKernel(foreign.name, c.emit(module, c.CUDA), c.signature(module, foreign.name), threads)
    kernel(foreign.grid, list(arguments.values()), order, seed=5)
    return np.allclose(arguments["o"], foreign.expected(arguments), rtol=2e-6, atol=0)


@pytest.mark.parametrize(("foreign", "spare"), [(SOFTMAX, 0), (SCAN, 2)], ids=lambda f: getattr(f, "name", ""))
def test_a_missing_barrier_shows_in_some_order(foreign, spare):
    """Of the scan's three one shows: the others guard reads of threads that do not use what they read, which the interpreter tells."""
    whole = lower(foreign.module(), 64)
    alive = [all(run(foreign, module, order) for order in ORDERS) for module in without_barriers(whole)]
    assert sum(alive) == spare


def test_a_wrong_shuffle():
    whole = lower(SOFTMAX.module(), 64)
    for what, value in (("mask", 0xFFFF), ("offset", 1)):
        module = whole.clone()
        ops_of(module, ShuffleOp)[-2].properties[what] = IntegerAttr(value, i64)
        if what == "offset":
            assert not run(SOFTMAX, module)
        else:
            with pytest.raises(ShimError, match="kernel 'row_softmax': a shuffle of all threads of a warp has the mask 0xffff"):
                run(SOFTMAX, module)


DIVERGENT = """
extern "C" __global__ void k(int *o) {
    __shared__ int s[64];
    s[threadIdx.x] = 1;
    if (threadIdx.x < 40) WAIT;
    o[threadIdx.x] = s[63 - threadIdx.x];
}
"""


@pytest.mark.parametrize(("wait", "what"), [("__syncthreads()", "barrier"), ("s[0] = __shfl_xor_sync(~0u, s[0], 1, 32)", "shuffle")])
def test_threads_that_do_not_meet(wait, what):
    kernel = ShimKernel("k", DIVERGENT.replace("WAIT", wait), {"o": "*i32"}, 64)
    for _ in range(2):  # the threads that were left behind do not disturb the next launch
        with pytest.raises(ShimError, match=f"of block \\(0, 0, 0\\) do not reach the same {what}"):
            kernel((1,), [np.zeros(64, np.int32)])
    o = np.zeros(64, np.int32)
    ShimKernel("k", DIVERGENT.replace("WAIT", "(void)0"), {"o": "*i32"}, 64)((1,), [o], "descending")
    assert o.sum() > 0


def test_bad_requests():
    with pytest.raises(BackendError, match="nonsense"):
        ShimKernel("k", 'extern "C" __global__ void k(int *o) { nonsense; }', {"o": "*i32"}, 32)
    kernel = ShimKernel("k", 'extern "C" __global__ void k(int *o) { o[threadIdx.x] = 1; }', {"o": "*i32"}, 32)
    with pytest.raises(InputError, match="sideways"):
        kernel((1,), [np.zeros(32, np.int32)], "sideways")


def test_no_compiler_is_a_reason(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shim.shutil, "which", lambda name: None)
    monkeypatch.setattr(shim.importlib.util, "find_spec", lambda name: None)
    found = plugins.driver("cupy").probe("shim", "cpu")
    assert not found.available
    assert "pip install ziglang" in found.reason
    with pytest.raises(BackendUnavailableError, match="ziglang"):
        kivi.get_backend("cupy", mode="shim")


def test_the_compiler_of_ziglang_is_taken_where_there_is_no_other(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shim.shutil, "which", lambda name: None)
    assert shim.compiler() == [sys.executable, "-m", "ziglang", "c++"]


STEP = """
import numpy as np
import kivi
rng = np.random.default_rng(0)
for bits, dtype in ((2, "float16"), (3, "bfloat16"), (8, "float32")):
    spec = kivi.load_spec("teaching").override({"key.bits": bits, "value.bits": bits})
    cache = kivi.KVCache(spec, batch=2, q_heads=4, kv_heads=2, head_dim=20, dtype=dtype, backend="cupy", mode="shim")
    x = lambda h, n: rng.standard_normal((2, h, n, 20)).astype(kivi.dtypes.np_dtype(dtype))
    for n in (9, 1, 5):
        cache.attend(x(4, n), x(2, n), x(2, n), counts=[n, n - 1])
    cache.sealed(0)["key"][0][1].repack("bytes_lsb").dequantize()
print("done")
"""


def sanitized(code: str):
    env = {**os.environ, "KIVI_SHIM_SANITIZE": "1", "KIVI_SHIM_ORDER": "random"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


def test_kernels_have_no_undefined_behaviour():
    done = sanitized(STEP)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_undefined_behaviour_ends_the_process():
    """The sanitizer is on: a shift by the width, which no kernel has."""
    code = """
import numpy as np
from kivi.backends.cupy.shim import ShimKernel
text = 'extern "C" __global__ void k(unsigned *o, unsigned n) { o[threadIdx.x] = 1u << n; }'
ShimKernel("k", text, {"o": "*i32", "n": "i32"}, 32, sanitize=True)((1,), [np.zeros(32, np.int32), 32])
"""
    done = sanitized(code)
    assert done.returncode != 0
    assert "shift exponent 32 is too large" in done.stderr


def test_foreign_kernels_name_their_barriers():
    assert [len(ops_of(lower(f.module(), 32), BarrierOp)) for f in FOREIGN] == [2, 3, 0, 2, 2]


def test_no_device_is_a_reason():
    found = plugins.driver("cupy").probe("device", "cuda:0")
    assert found.available == bool(found.devices)
    assert found.available or "sees no CUDA device" in found.reason
