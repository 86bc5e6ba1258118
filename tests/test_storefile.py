"""Save files: everything comes back, and a damaged, foreign or mismatched file is refused before anything is built."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import kivi
from kivi.errors import SaveFileError
from tests.test_cache import make, rows, stored


@pytest.fixture
def cache():
    cache = make("kivi-paper", batch=3, dtype="bfloat16", max_tokens=900, scale=0.25)
    cache.attend(*rows(cache, 300), counts=[300, 131, 0])
    cache.reorder([0, 1, 0])
    cache.crop([290, 50, 300])
    return cache


@pytest.fixture
def file(cache, tmp_path):
    cache.save(tmp_path / "cache.safetensors")
    return tmp_path / "cache.safetensors"


def rewrite(path, change):
    """The file with tensors and header changed by `change(tensors, header)`."""
    with safe_open(path, framework="np") as file:
        header = dict(file.metadata())
    tensors = load_file(path)
    change(tensors, header)
    save_file(tensors, path, header)


def test_everything_comes_back(cache, file):
    other = kivi.KVCache.load(file)
    assert stored(other) == stored(cache)
    assert (other.spec, other.geometry) == (cache.spec, cache.geometry)
    for step in range(5):
        assert np.array_equal(*(c.attend(*rows(c, 1 + step, step)) for c in (cache, other)))
    assert stored(other) == stored(cache)


def test_a_shared_page_is_stored_once(file, cache):
    tensors = load_file(file)
    assert len(tensors["key.words"]) == len({page for b in range(3) for page, _, _ in cache._state.rows(b)})
    again = kivi.KVCache.load(file)
    assert again.nbytes - again.memory()["by_kind"]["tables"] <= cache.nbytes


def test_the_file_carries_its_spec(file, cache):
    with safe_open(file, framework="np") as opened:
        header = opened.metadata()
    assert header["spec_hash"] == cache.spec.hash
    assert kivi.spec.from_dict(json.loads(header["spec"])) == cache.spec
    assert json.loads(header["geometry"])["layout"]["name"] == "official_int32"


def test_another_spec_is_refused(file):
    assert kivi.KVCache.load(file, spec="kivi-paper").spec.name == "kivi-paper"
    with pytest.raises(SaveFileError, match=r"kivi-paper.*kivi-2bit"):
        kivi.KVCache.load(file, spec="kivi-2bit")


def test_every_damaged_byte_is_noticed(file):
    data = file.read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(data), 60):
        broken = bytearray(data)
        broken[at] ^= 1 << int(rng.integers(0, 8))
        file.write_bytes(broken)
        with pytest.raises(SaveFileError):
            kivi.KVCache.load(file)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(file, keep):
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(SaveFileError):
        kivi.KVCache.load(file)


@pytest.mark.parametrize(
    "change",
    [
        lambda t, h: t.pop("residual.key.1"),
        lambda t, h: t.__setitem__("tokens", t["tokens"] + 1),
        lambda t, h: h.pop("sha256"),
        lambda t, h: h.__setitem__("kivi_save", "2"),
        lambda t, h: h.__setitem__("geometry", h["geometry"].replace("bfloat16", "float16")),
        lambda t, h: h.clear(),
    ],
)
def test_a_changed_file_is_refused(file, change):
    rewrite(file, change)
    with pytest.raises(SaveFileError):
        kivi.KVCache.load(file)


def test_what_is_not_there_or_not_writable(cache, tmp_path):
    with pytest.raises(SaveFileError):
        kivi.KVCache.load(tmp_path / "missing")
    with pytest.raises(SaveFileError):
        cache.save(tmp_path / "no-such-folder" / "file")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(SaveFileError):
        kivi.KVCache.load(tmp_path / "text")


def test_saving_replaces_a_file_whole(cache, file):
    before = stored(cache)
    cache.attend(*rows(cache, 5, 5))
    cache.save(file)
    assert stored(kivi.KVCache.load(file)) == stored(cache) != before
    assert [p.name for p in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("layout", ["lanes32", "hp16", "bytes_lsb"])
def test_words_are_repacked_for_another_layout(layout, tmp_path):
    """A backend with another native layout reads the same codes."""
    from kivi import storefile

    cache = make("kivi-2bit", dtype="float16", batch=2)
    cache.attend(*rows(cache, 300))
    snap = storefile.snapshot(cache)
    other = storefile.restore(snap, cache.spec.override({"packing.layout": layout}), cache.geometry, cache.backend)
    assert other.ran.layout == layout
    for which in ("key", "value"):
        ours, theirs = (c.sealed(1)[which][0][1] for c in (cache, other))
        assert np.array_equal(ours.codes(), theirs.codes())
        assert np.array_equal(ours.repack(layout).words, theirs.words)


def test_to_another_backend_keeps_the_state(cache):
    before, old_pool = stored(cache), cache.pool
    assert cache.to("reference") is cache
    assert stored(cache) == before
    assert cache.pool is not old_pool
    assert old_pool.free_pages == len(old_pool.refs)
