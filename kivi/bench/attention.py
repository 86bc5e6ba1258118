"""Attention of one decode step over a long history.

Three contenders for each spec. NAME is a decode step, `cache.attend` of one token, which also appends it and seals a value; NAME attention
is the backend's attention by itself, called from its general path, which is what torch's attention does; NAME resident is the same on one
page that stays in the first cache, whose time is what the arithmetic costs without memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kivi.bench import caches, machine, peers
from kivi.bench.plan import Plan
from kivi.bench.result import AttentionRun, Roofline, Shape, Stat, Timing
from kivi.bench.timing import Call, clock_for, interleaved
from kivi.spec import CacheSpec

HALF_BLOCK = 64  # tokens beyond the sealed ones: what is floating on average


def measure(shape: Shape, threads: int, plan: Plan) -> AttentionRun:
    """All contenders of one shape in one interleaved run."""
    with machine.using(threads), torch.inference_mode():
        sizes: dict[str, tuple[int, int]] = {}
        read = machine.reader()
        calls: list[Call] = []
        for spec in plan.specs:
            made, sizes[spec.name] = contenders(spec, shape, plan)
            calls += made
        calls += peers.attention(shape, shape.tokens + HALF_BLOCK, plan)
        clock = clock_for(threads)
        times = interleaved([read, *calls], clock, plan.budget)
    stats = {name: Stat.of(t) for name, t in times.items()}
    rate = read.bytes / stats["read"].median
    timings = [Timing(c.name, stats[c.name], c.bytes, c.copies, c.bytes / stats[c.name].median / rate) for c in calls]
    sdpa = {name: s.median for name, s in stats.items() if name.startswith("sdpa") and "enable_gqa" not in name}
    baseline = min(sdpa, key=lambda name: sdpa[name]) if sdpa else None
    mine = [name + suffix for name in sizes for suffix in ("", " attention")]
    speedup = {name: sdpa[baseline] / stats[name].median for name in mine} if baseline else {}
    lines = [roofline(name, *bytes_of, rate, stats) for name, bytes_of in sizes.items()]
    return AttentionRun(shape, threads, clock.__name__, rate, baseline, timings, speedup, lines)


def contenders(spec: CacheSpec, shape: Shape, plan: Plan) -> tuple[list[Call], tuple[int, int]]:
    """The three calls of a spec, and the packed and floating bytes that each reads."""
    one = caches.filled(spec, shape, plan.backend, plan.dtype, shape.tokens + HALF_BLOCK)
    held = caches.several(one, machine.copies(one.nbytes))
    packed, floating = caches.packed_bytes(one), caches.floating_bytes(one)
    given = caches.rows(shape, 1, plan.dtype, seed=1)
    native = [plan.backend.adopt(x, "q, k or v") for x in given]
    readings = [caches.reading(cache) for cache in held]  # as they are now: a window keeps the rows that a step leaves behind
    same = caches.resident(one, shape)

    def attend(i: int) -> Any:
        return held[i % len(held)].attend(*given)

    calls = [
        Call(spec.name, attend, packed, len(held)),
        Call(f"{spec.name} attention", lambda i: plan.backend.attend(readings[i % len(readings)], *native), packed, len(held)),
        Call(f"{spec.name} resident", partial(_again, plan.backend, same, native), packed),
    ]
    return calls, (packed, floating)


def _again(backend: Any, reading: Any, native: list[Any], i: int) -> Any:
    return backend.attend(reading, *native)


def roofline(name: str, packed: int, floating: int, rate: float, stats: dict[str, Stat]) -> Roofline:
    """The attention of a spec against this run's read rate and its own rate on resident data."""
    spent = stats[f"{name} attention"].median
    by_bandwidth, by_kernel = packed / rate, stats[f"{name} resident"].median
    return Roofline(
        name,
        packed,
        floating,
        by_bandwidth,
        by_kernel,
        by_bandwidth / spent,
        by_kernel / spent,
        max(by_bandwidth, by_kernel) / spent,
    )
