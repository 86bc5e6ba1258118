"""Measuring which backend is fastest at a shape: what `kivi tune` does, and what `kivi.ranks` keeps.

Every backend that can serve the shape decodes from a cache of that length. They take turns, round by round, so that whatever else the
machine does falls on all alike, and the medians are compared. One that is far slower than the best after two rounds is not run again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kivi import plugins, ranks, selection
from kivi.cache import KVCache
from kivi.dtypes import np_dtype
from kivi.errors import UnsupportedError
from kivi.geometry import Geometry, geometry, positive
from kivi.reasons import Rejected
from kivi.spec import CacheSpec, load_spec

ROUNDS = 7
HOPELESS = 8.0  # times the fastest, after two rounds
CHUNK = 2048  # tokens appended at once


def tune(
    spec: CacheSpec | str,
    device: str = "auto",
    head_dim: int = 128,
    q_heads: int = 32,
    kv_heads: int = 8,
    dtype: str = "float16",
    batch: int = 1,
    tokens: int = selection.TOKENS,
    value_head_dim: int | None = None,
    rounds: int = ROUNDS,
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[ranks.Bucket, ranks.Record, list[Rejected]]:
    """Measure a decode step on all backends that can serve this shape in mode "device", and keep the ranking for its bucket. The others
    come back with their reasons.

    A step appends one token a request and attends to `tokens` others; its output is read back, so the figure includes all that a step waits
    for. Each backend is self-checked before. Raises `UnsupportedError` if no backend can serve the shape.
    """
    spec, rounds = load_spec(spec), positive(rounds, "rounds")
    g = geometry(q_heads, kv_heads, head_dim, value_head_dim, dtype, None, None, None)
    where = ranks.bucket(g, positive(tokens, "tokens"), positive(batch, "batch"))
    ready, rejected = selection.ready(spec, g, device)
    if not ready:
        reasons = "; ".join(f"{r.name}: {r.reason}" for r in rejected)
        raise UnsupportedError(f"no backend can serve spec {spec.name!r} at {where}: {reasons}")
    steps: dict[str, tuple[ranks.Contender, Callable[[], float]]] = {}
    for contender in ready:
        progress(f"{contender.backend}: filling {tokens} tokens")
        steps[contender.backend] = contender, _step(contender, spec, g, batch, tokens)
    times: dict[str, list[float]] = {name: [] for name in steps}
    running = list(steps)
    for i in range(rounds):
        progress(f"round {i + 1} of {rounds}: {', '.join(running)}")
        for name in running:
            times[name].append(steps[name][1]())
        if i == 1:
            fastest = {name: min(t) for name, t in times.items()}
            running = [name for name in running if fastest[name] <= HOPELESS * min(fastest.values())]
    measured = [
        ranks.Measured(name, c.mode, c.device.device, statistics.median(times[name]), len(times[name]), ranks.identity(c))
        for name, (c, _) in steps.items()
    ]
    return where, ranks.write(spec, where, tokens, measured), rejected


def _step(contender: ranks.Contender, spec: CacheSpec, g: Geometry, batch: int, tokens: int) -> Callable[[], float]:
    """Seconds of one decode step on a cache of `tokens` tokens of this contender. Kernels are compiled, and the first step is over."""
    manifest = plugins.get(contender.backend).manifest
    backend: Any = plugins.create(plugins.driver(contender.backend), manifest, contender.mode, contender.device.device)
    cache = KVCache(
        spec,
        batch=batch,
        q_heads=g.q_heads,
        kv_heads=g.kv_heads,
        head_dim=g.head_dim,
        value_head_dim=g.value_head_dim,
        dtype=g.dtype,
        backend=backend,
    )
    rng = np.random.default_rng(0)

    def rows(heads: int, n: int, dim: int) -> Any:
        return backend.from_host(rng.standard_normal((batch, heads, n, dim), np.float32).astype(np_dtype(g.dtype)))

    def given(n: int) -> tuple[Any, Any, Any]:
        return rows(g.q_heads, n, g.head_dim), rows(g.kv_heads, n, g.head_dim), rows(g.kv_heads, n, g.value_head_dim)

    # The history is what counts, not the attention of its prefill, whose time would grow with its square. This instance is ours alone.
    backend.attend = lambda reading, q, k, v: v
    try:
        for start in range(0, tokens, CHUNK):
            cache.attend(*given(min(CHUNK, tokens - start)))
    finally:
        del backend.attend
    q, k, v = given(1)

    def step() -> float:
        began = time.perf_counter()
        backend.to_host(cache.attend(q, k, v))
        return time.perf_counter() - began

    for _ in range(2):
        step()
    return step
