"""`python -m tests.meta.mutants [PART OF A NAME ...]`: run the quick size against every mutant and print what stopped each."""

from __future__ import annotations

import sys
import time

import pytest

from kivi.conformance import run
from tests.meta.mutants import every, killed_by

if __name__ == "__main__":
    started, excesses, alive = time.perf_counter(), {}, []
    names = [n for n in every() if not sys.argv[1:] or any(part in n for part in sys.argv[1:])]
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            killer = killed_by(every()[name], patch)
        if killer is None:
            alive.append(name)
        elif killer.bound_excess:
            excesses[name] = killer.bound_excess
        print(f"{name:40s} {killer.status + ' ' + killer.id + ': ' + killer.reason[:90] if killer else 'SURVIVED'}")
    seconds = time.perf_counter() - started
    print(f"\n{len(names) - len(alive)} of {len(names)} mutants stopped in {seconds:.0f} s; alive: {', '.join(alive) or 'none'}")
    honest = run("reference").bound
    print(f"largest use of a bound by the reference backend: {honest['largest_use']:.6f}")
    if excesses:
        least = min(excesses, key=excesses.__getitem__)
        print(f"smallest excess of a mutant stopped by a bound: {excesses[least]:.4g} times the bound ({least})")
