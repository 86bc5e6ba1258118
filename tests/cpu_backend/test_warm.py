"""A warm process runs cached object code: no compiler, no dialects, no Numba."""

from __future__ import annotations

import json

from tests.cpu_backend.conform import python

STEP = """
import json, sys
import numpy as np
import kivi
from kivi.backends.cpu import compile as compiler
cache = kivi.KVCache("kivi-2bit", batch=1, q_heads=2, kv_heads=1, head_dim=64, dtype="float32", backend="cpu")
optimized, compiler.optimized = compiler.optimized, lambda *a: compiled.append(1) or optimized(*a)
compiled = []
rng = np.random.default_rng(0)
outs = [cache.attend(*(rng.standard_normal((1, h, n, 64)).astype(np.float32) for h in (2, 1, 1))) for n in (300, 1, 2)]
names = [n for n in ("xdsl", "numba", "torch") if n in sys.modules]
print(json.dumps({"modules": names, "compiled": len(compiled), "sums": [float(o.sum()) for o in outs]}))
"""


def test_the_second_process_compiles_nothing(tmp_path):
    cold, warm = (json.loads(python(STEP, KIVI_CACHE_DIR=str(tmp_path))) for _ in range(2))
    assert cold["compiled"] > 0
    assert cold["modules"] == ["xdsl"]
    assert (warm["compiled"], warm["modules"]) == (0, [])
    assert warm["sums"] == cold["sums"]


def test_damaged_object_code_is_made_again(tmp_path):
    cold = json.loads(python(STEP, KIVI_CACHE_DIR=str(tmp_path)))
    objects = sorted((tmp_path / "cpu").glob("*.o"))
    objects[0].write_bytes(objects[0].read_bytes()[:-7])
    again = json.loads(python(STEP, KIVI_CACHE_DIR=str(tmp_path)))
    assert again["compiled"] == 1
    assert again["sums"] == cold["sums"]


def test_object_code_is_of_one_processor(tmp_path):
    """Another target has code of its own."""
    json.loads(python(STEP, KIVI_CACHE_DIR=str(tmp_path)))
    other = json.loads(python(STEP, KIVI_CACHE_DIR=str(tmp_path), KIVI_CPU_TARGET="x86-64"))
    assert other["compiled"] > 0
