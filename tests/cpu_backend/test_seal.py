"""Values sealed row by row by one kernel: the same words, scales and origins as the reference, whatever came before in the same words."""

from __future__ import annotations

import numpy as np
import pytest

import kivi
from kivi.dtypes import np_dtype
from kivi.errors import MetadataOverflowError
from kivi.ir.tile import Tile
from kivi.ir.xdsl import parse
from kivi.passes.vector_seal import serves, value_seal_kernel


def caches(changes: dict, dtype: str = "float16", value_head_dim: int = 40):
    sides = {f"{side}.{name}": value for side in ("key", "value") for name, value in (("group", 16), ("residual", 32))}
    spec = kivi.CacheSpec(name="seal").override({**sides, "packing.layout": "lanes32", **changes})
    shape = {"batch": 2, "q_heads": 2, "kv_heads": 2, "head_dim": 16, "value_head_dim": value_head_dim, "dtype": dtype}
    return [kivi.KVCache(spec, backend=name, **shape) for name in ("cpu", "reference")]


def rows(rng, n: int, dtype: str, value_head_dim: int = 40) -> list[np.ndarray]:
    return [rng.normal(0.3, 2.0, (2, 2, n, dim)).astype(np_dtype(dtype)) for dim in (16, 16, value_head_dim)]


def same(ours: kivi.KVCache, theirs: kivi.KVCache) -> None:
    for b in range(2):
        for (start, a), (first, e) in zip(ours.sealed(b)["value"], theirs.sealed(b)["value"], strict=True):
            assert start == first
            for name in ("words", "scale", "origin"):
                assert getattr(a, name).tobytes() == getattr(e, name).tobytes(), name


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("dtype", "numerics"), [("float16", "portable"), ("bfloat16", "staged"), ("float32", "portable")])
def test_words_of_rows_that_share_them(bits, dtype, numerics):
    ours, theirs = caches({"value.bits": bits, "numerics": numerics, "value.metadata": "input", "key.metadata": "input"}, dtype)
    rng = np.random.default_rng(bits)
    for n in (70, 1, 1, 5, 1, 40, 1):
        given = rows(rng, n, dtype)
        for cache in (ours, theirs):
            cache.attend(*given)
        same(ours, theirs)


def test_rows_after_a_crop_replace_those_before_it():
    ours, theirs = caches({})
    rng = np.random.default_rng(1)
    for cut in (90, 57, 41):
        given = rows(rng, 60, "float16")
        for cache in (ours, theirs):
            cache.attend(*given)
            cache.crop(min(cut, cache.lengths(0).tokens))
        same(ours, theirs)


def test_numbers_beyond_the_metadata_are_refused_or_counted():
    rng = np.random.default_rng(2)
    ours, _ = caches({}, "float32")
    q, k, v = rows(rng, 70, "float32")
    v[1, 1, 3, 5] = 1e6
    with pytest.raises(MetadataOverflowError, match="request 1"):
        ours.attend(q, k, v)
    assert ours.lengths(0).tokens == 0
    ours, theirs = caches({"overflow": "saturate"}, "float32")
    for cache in (ours, theirs):
        cache.attend(q, k, v)
    same(ours, theirs)
    assert ours.memory()["clamped"] == theirs.memory()["clamped"] == 1


def test_the_kernel_is_text_and_for_layouts_with_token_slots():
    ours, _ = caches({})
    form = ours.pool.format
    assert serves(form)
    text = str(value_seal_kernel(form, "float16").module)
    assert str(parse(text, Tile)) == text
    other, _ = caches({"packing.layout": "official_int32"})
    assert not serves(other.pool.format)
