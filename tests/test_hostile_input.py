"""Input that no sane caller gives: errors of kivi's own tree, copies that stay apart, and specs that cannot be bent."""

from __future__ import annotations

import copy
import pickle  # noqa: TID251  to see that it is refused
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import kivi
from kivi.errors import CapacityError, DtypeError, InputError, KiviError, PendingTokensError, SaveFileError, SpecError, StateError
from kivi.spec import CacheSpec, KeySpec
from tests.test_cache import make, rows, stored


def test_a_deep_copy_is_independent():
    cache = make()
    cache.attend(*rows(cache, 10))
    twin = copy.deepcopy(cache)
    assert twin.pool is not cache.pool
    before = stored(cache)
    twin.attend(*rows(twin, 7, 1))
    grandchild = twin.fork()
    assert stored(grandchild) == stored(twin)
    assert stored(cache) == before
    cache.attend(*rows(cache, 7, 1))
    assert stored(cache) == stored(twin)


def test_a_shallow_copy_is_a_fork():
    cache = make()
    cache.attend(*rows(cache, 10))
    before = stored(cache)
    twin = copy.copy(cache)
    del twin
    for step in range(4):
        other = make(backend=cache.backend)
        other.attend(*rows(other, 9, step))
    assert stored(cache) == before
    assert sum(cache.pool.refs) == 2


def test_nothing_is_pickled():
    cache = make()
    with pytest.raises(StateError, match="save"):
        pickle.dumps(cache)
    cache.attend(*rows(cache, 1), commit=False)
    with pytest.raises(PendingTokensError):
        copy.deepcopy(cache)


def test_a_window_that_grew_shrinks_again():
    for finish in ("commit", "rollback"):
        cache = make()
        usual = cache.nbytes
        cache.attend(*rows(cache, 2000), commit=False)
        assert cache.nbytes > 10 * usual
        getattr(cache, finish)()
        cache.attend(*rows(cache, 1))
        windows = [cache.memory()["by_kind"][f"{side}_window"] for side in ("key", "value")]
        assert sum(windows) <= usual


def test_clamped_numbers_stay_counted_on_a_move():
    cache = make(kivi.load_spec("teaching").override({"overflow": "saturate", "value.metadata": "float16"}))
    q, k, v = rows(cache, 9)
    v[:] = -1e6
    cache.attend(q, k, v)
    count = cache.memory()["clamped"]
    assert count > 0
    assert cache.to("reference").memory()["clamped"] == count


@pytest.mark.parametrize(
    "arguments",
    [
        {"numerics": "bogus"},
        {"nonfinite": "no"},
        {"key": KeySpec(bits=7)},
        {"key": KeySpec(group=0)},
        {"name": "two\nlines"},
        {"name": "x" * 300},
        {"key": None},
        {"layers": {"0": 3}},
    ],
)
def test_no_invalid_spec_exists(arguments):
    with pytest.raises(SpecError):
        CacheSpec(**arguments)


def test_a_spec_cannot_be_bent():
    spec = kivi.load_spec("kivi-2bit")
    for change in (lambda: spec.layers.__setitem__("0", "full"), lambda: spec.layers.update({"0": "full"}), lambda: spec.layers.clear()):
        with pytest.raises(SpecError, match="cannot be changed"):
            change()


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "x = " + "9" * 5000, 'name = "a\\u0000b"'])
def test_files_that_choke_a_parser(tmp_path, text):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(SpecError):
        kivi.load_spec(path)


@pytest.mark.parametrize("source", ["k" * 300, "a\0b", "[key]\nbits = 2\n" * 50])
def test_text_that_is_no_path(source):
    with pytest.raises(SpecError, match="neither a preset"):
        kivi.load_spec(source)


@pytest.mark.parametrize("changes", [{1: 2}, [1], None, "key.bits"])
def test_override_takes_names(changes):
    with pytest.raises(SpecError, match="override takes"):
        kivi.load_spec("kivi-2bit").override(changes)


def test_override_takes_numpy_numbers():
    assert kivi.load_spec("kivi-2bit").override({"key.bits": np.int64(4)}).key.bits == 4


@pytest.mark.parametrize("key", ["t:slot t:70 t* c*", "t:slot t40 t* c*", "t:slot t:30 t* c*"])
def test_layouts_beyond_any_page(key):
    with pytest.raises(SpecError, match=r"index bit above|leaves out"):
        kivi.load_spec("kivi-2bit").override({"packing.layout": {"name": "own", "key": key, "value": "c:slot c* t*"}})


