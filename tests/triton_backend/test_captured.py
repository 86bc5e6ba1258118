"""Captured decode steps: the state of plain steps, no waiting in between, and errors that come late but put everything back.

Under the interpreter a captured step plays its launches again; on a device the same launches are a CUDA graph.
"""

from __future__ import annotations

import numpy as np
import pytest

import kivi
from kivi import errors
from kivi.conformance import bounds, model, oracle

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SHAPE = {"batch": 2, "q_heads": 2, "kv_heads": 1, "head_dim": 8, "dtype": "float32"}
FP32 = bounds.Numerics(accumulate="float32", exp_ulp=2.0)
COUNTS = ("tokens", "pending", "key_sealed", "value_sealed", "pages")


def spec_of(**changes):
    sides = {f"{side}.{name}": value for side in ("key", "value") for name, value in (("group", 4), ("residual", 8))}
    return kivi.CacheSpec(name="captured").override({**sides, "value.residual": 10, **changes})


def rows(rng, n):
    return [rng.normal(0.2, 1.0, (2, heads, n, 8)).astype(np.float32) for heads in (2, 1, 1)]


def filled(spec, tokens, rng, **more):
    """A cache on Triton's interpreter with two requests of different length, and the naive model of it."""
    cache = kivi.KVCache(spec, backend="triton", mode="interpreter", **SHAPE, **more)
    naive = model.NaiveCache(spec, 2)
    given = rows(rng, max(tokens))
    cache.attend(*given, counts=tokens)
    naive.attend(*given, tokens)
    return cache, naive


def same_state(cache, naive):
    for b in range(2):
        for which in ("key", "value"):
            want = naive.sealed(b, which)
            got = [qt.codes()[0] for _, qt in cache.sealed(b)[which]]
            assert np.array_equal(np.concatenate(got, 1), want.codes) if want else not got
            floating, rest = cache.residual(b)[which], naive.residual(b, which)
            assert floating.shape[1] == 0 if rest is None else np.array_equal(floating, rest)


@pytest.mark.parametrize("order", ["attend_then_seal", "seal_then_attend"])
def test_a_captured_step_is_a_step(order):
    """Across key seals of both requests, the growth of the table and of the pool."""
    rng = np.random.default_rng(0)
    cache, naive = filled(spec_of(order=order), [13, 6], rng)
    q, k, v = rows(rng, 1)
    step = cache.capture(q, k, v)
    for _ in range(28):
        for held, new in zip((q, k, v), rows(rng, 1), strict=True):
            held[...] = new
        out = step()
        for b, seen in enumerate(naive.attend(q, k, v, [1, 1])):
            for h, exact in enumerate(oracle.attend(seen, cache.geometry.scale)):
                limit = bounds.output_bound(exact, FP32, "float32").total
                assert (np.abs(out[b, h].astype(np.float64) - exact.out) <= limit).all()
    same_state(cache, naive)
    assert [cache.lengths(b).tokens for b in range(2)] == [41, 34]
    cache.attend(*rows(rng, 3))  # and it goes on as any cache
    assert cache.lengths(1).tokens == 37


def test_a_step_waits_for_nothing(monkeypatch):
    rng = np.random.default_rng(1)
    cache, _ = filled(spec_of(), [15, 15], rng)
    step = cache.capture(*rows(rng, 1))
    step()
    backend = type(cache.backend)
    for name in ("to_host", "first_bad"):
        monkeypatch.setattr(backend, name, lambda *_, name=name: pytest.fail(f"{name} waits"))
    monkeypatch.setattr(backend, "give", lambda self, a, like: a)
    for _ in range(7):
        step()
    monkeypatch.undo()
    assert cache.lengths(0) == (23, 16, 7, 13, 10)


