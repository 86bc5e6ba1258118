"""What a decode step costs the host: one `cache.attend` of one token minus its kernels, over R steps with their seals."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch

from kivi.bench import caches, machine
from kivi.bench.kernel_clock import kernel_clock
from kivi.bench.plan import Plan
from kivi.bench.result import OverheadRun, Stat
from kivi.bench.timing import clock_for
from kivi.errors import UnsupportedError

WARM = 8  # steps before the first that counts


def measure(threads: int, plan: Plan) -> Iterator[OverheadRun]:
    """Each spec with torch tensors and with NumPy arrays."""
    shape, clock = plan.overhead, clock_for(threads)
    for spec in plan.specs:
        for arrays in ("numpy", "torch"):
            with machine.using(threads), torch.inference_mode():
                cache = caches.filled(spec, shape, plan.backend, plan.dtype, shape.tokens)
                tensors = caches.rows(shape, 1, plan.dtype, seed=1)
                try:
                    given: Any = tensors if arrays == "torch" else tuple(plan.backend.to_host(plan.backend.adopt(x, "x")) for x in tensors)
                    with kernel_clock(plan.backend, clock) as kernels:
                        step, inside = [], []
                        for i in range(-WARM, spec.key.residual):
                            kernels.seconds[0], start = 0.0, clock()
                            cache.attend(*given)
                            spent = clock() - start
                            if i >= 0:
                                step.append(spent)
                                inside.append(kernels.seconds[0])
                except UnsupportedError as error:
                    plan.note("overhead", spec.name, shape, str(error))
                    continue
            if not statistics.median(inside):
                plan.note("overhead", spec.name, shape, f"no kernel passed the boundary {kernels.boundary}; its hook is out of date")
                continue
            host = [a - b for a, b in zip(step, inside, strict=True)]
            yield OverheadRun(
                spec.name, shape, threads, clock.__name__, arrays, kernels.boundary, Stat.of(step), Stat.of(inside), Stat.of(host)
            )
