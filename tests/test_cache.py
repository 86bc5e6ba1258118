"""What a cache promises: the schedule, chunk invariance, isolation of requests, and bad input that changes nothing."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

import kivi
from kivi.backends.reference.driver import ReferenceBackend
from kivi.errors import (
    BackendError,
    CapacityError,
    DtypeError,
    InputError,
    KiviError,
    MetadataOverflowError,
    NonFiniteError,
    NotImplementedYetError,
    PendingTokensError,
    ShapeError,
    UnknownBackendError,
    UnsupportedError,
)

TEACHING = kivi.load_spec("teaching")


def make(spec="teaching", batch=1, q_heads=2, kv_heads=1, head_dim=8, dtype="float32", **rest):
    return kivi.KVCache(spec, batch=batch, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, **rest)


def rows(cache, n, seed=0, dtype=None):
    rng, g = np.random.default_rng(seed), cache.geometry
    dims = ((g.q_heads, g.head_dim), (g.kv_heads, g.head_dim), (g.kv_heads, g.value_head_dim))
    kind = ml_dtypes.bfloat16 if g.dtype == "bfloat16" else g.dtype
    return [rng.standard_normal((cache.batch, heads, n, dim)).astype(dtype or kind) for heads, dim in dims]


def stored(cache):
    """Everything that a cache has sealed or keeps floating, as bytes: equal means identical state."""
    out = []
    for b in range(cache.batch):
        out.append(tuple(cache.lengths(b)))
        for which in ("key", "value"):
            for first, qt in cache.sealed(b)[which]:
                out += [first, qt.words.tobytes(), qt.scale.tobytes(), qt.origin.tobytes()]
            out.append(cache.residual(b)[which].tobytes())
    return out


# -- the schedule -------------------------------------------------------------------------------------------------------


def test_frontiers_of_the_worked_example():
    """R=4, G=2: keys kept 3, 0, 1, ..., values kept at most 4 (SPEC 4)."""
    cache = make()
    kept = {}
    for t in range(1, 10):
        cache.attend(*rows(cache, 1, t))
        length = cache.lengths(0)
        kept[t] = (length.key_residual, length.value_residual)
        assert length["tokens"] == t
        assert length.key_sealed == 4 * (t // 4)
        assert length.value_sealed == max(0, t - 4)
    assert {t: kept[t] for t in (3, 4, 5, 8, 9)} == {3: (3, 3), 4: (0, 4), 5: (1, 4), 8: (0, 4), 9: (1, 4)}


def test_one_softmax_over_all_zones():
    """Eight logits 0 and one ln 9, values 1..9: 117/17, where separate softmaxes give 13.5 (SPEC 5)."""
    cache = make(q_heads=1, head_dim=2, scale=1.0)
    for t in range(1, 10):
        q = np.array([[[[1.0, 0.0]]]], np.float32)
        k = np.array([[[[math.log(9) if t == 9 else 0.0, 0.0]]]], np.float32)
        out = cache.attend(q, k, np.full((1, 1, 1, 2), t, np.float32))
    assert cache.lengths(0).value_sealed == 5
    assert out.ravel() == pytest.approx([117 / 17] * 2, rel=1e-6)


@pytest.mark.parametrize("order", ["attend_then_seal", "seal_then_attend"])
def test_any_chunking_seals_the_same(order):
    """1,000 tokens at once, one by one, and in random chunks: identical words, scales, origins, rows (field reports 17-20)."""
    spec = kivi.load_spec("kivi-2bit").override({"order": order, "key.group": 16, "key.residual": 64, "value.residual": 64})
    whole = make(spec, dtype="float16", head_dim=16)
    q, k, v = rows(whole, 1000)
    whole.attend(q, k, v)
    rng = np.random.default_rng(3)
    cuts = [
        range(1001),
        [0, 7, 40, 1000],
        sorted({0, 1000, *rng.integers(1, 1000, 40).tolist()}),
        sorted({0, 1000, *rng.integers(1, 1000, 9).tolist()}),
    ]
    for cut in cuts:
        cache = make(spec, dtype="float16", head_dim=16)
        for a, b in zip(cut, list(cut)[1:], strict=False):
            cache.attend(*(x[:, :, a:b] for x in (q, k, v)))
        assert stored(cache) == stored(whole)
    speculative = make(spec, dtype="float16", head_dim=16)
    at = 0
    while at < 1000:
        n = min(int(rng.integers(1, 90)), 1000 - at)
        speculative.attend(*(x[:, :, at : at + n] for x in (q, k, v)), commit=False)
        keep = int(rng.integers(0, n + 1))
        speculative.commit(keep)
        at += keep
    assert stored(speculative) == stored(whole)


def test_sealed_keys_are_really_quantized():
    """Field report 18: key error after the first block is not zero."""
    cache = make(TEACHING.override({"key.group": 4}), head_dim=16)
    q, k, v = rows(cache, 200)
    cache.attend(q, k, v)
    [(first, qt)] = cache.sealed(0)["key"]
    error = np.abs(qt.dequantize()[0] - k[0, :, : qt.tokens]).max(axis=(0, 2))
    assert first == 0
    assert qt.tokens == 200
    assert (error > 1e-3).all()


def test_requests_do_not_see_each_other():
    """Field report 23: request B's keys times 1000 change nothing of A."""
    caches = [make(batch=2), make(batch=2)]
    outs = []
    for factor, cache in zip((1, 1000), caches, strict=True):
        q, k, v = rows(cache, 11)
        k[1] *= factor
        outs.append([cache.attend(q, k, v, counts=[9, 11])] + [cache.attend(*rows(cache, 1, s)) for s in range(9)])
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(*outs, strict=True))
    assert caches[0].sealed(0)["key"][0][1].words.tobytes() == caches[1].sealed(0)["key"][0][1].words.tobytes()


