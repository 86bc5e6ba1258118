"""A warm process runs a cached kernel without the compiler, and `import kivi` never needs Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys

STEP = """
import json, sys
import numpy as np
import kivi
cache = kivi.KVCache("teaching", batch=1, q_heads=2, kv_heads=1, head_dim=8, dtype="float32", backend="triton", mode="interpreter")
rng = np.random.default_rng(0)
outs = [cache.attend(*(rng.standard_normal((1, h, n, 8)).astype(np.float32) for h in (2, 1, 1))) for n in (9, 1, 2)]
print(json.dumps({"xdsl": "xdsl" in sys.modules, "ran": cache.ran.mode, "sums": [float(o.sum()) for o in outs]}))
"""


def run(folder, code=STEP):
    env = {**os.environ, "KIVI_CACHE_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_warm_process_imports_no_compiler(tmp_path):
    cold, warm = run(tmp_path), run(tmp_path)
    assert cold["xdsl"]
    assert not warm["xdsl"]
    assert warm["sums"] == cold["sums"]
    assert warm["ran"] == "interpreter"


def test_a_broken_package_is_a_reason(tmp_path):
    """Field report 46: listing backends and using another one works whatever Triton does at import."""
    (tmp_path / "triton.py").write_text("raise RuntimeError('0 active drivers')")
    code = f"""
import json, sys
sys.path.insert(0, {str(tmp_path)!r})
import kivi
reasons = {{i.mode: i.reason for i in kivi.backends() if i.name == "triton"}}
print(json.dumps({{"reasons": reasons, "chosen": kivi.select("kivi-2bit").backend.name}}))
"""
    seen = run(tmp_path, code)
    assert "0 active drivers" in seen["reasons"]["interpreter"]
    assert seen["reasons"]["device"]  # the same, or first of all that there is no driver
    assert seen["chosen"] == "reference"