@pytest.mark.parametrize(("tensor", "name"), list(enumerate(["q", "key", "value"])))
def test_a_bad_step_is_taken_back(tensor, name):
    rng = np.random.default_rng(2)
    cache, naive = filled(spec_of(), [6, 5], rng)
    arrays = rows(rng, 1)
    step = cache.capture(*arrays)
    for i in range(5):
        for held, new in zip(arrays, rows(rng, 1), strict=True):
            held[...] = new
        if i == 3:
            arrays[tensor][1, 0, 0, 6] = np.nan
        elif i < 3:
            naive.attend(*arrays, [1, 1])
        step()
    free = cache.pool.free_pages
    with pytest.raises(errors.NonFiniteError, match=f"{name} held .* request 1, head 0, token 8, channel 6; .* before that step"):
        cache.lengths(0)
    assert cache.lengths(0).tokens == 9
    assert cache.pool.free_pages >= free
    same_state(cache, naive)
    arrays[tensor][...] = 1.0
    step()
    naive.attend(*arrays, [1, 1])
    same_state(cache, naive)


def test_strict_raises_at_once():
    rng = np.random.default_rng(3)
    cache, _ = filled(spec_of(), [4, 4], rng)
    arrays = rows(rng, 1)
    step = cache.capture(*arrays, strict=True)
    step()
    arrays[1][0, 0, 0, 0] = np.inf
    with pytest.raises(errors.NonFiniteError, match="token 5"):
        step()
    assert cache.lengths(0).tokens == 5


def test_the_flags_are_read_every_eighth_step():
    rng = np.random.default_rng(4)
    cache, _ = filled(spec_of(), [4, 4], rng)
    arrays = rows(rng, 1)
    step = cache.capture(*arrays)
    arrays[0][0, 0, 0, 0] = np.nan
    for _ in range(8):
        step()
    with pytest.raises(errors.NonFiniteError, match="q held"):
        step()
    assert cache.lengths(0).tokens == 4


def test_overflow_rejected_and_saturated():
    for overflow in ("reject", "saturate"):
        rng = np.random.default_rng(5)
        cache, _ = filled(spec_of(overflow=overflow), [7, 7], rng)
        arrays = rows(rng, 1)
        step = cache.capture(*arrays)
        arrays[1][0, 0, 0, 2] = 3e5  # the eighth key: its block is sealed in fp16
        step()
        if overflow == "saturate":
            assert cache.memory()["clamped"] > 0
        else:
            with pytest.raises(errors.MetadataOverflowError, match="the step after 7 tokens"):
                cache.lengths(0)
            assert cache.lengths(0).tokens == 7


def test_what_cannot_be_captured():
    rng = np.random.default_rng(6)
    cache, _ = filled(spec_of(), [4, 4], rng)
    with pytest.raises(errors.UnsupportedError, match="one token a request, and q has 2"):
        cache.capture(*rows(rng, 2))
    with pytest.raises(errors.ShapeError):
        cache.capture(*rows(rng, 1)[:2], rows(rng, 2)[2])
    with pytest.raises(errors.UnsupportedError, match=r"'reference'.*cannot capture"):
        kivi.KVCache(spec_of(), backend="reference", **SHAPE).capture(*rows(rng, 1))
    step = cache.capture(*rows(rng, 1))
    cache.attend(*rows(rng, 1), commit=False)
    with pytest.raises(errors.PendingTokensError, match="a captured step"):
        step()
    cache.rollback()
    step()
    cache.select([0])
    with pytest.raises(errors.StateError, match=r"captured for 2 requests .* now has 1"):
        step()
    assert cache.lengths(0).tokens == 5
    cache.repeat(2)
    cache.to("reference")
    with pytest.raises(errors.StateError, match=r"on <kivi backend triton .*, and the cache now has 2 on <kivi backend reference"):
        step()
    full, _ = filled(spec_of(), [4, 4], rng, max_tokens=5)
    step = full.capture(*rows(rng, 1))
    step()
    with pytest.raises(errors.CapacityError):
        step()
    assert full.lengths(0).tokens == 5