def test_ragged_batch_equals_solo_runs():
    """Field reports 24, 26, 30: padding rows hold 1e4 or NaN and are never read."""
    cache = make(batch=3, kv_heads=2, q_heads=4)
    solo = [make(kv_heads=2, q_heads=4) for _ in range(3)]
    for step, counts in enumerate([(8, 5, 0), (1, 3, 2), (1, 1, 1), (0, 4, 6), (5, 0, 1)]):
        q, k, v = rows(cache, max(counts), step)
        for x, filler in ((q, np.nan), (k, 1e4), (v, np.inf)):
            for b, n in enumerate(counts):
                x[b, :, n:] = filler
        out = cache.attend(q, k, v, counts=counts)
        for b, n in enumerate(counts):
            assert not out[b, :, n:].any()
            if n:
                alone = solo[b].attend(*(x[b : b + 1, :, :n] for x in (q, k, v)))
                np.testing.assert_allclose(out[b, :, :n], alone[0], rtol=0, atol=2e-6)
    for b in range(3):
        cache_b = cache.fork()
        cache_b.select([b])
        assert stored(cache_b) == stored(solo[b])


def test_torch_in_torch_out():
    cache = make(dtype="bfloat16")
    q, k, v = (torch.from_numpy(x).to(torch.bfloat16) for x in rows(cache, 9, dtype=np.float32))
    out = cache.attend(q, k, v)
    assert isinstance(out, torch.Tensor)
    assert (out.dtype, tuple(out.shape)) == (torch.bfloat16, (1, 2, 9, 8))
    assert isinstance(cache.residual(0)["key"], torch.Tensor)
    assert isinstance(cache.sealed(0)["key"][0][1].words, torch.Tensor)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)])
def test_dtypes_of_other_libraries_name_themselves(dtype):
    assert make(dtype=dtype).geometry.dtype == "bfloat16"


def test_what_ran_is_on_the_cache():
    ran = make().ran
    assert (ran.backend, ran.mode, ran.device, ran.layout) == ("reference", "device", "cpu", "bytes_lsb")
    assert make("kivi-2bit", dtype="float16").ran.layout == "official_int32"


# -- edits --------------------------------------------------------------------------------------------------------------


