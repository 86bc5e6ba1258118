"""Whole steps of one layer: append, attention, and the seals that come due, amortized over a period of R steps.

Copies of a history take turns, and copy j of n starts j R/n tokens further on than the first. So R steps, R/n of each copy, meet every
phase between two seals once, whatever n is: their mean is the amortized step. NAME append is the same without attention, by the general
path of the library.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from kivi.bench import caches, machine, peers
from kivi.bench.plan import Plan
from kivi.bench.result import Shape, Stat, StepRun, StepTiming
from kivi.bench.timing import clock_for
from kivi.spec import CacheSpec

PERIOD = 128  # steps: R of the presets, and the residual length of the quantized caches of transformers
WARM = 2  # steps of each copy before the first that counts, so that it is under way as in a long run
TURN = 8  # steps of one contender before the next one has its turn
BASELINE = "DynamicCache"


@dataclass(frozen=True)
class Stepper:
    """A contender: its copies as calls that do one step, and the bytes that it stores for one history."""

    name: str
    copies: Sequence[Callable[[], Any]]
    bytes: int


def measure(shape: Shape, threads: int, plan: Plan) -> StepRun:
    """All contenders of one shape; in every round each does TURN steps."""
    with machine.using(threads), torch.inference_mode():
        steppers = [s for spec in plan.specs for s in own(spec, shape, plan)] + list(others(shape, plan))
        clock, read = clock_for(threads), machine.reader()
        times: dict[str, list[float]] = {name: [] for name in ("read", *(s.name for s in steppers))}
        for first in range(0, PERIOD, TURN):
            start = clock()
            read.run(first)
            times["read"].append(clock() - start)
            for s in steppers:
                for i in range(first, first + TURN):
                    step = s.copies[i % len(s.copies)]
                    start = clock()
                    step()
                    times[s.name].append(clock() - start)
    rate = read.bytes / Stat.of(times["read"]).median
    mean = {name: sum(t) / len(t) for name, t in times.items()}
    timings = [
        StepTiming(s.name, mean[s.name], Stat.of(times[s.name]), max(times[s.name]), s.bytes, len(s.copies), s.bytes / mean[s.name] / rate)
        for s in steppers
    ]
    mine = [spec.name for spec in plan.specs]
    speedup = {name: mean[BASELINE] / mean[name] for name in mine} if BASELINE in mean else {}
    return StepRun(shape, threads, clock.__name__, rate, timings, speedup)


def turns(bytes_of_one: int) -> int:
    """How many copies take turns: enough to exceed the caches, a divisor of PERIOD, so PERIOD at most."""
    return next(n for n in (1, 2, 4, 8, 16, 32, 64, PERIOD) if n >= machine.copies(bytes_of_one) or n == PERIOD)


def own(spec: CacheSpec, shape: Shape, plan: Plan) -> Iterator[Stepper]:
    """Steps of a spec, and its appends and seals alone."""
    one = caches.filled(spec, shape, plan.backend, plan.dtype, shape.tokens - WARM)
    count, stored = turns(one.nbytes), caches.packed_bytes(one) + caches.floating_bytes(one)
    given = caches.rows(shape, 1, plan.dtype, seed=1)
    native = [plan.backend.adopt(x, "q, k or v") for x in given]
    for name in (spec.name, f"{spec.name} append"):
        held = caches.several(copy.deepcopy(one), count)
        for j, cache in enumerate(held):
            caches.grow(cache, shape, j * PERIOD // count)
            for _ in range(WARM):
                cache.attend(*given)
        if name == spec.name:
            yield Stepper(name, [partial(cache.attend, *given) for cache in held], stored)
        else:
            yield Stepper(name, [partial(_append, cache, *native[1:]) for cache in held], stored)


def _append(cache: Any, k: Any, v: Any) -> None:
    state, one = cache._state, np.ones(cache.batch, np.int64)
    cache._state = cache._grow(state, state.tokens + one, one, k, v)


def others(shape: Shape, plan: Plan) -> Iterator[Stepper]:
    """The caches of transformers with torch's attention behind them, as far as they are installed and work."""
    reason = peers.why_missing("transformers")
    if reason:
        for name in (BASELINE, *(peers.quantized_name(p) for p in peers.QUANTIZED)):
            plan.note("step", name, shape, reason)
        return
    from transformers import LlamaConfig

    config = LlamaConfig(num_hidden_layers=1)
    full = shape.batch * shape.kv_heads * shape.tokens * shape.head_dim
    for name, make in peers.caches(config).items():
        floating = 2 * full * getattr(torch, plan.dtype).itemsize  # what every one of them writes in a step, the quantized ones too
        stored, count = floating if name == BASELINE else _quantized_bytes(full), turns(floating)
        reason = peers.why_missing(peers.package_of(name)) or peers.why_too_large((count + 2) * floating)
        if reason:
            plan.note("step", name, shape, reason)
            continue
        try:
            held = list(_filled(make, shape, plan.dtype, count))
        except Exception as error:  # whatever a peer's packages say
            plan.note("step", name, shape, f"{type(error).__name__}: {error}")
            continue
        q, k, v = caches.rows(shape, 1, plan.dtype, seed=1)
        q = q.reshape(shape.batch, shape.kv_heads, -1, shape.head_dim)
        yield Stepper(name, [partial(_step, cache, q, k, v) for cache in held], stored)


def _quantized_bytes(elements: int) -> int:
    """Bytes of keys and values, of `elements` each, with two float32 numbers a group."""
    return 2 * elements * peers.BITS // 8 + 2 * elements // peers.GROUP * 8


def _filled(make: Callable[[], Any], shape: Shape, dtype: str, count: int) -> Iterator[Any]:
    """Copies of a cache, each at its phase. transformers quantizes what comes first whole, and then every residual length."""
    _, k, v = caches.rows(shape, min(shape.tokens, caches.CHUNK), dtype)
    times = -(-shape.tokens // k.shape[2])
    k, v = (x.repeat(1, 1, times, 1)[:, :, : shape.tokens].contiguous() for x in (k, v))
    for j in range(count):
        cache = make()
        cache.update(k, v, 0)
        n = j * PERIOD // count
        if n:
            cache.update(k[:, :, :n], v[:, :, :n], 0)
        yield cache


def _step(cache: Any, q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, *cache.update(k, v, 0))
