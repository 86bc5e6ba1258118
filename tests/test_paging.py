"""Paging is real: closed pages never change, a decode step writes as much at 32k tokens as at 1k, and bytes are accounted."""

from __future__ import annotations

import hashlib
import tracemalloc

import numpy as np
import pytest

import kivi
from kivi.memory import formula_of_length
from kivi.pool import PagePool

SPEC = kivi.load_spec("kivi-2bit")


def make(spec=SPEC, batch=1, head_dim=16, dtype="float16", **rest):
    return kivi.KVCache(spec, batch=batch, q_heads=1, kv_heads=1, head_dim=head_dim, dtype=dtype, **rest)


def step(cache, n=1, seed=0):
    g, rng = cache.geometry, np.random.default_rng(seed)
    cache.attend(*(rng.standard_normal((cache.batch, 1, n, g.head_dim)).astype(g.dtype) for _ in range(3)))


def image(cache):
    """All bytes that a decode step may write, by place: each page of each slab, and each window."""
    pool, windows = cache.pool, cache._state.windows
    out = {("page", i): pool.raw[s][j] for i, (s, j) in enumerate(pool.where(p) for p in range(len(pool.refs)))}
    return {**out, ("key",): windows.key, ("value",): windows.value}


def changed(before, after):
    """Bytes that differ, by place; a new page counts whole."""
    out = {}
    for place, a in after.items():
        a = np.ascontiguousarray(a).view(np.uint8)
        b = before.get(place)
        n = a.size if b is None or b.size != a.size else int((a != b).sum())
        if n:
            out[place] = n
    return out


def snapshot(cache):
    return {place: np.ascontiguousarray(a).view(np.uint8).copy() for place, a in image(cache).items()}


def test_closed_pages_never_change():
    cache = make(kivi.load_spec("teaching").override({"key.bits": 3}))
    closed: dict[int, bytes] = {}
    for t in range(60):
        step(cache, 1 + t % 3, t)
        for page, _, end in cache._state.rows(0):
            digest = hashlib.sha256(
                np.ascontiguousarray(cache.pool.raw[cache.pool.where(page)[0]][cache.pool.where(page)[1]]).tobytes()
            ).digest()
            if end <= cache.lengths(0).value_sealed:
                assert closed.setdefault(page, digest) == digest
    assert len(closed) > 20


def test_a_decode_step_writes_as_much_at_32k_as_at_1k():
    """Places and sizes of all writes over a full cycle of R steps, seals included, do not depend on the length."""
    most = {}
    for tokens in (1024, 32768):
        cache = make()
        step(cache, tokens)
        sizes = []
        for t in range(SPEC.key.residual):
            before = snapshot(cache)
            step(cache, 1, t)
            sizes.append(changed(before, image(cache)))
        form = cache.pool.format
        row = form.head_dim * 2
        value_row = form.head_dim // 4 + 2 * 2  # words, scale and origin of one token
        for t, places in enumerate(sizes):
            pages = {place: n for place, n in places.items() if place[0] == "page"}
            assert places.get(("key",), 0) <= row
            assert places.get(("value",), 0) <= row
            assert sum(pages.values()) <= value_row or t == SPEC.key.residual - 1
            assert len(pages) <= 2 or t == SPEC.key.residual - 1
        most[tokens] = max(sum(n for place, n in places.items() if place[0] != "page" or place[1] < tokens // 128) for places in sizes)
    assert most[1024] == pytest.approx(most[32768], abs=16)  # bytes that happen to keep their value


def test_slabs_never_move():
    cache = make(kivi.load_spec("teaching"))
    places = {}
    for t in range(100):
        step(cache, 2, t)
        for i, raw in enumerate(cache.pool.raw):
            assert places.setdefault(i, raw.ctypes.data) == raw.ctypes.data
    assert len(places) > 3


@pytest.mark.parametrize("layout", ["auto", "lanes32", "hp16", "planes8", "hp16.mma"])
@pytest.mark.parametrize("preset", ["kivi-2bit", "kivi-4bit", "kivi-official", "teaching"])
def test_measured_is_formula_plus_stated_padding(preset, layout):
    """Field report 32."""
    spec = kivi.load_spec(preset).override({"packing.layout": layout})
    cache = make(spec, batch=2, head_dim=80)
    for n in (5, 300, 1, 77):
        step(cache, n)
        memory = cache.memory()
        assert memory["measured"] == cache.nbytes == sum(memory["by_kind"].values())
        assert memory["measured"] - sum(memory["padding"].values()) == memory["formula"]
        assert min(memory["padding"].values()) >= 0


def test_the_figures_of_the_readme():
    assert formula_of_length(SPEC, "float16", 1, 128, 128, 4096) == 419840
    cache = make(head_dim=128)
    step(cache, 4096)
    memory = cache.memory()
    assert (memory["formula"], memory["full_precision"]) == (419840, 2097152)


def test_nbytes_is_what_was_allocated():
    """Field report 32: the allocator sees what is reported; nothing keeps a floating copy of the history."""
    q, k, v = (np.random.default_rng(0).standard_normal((1, 1, 8192, 64)).astype(np.float16) for _ in range(3))
    warm = make(head_dim=64)
    warm.attend(q[:, :, :200], k[:, :, :200], v[:, :, :200])
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        cache = make(head_dim=64)
        cache.attend(q, k, v)
        grown = tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()
    assert cache.pool.nbytes >= 64 * cache.pool.format.page_bytes
    assert abs(grown - cache.nbytes) < 32 * 1024  # Python's own objects
    assert cache.nbytes < k.nbytes + v.nbytes


def test_forks_share_closed_pages():
    cache = make()
    step(cache, 1024)
    twin = cache.fork()
    assert cache.nbytes == twin.nbytes
    assert cache.pool.nbytes < 1.5 * 8 * cache.pool.format.page_bytes
    del twin


def test_a_page_comes_back_clean():
    pool: PagePool = make(kivi.load_spec("teaching")).pool
    [page] = pool.lend(1)
    slab, index = pool.where(page)
    pool.raw[slab][index] = 255
    pool.release(page)
    [again] = pool.lend(1)
    assert again == page
    assert not pool.raw[slab][index].any()
