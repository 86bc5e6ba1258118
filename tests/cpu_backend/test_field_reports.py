"""Field reports on memory and speed of quantized caches: what a step allocates, and what a long prefill peaks at."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import kivi

SHAPE = {"batch": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "float32"}


def rows(rng, n: int) -> list[np.ndarray]:
    return [rng.standard_normal((1, heads, n, 64), np.float32) for heads in (4, 2, 2)]


def peak(call) -> int:
    """Bytes that a call holds at its highest beyond what was there before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.fixture
def filled():
    """A cache of `tokens` tokens; appended without attending, whose time would grow with their square."""

    def fill(tokens: int) -> kivi.KVCache:
        cache, rng = kivi.KVCache("kivi-2bit", backend="cpu", **SHAPE), np.random.default_rng(0)
        attend, cache.backend.attend = cache.backend.attend, lambda reading, q, k, v: np.zeros_like(q)
        try:
            for start in range(0, tokens, 512):
                cache.attend(*rows(rng, min(512, tokens - start)))
        finally:
            cache.backend.attend = attend
        cache.attend(*rows(rng, 1))
        return cache

    return fill


def test_a_decode_step_allocates_no_history(filled):
    """Report 34: decode slowed down because the history was dequantized and joined in every step. What a step allocates here is the
    partial results of at most 64 programs, however long the history: far below its bytes."""
    peaks = {}
    for tokens in (512, 4096, 16384):
        cache, given = filled(tokens), rows(np.random.default_rng(1), 1)
        cache.attend(*given)
        peaks[tokens] = peak(lambda cache=cache, given=given: cache.attend(*given))
    limit = 64 * 1024
    assert max(peaks.values()) < limit, peaks
    assert filled(16384).memory()["formula"] > 20 * limit


def test_a_decode_step_writes_as_much_to_a_long_history_as_to_a_short_one(filled):
    """Report 34 again, by what changes: of the pages the words, scales and origins of one value row, of the windows one row each."""
    row = 2 * 64  # elements of all heads
    changed = []
    for tokens in (512, 4096):
        cache = filled(tokens)
        for seed in (2, 3):
            windows = [cache._state.windows.key, cache._state.windows.value]
            before = [a.copy() for a in (*cache.pool.raw, *windows)]
            cache.attend(*rows(np.random.default_rng(seed), 1))
            after = [*cache.pool.raw, cache._state.windows.key, cache._state.windows.value]
            counts = [int((a.view(np.uint8) != b.view(np.uint8)).sum()) for a, b in zip(after, before, strict=True)]
            changed.append((sum(counts[:-2]), *counts[-2:]))
    for pages, keys, values in changed:
        assert 0 < pages <= row * 4 + row // 32 * 2 * 2  # a word a channel, two float16 numbers a group
        assert 0 < keys <= row * 4
        assert 0 < values <= row * 4


def test_a_prefill_peaks_by_its_chunk_and_not_by_the_history(filled):
    """Report 33: quantized attention materialised all scores, a chunk times the history. Here a chunk of n tokens peaks at the output and
    two partial results in float32, at most four times the bytes of its queries, and their maxima and sums."""
    n = 256
    queries = 4 * n * 64 * 4
    steady = {}
    for tokens in (512, 4096):
        cache, given = filled(tokens), rows(np.random.default_rng(2), n)
        cache.attend(*given)  # the kernels of a chunk are compiled
        before = cache.nbytes
        highest = peak(lambda cache=cache, given=given: cache.attend(*given))
        grown = max(0, cache.nbytes - before)
        steady[tokens] = highest - grown
    scores = 4 * n * 4096 * 4
    for tokens, extra in steady.items():
        assert extra < 6 * queries, (tokens, extra, queries)
    assert 6 * queries < scores / 2