def test_crop_keeps_sealed_tokens_sealed():
    """Field report 21, with the clause of SPEC 4: no requantization, a cut page keeps its shorter length."""
    cache = make()
    cache.attend(*rows(cache, 10))
    before = cache.sealed(0)
    cache.crop(7)
    assert tuple(cache.lengths(0)) == (7, 7, 0, 6, 1)
    [(_, key)] = cache.sealed(0)["key"]
    assert np.array_equal(key.codes(), before["key"][0][1].codes()[:, :, :7])
    cache.attend(*rows(cache, 4, 1))
    assert [(first, qt.tokens) for first, qt in cache.sealed(0)["key"]] == [(0, 7), (7, 4)]
    assert np.array_equal(cache.sealed(0)["key"][0][1].scale, key.scale)
    cache.crop(0)
    assert cache.sealed(0) == {"key": [], "value": []}
    fresh = make()
    for c in (cache, fresh):
        c.attend(*rows(c, 6, 2))
    assert stored(cache) == stored(fresh)


def test_reorder_select_repeat_move_everything():
    cache = make(batch=3)
    cache.attend(*rows(cache, 11), counts=[11, 7, 2])
    rowwise = []
    for b in range(3):
        one = cache.fork()
        one.select([b])
        rowwise.append(stored(one))
    cache.reorder([2, 0, 0])
    assert [cache.lengths(b).tokens for b in range(3)] == [2, 11, 11]
    cache.repeat(2)
    cache.select([5, 0, 1])
    for b, source in enumerate([0, 2, 2]):
        one = cache.fork()
        one.select([b])
        assert stored(one) == rowwise[source]


def test_fork_shares_closed_pages_and_nothing_else():
    cache = make()
    cache.attend(*rows(cache, 30))
    pages = len(cache.pool.refs) - cache.pool.free_pages
    twin = cache.fork()
    assert len(cache.pool.refs) - cache.pool.free_pages == pages + 1  # the one open page
    before = stored(cache)
    for step in range(20):
        twin.attend(*rows(twin, 1, step))
    assert stored(cache) == before
    assert cache.pool.nbytes < cache.nbytes + twin.nbytes
    del twin
    assert sorted(cache.pool.refs) == [0] * cache.pool.free_pages + [1] * 7


def test_rollback_restores_the_state():
    cache = make()
    cache.attend(*rows(cache, 10))
    before = stored(cache)
    cache.attend(*rows(cache, 50, 1), commit=False)
    assert cache.pending(0) == 50
    assert stored(cache) == before
    cache.rollback()
    assert stored(cache) == before


def test_reset_leaves_nothing():
    """Field report 39."""
    cache, fresh = make(), make()
    cache.attend(*rows(cache, 30))
    cache.attend(*rows(cache, 3), commit=False)
    cache.reset()
    assert cache.pool.free_pages == len(cache.pool.refs)
    outs = [c.attend(*rows(c, 9, 4)) for c in (cache, fresh)]
    assert np.array_equal(*outs)
    assert stored(cache) == stored(fresh)


# -- bad input ----------------------------------------------------------------------------------------------------------


