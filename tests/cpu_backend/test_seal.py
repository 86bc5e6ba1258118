"""Rows sealed by one kernel: the same words, scales and origins as the reference, whatever came before in the same words."""

from __future__ import annotations

import numpy as np
import pytest

import kivi
from kivi.dtypes import np_dtype
from kivi.errors import MetadataOverflowError
from kivi.ir.tile import Tile
from kivi.ir.xdsl import parse
from kivi.passes.vector_seal import key_seal_kernel, value_seal_kernel

KEY_DIM, VALUE_DIM = 24, 40


def caches(changes: dict, dtype: str = "float16"):
    sides = {f"{side}.{name}": value for side in ("key", "value") for name, value in (("group", 16), ("residual", 32))}
    spec = kivi.CacheSpec(name="seal").override({**sides, "packing.layout": "lanes32", **changes})
    shape = {"batch": 2, "q_heads": 2, "kv_heads": 2, "head_dim": KEY_DIM, "value_head_dim": VALUE_DIM, "dtype": dtype}
    return [kivi.KVCache(spec, backend=name, **shape) for name in ("cpu", "reference")]


def rows(rng, n: int, dtype: str) -> list[np.ndarray]:
    return [rng.normal(0.3, 2.0, (2, 2, n, dim)).astype(np_dtype(dtype)) for dim in (KEY_DIM, KEY_DIM, VALUE_DIM)]


def same(ours: kivi.KVCache, theirs: kivi.KVCache) -> None:
    for b in range(2):
        for which in ("key", "value"):
            for (start, a), (first, e) in zip(ours.sealed(b)[which], theirs.sealed(b)[which], strict=True):
                assert start == first
                for name in ("words", "scale", "origin"):
                    assert getattr(a, name).tobytes() == getattr(e, name).tobytes(), (which, name)


KINDS = [("float16", "portable"), ("bfloat16", "staged"), ("float32", "portable")]
ALL = [(bits, *kind) for bits in (1, 2, 3, 4, 8) for kind in KINDS]
SOME = {(1, *KINDS[0]), (2, *KINDS[1]), (3, *KINDS[2]), (4, *KINDS[0]), (8, *KINDS[1])}  # each width and each kind


@pytest.mark.parametrize(
    ("bits", "dtype", "numerics"), [pytest.param(*case, marks=() if case in SOME else pytest.mark.slow) for case in ALL]
)
def test_words_of_rows_that_share_them(bits, dtype, numerics):
    ours, theirs = caches(
        {"key.bits": bits, "value.bits": bits, "numerics": numerics, "value.metadata": "input", "key.metadata": "input"}, dtype
    )
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


@pytest.mark.parametrize("which", ["key", "value"])
def test_numbers_beyond_the_metadata_are_refused_or_counted(which):
    """A range of two finite numbers needs a scale that float16 cannot hold."""
    rng = np.random.default_rng(2)
    changes = {f"{which}.bits": 1}
    ours, _ = caches(changes, "float32")
    q, k, v = rows(rng, 70, "float32")
    x = k if which == "key" else v
    x[1, 1, 3, 5], x[1, 1, 4 if which == "key" else 3, 5 if which == "key" else 6] = 6e4, -6e4
    with pytest.raises(MetadataOverflowError, match="request 1"):
        ours.attend(q, k, v)
    assert ours.lengths(0).tokens == 0
    ours, theirs = caches({**changes, "overflow": "saturate"}, "float32")
    for cache in (ours, theirs):
        cache.attend(q, k, v)
    same(ours, theirs)
    assert ours.memory()["clamped"] == theirs.memory()["clamped"] == 1


def test_groups_that_are_not_finite_are_marked():
    rng = np.random.default_rng(3)
    ours, theirs = caches({"nonfinite": "propagate"})
    given = rows(rng, 70, "float16")
    for x in given[1:]:
        x[0, 1, 5, 7], x[1, 0, 40, 3], x[1, 1, :, 9] = np.nan, np.inf, 2.5
    with np.errstate(invalid="ignore"):  # of the reference's attention
        for cache in (ours, theirs):
            cache.attend(*given)
    same(ours, theirs)


def test_the_kernels_are_text_and_for_the_layouts_that_suit_them():
    form = caches({})[0].pool.format
    for which, build in (("key", key_seal_kernel), ("value", value_seal_kernel)):
        assert form.seals_apart(which)
        text = str(build(form, "float16").module)
        assert str(parse(text, Tile)) == text
    other = caches({"packing.layout": "official_int32"})[0].pool.format
    assert not other.seals_apart("key")
    assert not other.seals_apart("value")
