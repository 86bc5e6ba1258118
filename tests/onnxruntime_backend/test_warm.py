"""A warm process reads models from the disk: no compiler, no dialects, not even `onnx`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

STEP = """
import json, sys
import numpy as np
import kivi
cache = kivi.KVCache("kivi-2bit", batch=1, q_heads=2, kv_heads=1, head_dim=64, dtype="float32", backend="onnxruntime")
rng = np.random.default_rng(0)
outs = [cache.attend(*(rng.standard_normal((1, h, n, 64)).astype(np.float32) for h in (2, 1, 1))) for n in (300, 1, 2)]
key = cache.backend.quantize(rng.standard_normal((1, 1, 64, 64)).astype(np.float32), cache.spec, "key")
outs += [key.dequantize(), key.repack("lanes32").codes()]
names = [n for n in ("xdsl", "onnx", "torch") if n in sys.modules]
print(json.dumps({"modules": names, "sums": [float(o.sum()) for o in outs]}))
"""


def python(code: str, folder) -> dict:
    environment = {**os.environ, "KIVI_CACHE_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_second_process_prints_nothing(tmp_path):
    cold, warm = (python(STEP, tmp_path) for _ in range(2))
    assert cold["modules"] == ["xdsl", "onnx"]
    assert warm["modules"] == []
    assert warm["sums"] == cold["sums"]


def test_a_damaged_model_is_made_again(tmp_path):
    cold = python(STEP, tmp_path)
    entry = sorted((tmp_path / "onnxruntime").glob("*.json"))[0]
    entry.write_text(entry.read_text()[:-99])
    again = python(STEP, tmp_path)
    assert "onnx" in again["modules"]
    assert again["sums"] == cold["sums"]