def spoil(x, value, at=(0, 0, 1, 3)):
    x[at] = value
    return x


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda q, k, v: (spoil(q, np.nan), k, v), NonFiniteError, ["q", "request 0, head 0, token 11, channel 3", "propagate"]),
        (lambda q, k, v: (q, spoil(k, np.inf), v), NonFiniteError, ["key", "inf", "token 11"]),
        (lambda q, k, v: (q, k, spoil(v, -np.inf)), NonFiniteError, ["value", "-inf"]),
        (lambda q, k, v: (q, spoil(k, -70000), v), MetadataOverflowError, ["key", "-70000", "key.metadata = 'bfloat16'", "saturate"]),
        (lambda q, k, v: (q, k, spoil(v, -70000)), MetadataOverflowError, ["value.metadata = 'bfloat16'"]),
        (lambda q, k, v: (q, k[:, :, :1], v), ShapeError, ["k", "(1, 1, 1, 8)"]),
        (lambda q, k, v: (q[0], k, v), ShapeError, ["q"]),
        (lambda q, k, v: (q[:, :, :0], k[:, :, :0], v[:, :, :0]), ShapeError, ["n >= 1"]),
        (lambda q, k, v: (q[:, :1], k, v), ShapeError, ["q"]),
        (lambda q, k, v: (q, k.astype(np.float16), v), DtypeError, ["k", "float16", "float32"]),
        (lambda q, k, v: (q.astype(np.float64), k, v), DtypeError, ["float64"]),
        (lambda q, k, v: (q, torch.from_numpy(k), v), DtypeError, ["library"]),
        (lambda q, k, v: (q, k.tolist(), v), DtypeError, ["list"]),
    ],
)
def test_bad_arrays_change_nothing(change, error, words):
    cache = make(TEACHING.override({"key.metadata": "float16", "value.metadata": "float16"}))
    cache.attend(*rows(cache, 10))
    before, nbytes = stored(cache), cache.nbytes
    with pytest.raises(error) as caught:
        cache.attend(*change(*rows(cache, 3, 1)))
    assert isinstance(caught.value, KiviError)
    for word in words:
        assert word in str(caught.value)
    assert (stored(cache), cache.nbytes) == (before, nbytes)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c: c.attend(*rows(c, 2), counts=[3]), ShapeError),
        (lambda c: c.attend(*rows(c, 2), counts=[-1]), ShapeError),
        (lambda c: c.attend(*rows(c, 2), counts=[1, 1]), ShapeError),
        (lambda c: c.attend(*rows(c, 2), counts=[1.0]), DtypeError),
        (lambda c: c.attend(*rows(c, 2), counts=[[1], [2, 3]]), DtypeError),
        (lambda c: c.crop(11), InputError),
        (lambda c: c.crop(-1), InputError),
        (lambda c: c.crop(2.0), DtypeError),
        (lambda c: c.crop([1, 2]), ShapeError),
        (lambda c: c.reorder([0, 0]), InputError),
        (lambda c: c.reorder([1]), InputError),
        (lambda c: c.select([]), InputError),
        (lambda c: c.repeat(0), InputError),
        (lambda c: c.commit(-1), InputError),
        (lambda c: c.commit([1]), InputError),
        (lambda c: c.lengths(1), InputError),
        (lambda c: c.sealed(-1), InputError),
        (lambda c: c.to("nope"), UnknownBackendError),
    ],
)
def test_bad_arguments_change_nothing(call, error):
    cache = make()
    cache.attend(*rows(cache, 10))
    before = stored(cache)
    with pytest.raises(error):
        call(cache)
    assert stored(cache) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.attend(*rows(c, 1)),
        lambda c: c.crop(1),
        lambda c: c.save("unused"),
        lambda c: c.fork(),
        lambda c: c.reorder([0]),
        lambda c: c.select([0]),
        lambda c: c.repeat(2),
        lambda c: c.to("reference"),
    ],
)
def test_pending_tokens_block(call):
    cache = make()
    cache.attend(*rows(cache, 3), commit=False)
    with pytest.raises(PendingTokensError, match=r"commit\(\) or rollback\(\)"):
        call(cache)
    cache.attend(*rows(cache, 1), commit=False)
    assert cache.pending(0) == 4


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"q_heads": 3, "kv_heads": 2}, ShapeError),
        ({"head_dim": 0}, InputError),
        ({"batch": 0}, InputError),
        ({"batch": 1.5}, InputError),
        ({"dtype": "float64"}, DtypeError),
        ({"dtype": np.int8}, DtypeError),
        ({"dtype": torch.float64}, DtypeError),
        ({"dtype": None}, DtypeError),
        ({"scale": float("nan")}, InputError),
        ({"max_tokens": 0}, InputError),
        ({"backend": "nope"}, UnknownBackendError),
        ({"backend": "reference", "mode": "interpreter"}, UnsupportedError),
        ({"backend": "reference", "device": "cuda:0"}, BackendError),
        ({"device": "cuda:0"}, UnsupportedError),
        ({"head_dim": 2048}, UnsupportedError),
    ],
)
def test_impossible_caches(arguments, error):
    """Field report 28: refused at construction, with the reason."""
    with pytest.raises(error):
        make(**arguments)


