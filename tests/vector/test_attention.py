"""Attention kernels at `vec` level under the interpreter: within the derived bound of the oracle, and the history is read once."""

from __future__ import annotations

import numpy as np
import pytest

from kivi.conformance import bounds, oracle
from tests.ir.test_attention import FP32, caches, fill, rows
from tests.vector.interpreted import Vectors


def check(cache, naive, n, target, pages_per_share=16):
    """Attend to n more tokens through the kernels; every output within its bound. The cache does not change."""
    q, k, v = rows(cache, n, 99)
    backend = Vectors(target, pages_per_share)
    counts = np.full(cache.batch, n)
    out = backend.attend(cache._reading(cache._state, counts, counts), q, k, v)
    for b, seen in enumerate(naive.fork().attend(q, k, v, [n] * cache.batch)):
        for h, exact in enumerate(oracle.attend(seen, cache.geometry.scale)):
            limit = bounds.output_bound(exact, FP32, cache.geometry.dtype).total
            assert (np.abs(out[b, h].astype(np.float64) - exact.out) <= limit).all()
    return backend


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("target", ["x86-64-v4", "x86-64-v3"])
def test_every_width(bits, target):
    """By lookup and by conversion."""
    cache, naive = caches({"key.bits": bits, "value.bits": bits, "packing.layout": "lanes32"})
    fill(cache, naive, [37], 37)
    check(cache, naive, 1, target)


def test_a_target_without_half_precision():
    cache, naive = caches({"packing.layout": "lanes32"}, head_dim=12)
    fill(cache, naive, [35], 35)
    check(cache, naive, 2, "x86-64")


@pytest.mark.parametrize("changes", [{"key.group": 32, "key.residual": 32, "value.residual": 32}, {"value.group": 2}, {"value.group": 12}])
def test_groups(changes):
    cache, naive = caches({"packing.layout": "lanes32", **changes})
    fill(cache, naive, [70], 70)
    check(cache, naive, 1, "x86-64-v4")


def test_any_other_layout_goes_through_the_tile_kernels():
    cache, naive = caches({"packing.layout": "hp16"}, head_dim=8)
    fill(cache, naive, [36], 36)
    check(cache, naive, 1, "x86-64-v3")


def test_ragged_requests_cut_pages_and_several_shares():
    cache, naive = caches({"packing.layout": "lanes32"}, batch=2, q_heads=4, kv_heads=2, value_head_dim=12, dtype="bfloat16")
    fill(cache, naive, [61, 30], 61)
    cache.crop([43, 25])
    naive.crop([43, 25])
    fill(cache, naive, [40, 1], 40)
    for pages in (1, 9):
        check(cache, naive, 2, "x86-64-v4", pages)


def test_the_history_is_read_once():
    """At most 1.05 of the format's bytes a token and KV head, counted by the interpreter's loads; query heads share them."""
    changes = {f"{side}.{name}": value for side in ("key", "value") for name, value in (("group", 32), ("residual", 128))}
    cache, naive = caches({**changes, "packing.layout": "lanes32"}, q_heads=4, kv_heads=1, head_dim=128)
    fill(cache, naive, [384], 384)
    read = check(cache, naive, 1, "x86-64-v4").memory["history"].read
    packed = sum(count for name, count in read.items() if name.startswith("slab"))
    assert packed <= 1.05 * 96 * 256