@pytest.mark.parametrize("name", ["auto", "official_int32"])
def test_a_layout_may_not_take_a_known_name(name):
    own = {"name": name, "word": "uint8", "key": "t:slot t* c*", "value": "c:slot c* t*"}
    with pytest.raises(SpecError, match="is taken"):
        kivi.load_spec("kivi-2bit").override({"packing.layout": own})


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c: c.attend(*rows(c, 1), commit="no"), DtypeError),
        (lambda c: c.attend(*rows(c, 1), commit=np.array([True, False])), DtypeError),
        (lambda c: c.attend(*rows(c, 1), counts=torch.empty(1, dtype=torch.int64, device="meta")), DtypeError),
        (lambda c: c.attend(*rows(c, 1), counts=torch.ones(1, dtype=torch.bfloat16)), DtypeError),
        (lambda c: c.attend(*rows(c, 1), counts=[]), InputError),
        (lambda c: c.attend(*(torch.from_numpy(x).to_sparse() for x in rows(c, 1))), DtypeError),
        (lambda c: c.attend(*(np.ma.masked_array(x) for x in rows(c, 1))), DtypeError),
        (lambda c: c.crop(10**30), InputError),
        (lambda c: c.select([]), InputError),
        (lambda c: c.sealed(0)["key"][0][1].dequantize("int8"), DtypeError),
        (lambda c: c.sealed(0)["key"][0][1].repack(["x"]), SpecError),
        (lambda c: kivi.get_backend("reference", mode=[]), KiviError),
        (lambda c: kivi.select("kivi-2bit", batch=-1), InputError),
        (lambda c: kivi.select("kivi-2bit", tokens=None), InputError),
        (lambda c: make(scale=10**400), InputError),
        (lambda c: make(scale="1"), InputError),
        (lambda c: make(batch=2**50), CapacityError),
        (lambda c: c.save(""), SaveFileError),
        (lambda c: c.save("/"), SaveFileError),
        (lambda c: c.save("a\0b"), SaveFileError),
        (lambda c: c.save(None), SaveFileError),
        (lambda c: c.save(b"bytes"), SaveFileError),
        (lambda c: kivi.KVCache.load(5), SaveFileError),
        (lambda c: kivi.KVCache.load("a\0b"), SaveFileError),
    ],
)
def test_errors_are_kivis_own(call, error):
    cache = make()
    cache.attend(*rows(cache, 10))
    before = stored(cache)
    with pytest.raises(error):
        call(cache)
    assert stored(cache) == before


def test_friendly_spellings():
    cache = make(scale=np.float32(0.5), device=torch.device("cpu"))
    assert cache.geometry.scale == 0.5
    cache.attend(*rows(cache, 2), commit=False)
    cache.commit(10**30)
    assert cache.lengths(0).tokens == 2
    conjugate = torch.from_numpy(rows(cache, 1)[0])._neg_view()
    cache.attend(conjugate, *(torch.from_numpy(x) for x in rows(cache, 1)[1:]))


def test_many_threads_save_to_one_path(tmp_path):
    caches = [make() for _ in range(4)]
    for i, cache in enumerate(caches):
        cache.attend(*rows(cache, 10 + i))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: caches[i % 4].save(tmp_path / "one"), range(40)))
    assert stored(kivi.KVCache.load(tmp_path / "one")) in [stored(c) for c in caches]
    assert [p.name for p in tmp_path.iterdir()] == ["one"]


HOSTS = [
    ("reference", None),
    ("cpu", None),
    ("onnxruntime", None),
    ("cupy", "shim"),
    ("numba_cuda", "simulator"),
    ("triton", "interpreter"),
]


