"""Two processes, one cache folder: the second one runs kernels without the compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys

STEP = """
import json, sys
import numpy as np
import kivi
cache = kivi.KVCache("teaching", batch=1, q_heads=2, kv_heads=1, head_dim=8, dtype="float32", backend=BACKEND, mode=MODE)
rng = np.random.default_rng(0)
outs = [cache.attend(*(rng.standard_normal((1, h, n, 8)).astype(np.float32) for h in (2, 1, 1))) for n in (9, 1, 2)]
print(json.dumps({"loaded": [m for m in ("xdsl", "cupy", "numba", "torch") if m in sys.modules], "sums": [float(o.sum()) for o in outs]}))
"""


def check(backend: str, mode: str, folder) -> None:
    """The first process prints, the second only loads; both give the same numbers. Neither imports a GPU package."""
    code = STEP.replace("BACKEND", repr(backend)).replace("MODE", repr(mode))
    env = {**os.environ, "KIVI_CACHE_DIR": str(folder)}
    runs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout))
    assert runs[0]["loaded"] == ["xdsl"]
    assert runs[1]["loaded"] == []
    assert runs[0]["sums"] == runs[1]["sums"]