def test_max_tokens_and_max_pages():
    cache = make(max_tokens=12)
    cache.attend(*rows(cache, 12))
    before = stored(cache)
    with pytest.raises(CapacityError, match="max_tokens = 12"):
        cache.attend(*rows(cache, 1))
    assert stored(cache) == before
    cache = make(max_pages=2)
    cache.attend(*rows(cache, 11))
    before = stored(cache)
    with pytest.raises(CapacityError, match="pool is full"):
        cache.attend(*rows(cache, 1))
    assert stored(cache) == before
    cache.crop(4)
    cache.attend(*rows(cache, 1))


class Failing(ReferenceBackend):
    """Fails in the n-th array operation of its kind."""

    fail: dict[str, int]

    def _count(self, what):
        self.fail[what] = self.fail.get(what, 0) - 1
        if self.fail[what] == 0:
            raise RuntimeError(f"{what} broke")

    def attend(self, *args):
        self._count("attend")
        return super().attend(*args)

    def append(self, *args):
        super().append(*args)  # everything written, nothing committed
        self._count("append")
        return 0

    def gather(self, *args):
        self._count("gather")
        return super().gather(*args)


@pytest.mark.parametrize("order", ["attend_then_seal", "seal_then_attend"])
@pytest.mark.parametrize("what", ["attend", "append"])
@pytest.mark.parametrize("n", [1, 3, 40])
def test_a_step_that_fails_in_the_middle_leaves_the_state(order, what, n):
    backend = kivi.get_backend("reference")
    failing = Failing(backend.manifest, backend.mode, backend.device, backend.versions)
    failing.fail = {}
    spec = TEACHING.override({"order": order})
    cache, twin = make(spec, backend=failing), make(spec)
    for c in (cache, twin):
        c.attend(*rows(c, 10))
    before, free = stored(cache), cache.pool.free_pages - len(cache.pool.refs)
    failing.fail = {what: 1}
    with pytest.raises(BackendError, match=r"backend 'reference' \(mode device, cpu\) failed in attend: RuntimeError: .* broke"):
        cache.attend(*rows(cache, n, 1))
    assert stored(cache) == before
    assert cache.pool.free_pages - len(cache.pool.refs) == free
    for step in range(12):
        assert np.array_equal(cache.attend(*rows(cache, 1, step)), twin.attend(*rows(twin, 1, step)))
    assert stored(cache) == stored(twin)


def test_a_batch_edit_that_fails_leaves_the_state():
    backend = kivi.get_backend("reference")
    failing = Failing(backend.manifest, backend.mode, backend.device, backend.versions)
    failing.fail = {}
    cache = make(backend=failing)
    cache.attend(*rows(cache, 10))
    before, free = stored(cache), cache.pool.free_pages - len(cache.pool.refs)
    failing.fail = {"gather": 2}
    with pytest.raises(BackendError, match="failed in repeat"):
        cache.repeat(3)
    assert stored(cache) == before
    assert cache.pool.free_pages - len(cache.pool.refs) == free


def test_overflow_that_shows_at_the_seal():
    """A range that only the whole block has: the step is refused, the cache stays usable by cropping the cause away."""
    spec = TEACHING.override({"key.bits": 1, "key.metadata": "float16", "value.metadata": "float16"})
    cache = make(spec)
    for step in range(3):
        q, k, v = rows(cache, 1, step)
        k[:] = 60000 if step == 0 else -60000
        cache.attend(q, k, v)
    before = stored(cache)
    with pytest.raises(MetadataOverflowError, match="request 0, tokens 0 to 3"):
        cache.attend(*rows(cache, 1, 9))
    assert stored(cache) == before
    cache.crop(0)
    cache.attend(*rows(cache, 9))


def test_saturation_is_counted():
    cache = make(TEACHING.override({"overflow": "saturate", "key.metadata": "float16", "value.metadata": "float16"}))
    q, k, v = rows(cache, 9)
    v[0, 0, 2, 1] = -1e6
    out = cache.attend(q, k, v)
    assert np.isfinite(out).all()
    assert cache.memory()["clamped"] == 2  # an origin and the scale of its group


def test_layers_in_full_precision_come_later():
    with pytest.raises(NotImplementedYetError):
        make(TEACHING.override({"layers": {"0": "full"}}))
