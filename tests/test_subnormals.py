"""A thread that flushes subnormal numbers gets the same bits, and goes on as it was."""

from __future__ import annotations

import subprocess
import sys
from queue import Queue

import numpy as np
import pytest
import torch

import kivi
from kivi import subnormals
from kivi.backends.cpu import threads

X = (np.arange(72) * 1e-39).astype(np.float32).reshape(1, 1, 9, 8)


@pytest.fixture
def flushing():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    yield
    torch.set_flush_denormal(False)


def outcome(backend: str, mode: str | None) -> list[bytes]:
    be = kivi.get_backend(backend, mode=mode)
    qt = be.quantize(X, kivi.load_spec("teaching"), "value")
    cache = kivi.KVCache("teaching", batch=1, q_heads=1, kv_heads=1, head_dim=8, dtype="float32", backend=be)
    out = cache.attend(X, X, X)
    sealed = [part.codes().tobytes() for side in ("key", "value") for _, part in cache.sealed(0)[side]]
    return [qt.codes().tobytes(), np.asarray(qt.scale).tobytes(), qt.dequantize().tobytes(), out.tobytes(), *sealed]


@pytest.mark.parametrize(("backend", "mode"), [("reference", None), ("cpu", None), ("onnxruntime", None), ("cupy", "shim")])
def test_bits_do_not_depend_on_the_thread(backend, mode, flushing):
    torch.set_flush_denormal(False)
    expected = outcome(backend, mode)
    assert any(expected[0])
    torch.set_flush_denormal(True)
    assert outcome(backend, mode) == expected
    assert subnormals.flushed()


def test_a_processor_that_is_not_known(flushing, monkeypatch):
    monkeypatch.setattr(subnormals, "PLACES", {})
    with pytest.raises(kivi.errors.BackendError, match=r"set_flush_denormal\(False\)"):
        kivi.get_backend("reference").quantize(X, kivi.load_spec("teaching"), "value")


def test_helper_threads_keep_subnormal_numbers(flushing):
    """A thread begins with the settings of the one that starts it."""
    helper = threads.Helper()
    seen: Queue[bool] = Queue()
    helper.give(lambda: seen.put(subnormals.flushed()))
    assert seen.get(timeout=60) is False
    assert subnormals.flushed()


def test_kivi_is_imported_where_they_are_flushed():
    code = """
import torch; torch.set_flush_denormal(True)
import numpy as np, kivi
from kivi import subnormals
assert subnormals.flushed()
x = (np.arange(8, dtype=np.uint32) << 16).view(np.float32).reshape(1, 1, 1, 8)
assert kivi.get_backend("reference").quantize(x, kivi.load_spec("teaching"), "value").codes().any()
torch.set_flush_denormal(False)
assert not subnormals.flushed()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