def between_elements(x: np.ndarray, step: int = 1) -> np.ndarray:
    """The same numbers as a field of records, whose distance is no multiple of an element."""
    records = np.zeros(x.shape[:-1], [("tag", "u1"), ("row", x.dtype, x.shape[-1:])])[:, :, ::step]
    records["row"] = x
    return records["row"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize(("backend", "mode"), HOSTS)
def test_arrays_that_lie_between_elements(backend, mode, step):
    x = np.random.default_rng(0).standard_normal((1, 1, 9, 8)).astype(np.float32)
    odd = between_elements(x, step)
    assert odd.strides[2] % 4
    be, spec = kivi.get_backend(backend, mode=mode), kivi.load_spec("teaching")
    assert np.array_equal(be.quantize(odd, spec, "value").dequantize(), be.quantize(x, spec, "value").dequantize())
    caches = [kivi.KVCache(spec, batch=1, q_heads=1, kv_heads=1, head_dim=8, dtype="float32", backend=be) for _ in range(2)]
    for at in (slice(0, 8), slice(8, 9)):
        got, expected = (cache.attend(*(a[:, :, at],) * 3) for cache, a in zip(caches, (odd, x), strict=True))
        assert np.array_equal(got, expected)
    assert stored(caches[0]) == stored(caches[1])


@pytest.mark.parametrize("backend", ["reference", "cpu", "onnxruntime"])
def test_numpy_may_be_told_to_raise(backend):
    cache = kivi.KVCache("teaching", batch=1, q_heads=1, kv_heads=1, head_dim=8, dtype="float32", backend=backend)
    x = np.random.default_rng(0).standard_normal((1, 1, 9, 8)).astype(np.float32) * 30
    with np.errstate(all="raise"):
        cache.attend(x, x, x)
        cache.backend.quantize(x, cache.spec, "value").dequantize()


def test_override_opens_tables():
    spec = kivi.load_spec("kivi-official")
    assert spec.override({"key": {"bits": 4}}) == spec.override({"key.bits": 4})
    with pytest.raises(SpecError, match=r"'key\.bit'"):
        spec.override({"key": {"bit": 4}})


def test_a_layout_with_a_field_that_it_has_not():
    fields = {"name": "x", "word": "uint8", "key": "t:slot t* c*", "value": "c:slot c* t*", "words": 8}
    with pytest.raises(SpecError, match=r"`words`.*packing\.layout\.word, "):
        kivi.load_spec("kivi-2bit").override({"packing.layout": fields})


def test_a_mark_in_front_of_a_file(tmp_path):
    (tmp_path / "spec.toml").write_text("kivi_spec = 1\n[key]\nbits = 4\n", "utf-8-sig")
    assert kivi.load_spec(tmp_path / "spec.toml").key.bits == 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("backend", "mode"), HOSTS)
def test_an_overflow_names_its_group(backend, mode):
    """And nothing of other requests, of rows past the counts, or of groups that fit (SPEC 3.7.3)."""
    spec = kivi.load_spec("teaching").override({"key.metadata": "float16", "value.metadata": "float16"})
    cache = kivi.KVCache(spec, batch=2, q_heads=2, kv_heads=2, head_dim=4, dtype="float32", backend=kivi.get_backend(backend, mode=mode))
    q, k, v = (np.random.default_rng(i).standard_normal((2, 2, 4, 4)).astype(np.float32) for i in range(3))
    k[0, 1, 3, 2] = 3e5
    k[1, 0, 0, 0] = k[1, 0, 3, 0] = 3e38  # a token that floats, and a row that is none
    cache.attend(*(a[:, :, :1] for a in (q, k, v)))
    with pytest.raises(kivi.errors.MetadataOverflowError) as caught:
        cache.attend(*(a[:, :, 1:] for a in (q, k, v)), counts=[3, 1])
    text = str(caught.value)
    assert "request 0, tokens 0 to 3: the group of head 1, channel 2, tokens 2 to 3 has values from" in text
    assert "to 300000, which need" in text
    assert "key.metadata = 'bfloat16', or overflow = 'saturate'" in text
    v[1, 0, 2, 3] = -3e5
    with pytest.raises(kivi.errors.MetadataOverflowError, match="the group of request 1, head 0, token 2, channels 2 to 3 has values"):
        cache.backend.quantize(v, spec, "value")


@pytest.mark.parametrize("backend", ["reference", "cpu", "onnxruntime"])
@pytest.mark.parametrize(
    ("fields", "dtype", "other", "group", "values"),
    [
        # A group with NaN or Inf stores none of its numbers, however large they are.
        ({"nonfinite": "propagate"}, np.float32, [np.nan, -1e30], [1e6], "from 0 to 1e+06"),
        # The range of a group is what overflows, not the largest number.
        ({"numerics": "staged", "value.metadata": "input"}, np.float16, [-60000] * 32, [40000, -40000], "from -40000 to 40000"),
        ({"value.metadata": "float32"}, np.float32, [-3e38] * 32, [2.5e38, -2.5e38], "from -2.5e+38 to 2.5e+38"),
    ],
)
def test_an_overflow_names_a_group_that_overflows(backend, fields, dtype, other, group, values):
    spec = kivi.load_spec("kivi-2bit").override({"key.metadata": fields.get("value.metadata", "float16"), **fields})
    x = np.zeros((1, 1, 8, 64), dtype)
    x[0, 0, 3, : len(other)], x[0, 0, 5, 40 : 40 + len(group)] = other, group
    with pytest.raises(kivi.errors.MetadataOverflowError, match="request 0, head 0, token 5, channels 32 to 63 has values") as caught:
        kivi.get_backend(backend).quantize(x, spec, "value")
    assert values in str(caught.value)
