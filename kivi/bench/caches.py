"""Caches of kivi with random contents, and views of them for timing attention alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import kivi
from kivi.backend import Backend, Reading
from kivi.bench.result import Shape
from kivi.spec import CacheSpec

CHUNK = 2048  # tokens that are appended at once; their numbers repeat in every chunk


def rows(shape: Shape, n: int, dtype: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [B, Hq, n, D], k and v [B, Hkv, n, D] of n random tokens."""
    generator = torch.Generator().manual_seed(seed)
    heads = (shape.q_heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.randn(shape.batch, h, n, shape.head_dim, generator=generator).to(getattr(torch, dtype)) for h in heads)
    return q, k, v


def filled(spec: CacheSpec, shape: Shape, backend: Backend, dtype: str, tokens: int) -> kivi.KVCache:
    """A cache of `tokens` tokens."""
    cache = kivi.KVCache(
        spec, batch=shape.batch, q_heads=shape.q_heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=dtype, backend=backend
    )
    grow(cache, shape, tokens)
    return cache


def grow(cache: kivi.KVCache, shape: Shape, tokens: int) -> None:
    """Append `tokens` tokens without attending, which would take a time that grows with the square of their number."""
    if not tokens:
        return
    given = rows(shape, min(CHUNK, tokens), cache.geometry.dtype)
    with replaced(cache.backend, "attend", lambda reading, q, k, v: q):
        for start in range(0, tokens, CHUNK):
            n = min(CHUNK, tokens - start)
            q, k, v = (x[:, :, :n] for x in given)
            cache.attend(q, k, v)


def several(cache: kivi.KVCache, count: int) -> list[kivi.KVCache]:
    """`cache` and independent copies of it."""
    return [cache, *(copy.deepcopy(cache) for _ in range(count - 1))]


def reading(cache: kivi.KVCache) -> Reading:
    """What a decode step of one token a request reads now."""
    one = np.ones(cache.batch, np.int64)
    return cache._reading(cache._state, one, one)


def resident(cache: kivi.KVCache, shape: Shape) -> Reading:
    """The reading of `cache` with every page of a request the same one: as much work, on data that the first cache holds."""
    large, state = reading(cache), cache._state
    small = filled(cache.spec, shape, cache.backend, cache.geometry.dtype, cache.spec.key.residual + cache.spec.value.residual)
    table = state.table.copy()
    table[:, :, 0] = small._state.table[:, :1, 0]
    return replace(large, pool=small.pool, table=table)


def packed_bytes(cache: kivi.KVCache) -> int:
    """Bytes of the pages that a step reads."""
    return int(cache._state.pages.sum()) * cache.pool.format.page_bytes


def floating_bytes(cache: kivi.KVCache) -> int:
    """Bytes of the floating rows that a step reads."""
    state, size = cache._state, int(cache._state.windows.key.nbytes) // int(np.prod(cache._state.windows.key.shape[:3]))
    counted = (state.tokens - state.key_sealed).sum() + (state.tokens - state.value_sealed).sum()
    return int(counted) * cache.geometry.kv_heads * size


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def timed(call: Callable[..., Any], clock: Callable[[], float], total: list[float]) -> Callable[..., Any]:
    """`call`, which adds the time that it takes to `total[0]`."""

    def wrapper(*arguments: Any, **named: Any) -> Any:
        start = clock()
        try:
            return call(*arguments, **named)
        finally:
            total[0] += clock() - start

    return wrapper
