"""How long a choice takes in a fresh interpreter: `python benchmarks/select_time.py [RUNS]` prints JSON.

CPU time of the thread that calls `kivi.select`, imports of kivi and NumPy done (NumPy's own threads spin for a while after that): `cold`
in an empty cache folder, children not counted; `warm` in processes that find what the first one found out; `again` at the second call in
one process. The best of several runs is the figure, since the others measure what else the machine was doing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

CODE = """
import json, time
import kivi, kivi.selection
times = []
for _ in range(2):
    start = time.thread_time()
    chosen = kivi.select("kivi-2bit")
    times.append((time.thread_time() - start) * 1e3)
print(json.dumps({"first": times[0], "again": times[1], "backend": chosen.backend.name}))
"""


def one(folder: str) -> dict[str, float]:
    """Figures of one process that keeps what it finds out in `folder`."""
    environment = {**os.environ, "KIVI_CACHE_DIR": folder}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)


def main() -> int:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with tempfile.TemporaryDirectory() as folder:
        cold = one(folder)
        warm = [one(folder) for _ in range(runs)]
    best = {name: round(min(figures[key] for figures in warm), 1) for name, key in (("warm", "first"), ("again", "again"))}
    print(json.dumps({"select_ms": {"cold": round(cold["first"], 1), **best}, "runs": runs, "backend": cold["backend"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
