"""How long `import kivi` takes in a fresh interpreter: `python benchmarks/import_time.py [RUNS]` prints JSON.

The best of several runs is the figure, since the others measure what else the machine was doing. NumPy's share, which every
user of kivi pays anyway, is measured in the same way and printed beside it. Exit code 1 if kivi takes longer than LIMIT_MS.
"""

from __future__ import annotations

import json
import subprocess
import sys

LIMIT_MS = 150.0


def best_ms(module: str, runs: int) -> float:
    """Milliseconds of the fastest of `runs` imports, each in an interpreter of its own."""
    code = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    return (
        min(float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) for _ in range(runs))
        * 1e3
    )


def main() -> int:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    figures = {module: round(best_ms(module, runs), 1) for module in ("kivi", "numpy")}
    print(json.dumps({"import_ms": figures, "runs": runs, "limit_ms": LIMIT_MS, "python": sys.version.split()[0]}))
    return int(figures["kivi"] > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
