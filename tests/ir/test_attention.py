"""The attention kernels under the `tile` interpreter: within the derived bound of the oracle, and no byte of the history read twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import kivi
from kivi.conformance import bounds, model, oracle
from kivi.dtypes import np_dtype
from kivi.schedule import Schedule
from tests.ir.interpreted import REWRITES, Interpreted

FP32 = bounds.Numerics(accumulate="float32", exp_ulp=2.0)


def caches(changes, batch=1, q_heads=2, kv_heads=1, head_dim=20, value_head_dim=None, dtype="float16"):
    """A cache of the reference backend and the naive model of it."""
    sides = {f"{side}.{name}": value for side in ("key", "value") for name, value in (("group", 8), ("residual", 16))}
    spec = kivi.CacheSpec(name="attention").override({**sides, **changes})
    geometry = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "value_head_dim": value_head_dim, "dtype": dtype}
    return kivi.KVCache(spec, batch=batch, backend="reference", **geometry), model.NaiveCache(spec, batch)


def rows(cache, n, seed):
    g, rng = cache.geometry, np.random.default_rng(seed)
    shapes = ((g.q_heads, g.head_dim), (g.kv_heads, g.head_dim), (g.kv_heads, g.value_head_dim))
    return [rng.normal(0.2, 1.0, (cache.batch, heads, n, dim)).astype(np_dtype(g.dtype)) for heads, dim in shapes]


def check(cache, naive, n, schedule, pages_per_share=16, rewrites=REWRITES):
    """Attend to n more tokens through the kernels; every output within its bound. The cache does not change."""
    q, k, v = rows(cache, n, 99)
    backend = Interpreted(replace(schedule, rewrites=tuple(rewrites)), pages_per_share)
    counts = np.full(cache.batch, n)
    out = backend.attend(cache._reading(cache._state, counts, counts), q, k, v)
    for b, seen in enumerate(naive.fork().attend(q, k, v, [n] * cache.batch)):
        for h, exact in enumerate(oracle.attend(seen, cache.geometry.scale)):
            limit = bounds.output_bound(exact, FP32, cache.geometry.dtype).total
            assert (np.abs(out[b, h].astype(np.float64) - exact.out) <= limit).all()
    return backend


def fill(cache, naive, counts, n):
    q, k, v = rows(cache, n, 3)
    cache.attend(q, k, v, counts=counts)
    naive.attend(q, k, v, counts)


@pytest.mark.parametrize("slots", ["lanes", "axis"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_every_width(bits, slots):
    cache, naive = caches({"key.bits": bits, "value.bits": bits, "packing.layout": "hp16"})
    fill(cache, naive, [54], 54)
    check(cache, naive, 1, Schedule(tokens=8, slots=slots))


@pytest.mark.parametrize("layout", ["official_int32", "lanes32", "hp16.mma", "bytes_lsb", "planes8"])
def test_every_layout(layout):
    cache, naive = caches({"packing.layout": layout, "key.bits": 4})
    fill(cache, naive, [40], 40)
    check(cache, naive, 3, Schedule(tokens=8, queries=2, slots="axis"))


def test_ragged_requests_cut_pages_and_several_shares():
    cache, naive = caches({"packing.layout": "hp16"}, batch=3, q_heads=4, kv_heads=2, value_head_dim=12, dtype="bfloat16")
    fill(cache, naive, [61, 30, 0], 61)
    cache.crop([43, 25, 0])
    naive.crop([43, 25, 0])
    fill(cache, naive, [40, 40, 1], 40)
    for pages in (1, 2, 9):
        check(cache, naive, 2, Schedule(tokens=8, queries=2, slots="axis"), pages)


@pytest.mark.parametrize(("bits", "bytes_a_token"), [(2, 96), (4, 160)])
def test_the_history_is_read_once(bits, bytes_a_token):
    """At most 1.05 of the format's bytes a token and KV head, counted by the interpreter's loads; query heads share them."""
    changes = {f"{side}.{name}": value for side in ("key", "value") for name, value in (("group", 32), ("residual", 128), ("bits", bits))}
    cache, naive = caches({**changes, "packing.layout": "hp16"}, q_heads=4, kv_heads=1, head_dim=128)
    fill(cache, naive, [384], 384)
    got = check(cache, naive, 1, Schedule(tokens=32, slots="lanes"))
    closed = cache.lengths(0).value_sealed // 128 * 128
    assert closed == 256
    read = sum(n for name, n in got.memory["history"].read.items() if name.startswith("slab"))
    assert closed * bytes_a_token <= read <= 1.05 * closed * bytes_a_token
