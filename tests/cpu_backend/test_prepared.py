"""Decode steps that are prepared: bit for bit those of the general path, whatever happens between them, and errors are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kivi
from kivi.backends.cpu import threads
from kivi.dtypes import np_dtype
from kivi.errors import CapacityError, DtypeError, KiviError, NonFiniteError, PendingTokensError, ShapeError
from kivi.prepared import PreparedStep

HEADS, DIMS = (4, 2, 2), (24, 24, 16)
SPEC = {"key.group": 8, "key.residual": 16, "value.group": 8, "value.residual": 24, "value.bits": 4}


class General(PreparedStep):
    """Leaves every step to the general path."""

    def attend(self, cache, q, k, v):
        return None


class Counted(PreparedStep):
    """Counts the steps that it does."""

    steps = 0

    def attend(self, cache, q, k, v):
        out = super().attend(cache, q, k, v)
        self.steps += out is not None
        return out


def make(changes: dict, dtype: str = "float32", batch: int = 1, **more) -> kivi.KVCache:
    spec = kivi.CacheSpec(name="steps").override({**SPEC, **changes})
    shape = {"batch": batch, "q_heads": HEADS[0], "kv_heads": HEADS[1], "head_dim": DIMS[0], "value_head_dim": DIMS[2], "dtype": dtype}
    return kivi.KVCache(spec, backend="cpu", **shape, **more)


def pair(changes: dict, dtype: str, batch: int, **more) -> tuple[kivi.KVCache, kivi.KVCache, Counted]:
    ours, plain = (make(changes, dtype, batch, **more) for _ in range(2))
    ours._prepared, plain._prepared = counted, _ = Counted(), General()
    return ours, plain, counted


def rows(rng: np.random.Generator, batch: int, n: int, dtype: str) -> Any:
    """q, k and v."""
    return [rng.normal(0, 2, (batch, heads, n, dim)).astype(np_dtype(dtype)) for heads, dim in zip(HEADS, DIMS)]


def result(call) -> object:
    """What a call gives, or says."""
    try:
        out = call()
    except KiviError as error:
        return type(error), str(error)
    return None if out is None else out.tobytes()


def state(cache: kivi.KVCache) -> list[object]:
    out: list[object] = [cache.memory()["clamped"]]
    for b in range(cache.batch):
        out += [cache.lengths(b), cache.pending(b), *(rows.tobytes() for rows in cache.residual(b).values())]
        for segments in cache.sealed(b).values():
            out += [(start, t.words.tobytes(), t.scale.tobytes(), t.origin.tobytes()) for start, t in segments]
    return out


def between(rng: np.random.Generator, batch: int) -> list:
    """Calls that happen now and then between two steps."""
    chance = rng.random()
    if chance < 0.03:
        cut = rng.random(batch)
        return [lambda c: c.crop([int(n * c.lengths(b).tokens) for b, n in enumerate(cut)])]
    if chance < 0.05:
        order = rng.integers(0, batch, batch)
        return [lambda c: c.reorder(order)]
    if chance < 0.07:
        draft, keep = rows(rng, batch, 3, "float32"), int(rng.integers(0, 4))
        return [lambda c: c.attend(*(x.astype(np_dtype(c.geometry.dtype)) for x in draft), commit=False), lambda c: c.commit(keep)]
    return []


@pytest.mark.parametrize(
    ("changes", "dtype", "batch", "count"),
    [
        ({}, "float32", 1, 1),
        ({}, "float32", 1, 2),
        ({"order": "seal_then_attend"}, "float16", 2, 1),
        ({"nonfinite": "propagate", "overflow": "saturate"}, "float32", 3, 2),
        ({"overflow": "saturate", "packing.layout": "official_int32", "order": "seal_then_attend"}, "bfloat16", 1, 2),
        ({"packing.layout": "official_int32"}, "float32", 2, 1),
    ],
)
def test_random_events(changes, dtype, batch, count, monkeypatch):
    """With two threads every phase is shared, however short."""
    monkeypatch.setenv("KIVI_CPU_THREADS", str(count))
    monkeypatch.setattr(threads, "WORTH", 0.0)
    rng = np.random.default_rng(batch)
    ours, plain, counted = pair(changes, dtype, batch, max_tokens=150)
    for turn in range(80):
        given = rows(rng, batch, 1 if rng.random() < 0.93 else int(rng.integers(2, 40)), dtype)
        if rng.random() < 0.1:
            given[int(rng.integers(0, 3))].reshape(-1)[3] = rng.choice([np.inf, np.nan, 60000.0, -65504.0])
        if rng.random() < 0.2:
            given[0] = np.swapaxes(np.ascontiguousarray(np.swapaxes(given[0], 1, 2)), 1, 2)
        for event in [lambda c, given=given: c.attend(*given), *between(rng, batch)]:
            a, b = (result(lambda c=c, event=event: event(c)) for c in (ours, plain))
            assert a == b
        if turn % 4 == 3:
            assert state(ours) == state(plain)
    assert counted.steps > 40


def test_what_is_refused_changes_nothing():
    rng = np.random.default_rng(1)
    cache = make({}, max_tokens=36)
    for n in (20, 1, 1):
        cache.attend(*rows(rng, 1, n, "float32"))
    before = state(cache)
    q, k, v = rows(rng, 1, 1, "float32")
    bad = k.copy()
    bad[0, 1, 0, 5] = np.nan
    with pytest.raises(NonFiniteError, match="key holds nan at request 0, head 1, token 22, channel 5"):
        cache.attend(q, bad, v)
    with pytest.raises(DtypeError, match="float16"):
        cache.attend(q.astype(np.float16), k, v)
    with pytest.raises(ShapeError, match="k has shape"):
        cache.attend(q, k[:, :1], v)
    with pytest.raises(DtypeError, match="list"):
        cache.attend(q, k.tolist(), v)
    with pytest.raises(DtypeError, match="one library"):
        cache.attend(q, torch.from_numpy(k), v)
    assert state(cache) == before
    cache.attend(q, k, v, commit=False)
    with pytest.raises(PendingTokensError):
        cache.attend(q, k, v)
    cache.rollback()
    for _ in range(14):
        cache.attend(*rows(rng, 1, 1, "float32"))
    with pytest.raises(CapacityError, match="max_tokens = 36"):
        cache.attend(q, k, v)
    assert cache.lengths(0).tokens == 36


def test_forks_and_moved_caches_have_steps_of_their_own():
    rng = np.random.default_rng(2)
    ours, plain, _ = pair({}, "float32", 1)
    ours._prepared = PreparedStep()
    for n in (37, 1, 1):
        given = rows(rng, 1, n, "float32")
        assert ours.attend(*given).tobytes() == plain.attend(*given).tobytes()
    twins = [c.fork() for c in (ours, plain)]
    twins[1]._prepared = General()
    for mine, theirs in ((ours, plain), twins, (ours, plain)):
        given = rows(rng, 1, 1, "float32")
        assert mine.attend(*given).tobytes() == theirs.attend(*given).tobytes()
    assert state(twins[0]) == state(twins[1])
    back = ours.to("reference").to("cpu")
    given = rows(rng, 1, 1, "float32")
    assert back.attend(*given).tobytes() == plain.attend(*given).tobytes()


def test_tensors_in_tensors_out():
    """Of torch, also those that need a gradient; the output is fresh each time."""
    rng = np.random.default_rng(3)
    ours, plain, counted = pair({}, "bfloat16", 1)
    outs: list[Any] = []
    for n in (37, 1, 1, 1):
        given: Any = [torch.from_numpy(x).bfloat16() for x in rows(rng, 1, n, "float32")]
        given[0].requires_grad_(True)
        outs.append(ours.attend(*given))
        assert isinstance(outs[-1], torch.Tensor)
        assert torch.equal(outs[-1], plain.attend(*given))
    assert counted.steps == 3
    assert not torch.equal(outs[-1], outs[-2])


def test_a_cache_goes_when_its_last_reference_does():
    """What is prepared does not refer to the cache, so its pages are given back at once."""
    rng = np.random.default_rng(4)
    cache = make({})
    for n in (37, 1, 1):
        cache.attend(*rows(rng, 1, n, "float32"))
    pool = cache.pool
    assert pool.free_pages < len(pool.refs)
    del cache
    assert pool.free_pages == len(pool.refs)


def test_another_batch_is_another_shape():
    """What was checked for one batch is not taken for another: a row is never broadcast into two requests."""
    rng, cache = np.random.default_rng(7), make({})
    one, two = rows(rng, 1, 1, "float32"), rows(rng, 2, 1, "float32")
    for _ in range(5):
        cache.attend(*one)
    cache.repeat(2)
    with pytest.raises(ShapeError):
        cache.attend(*one)
    assert cache.lengths(1).tokens == 5
    cache.attend(*two)
    cache.select([0])
    with pytest.raises(ShapeError):
        cache.attend(*two)
    assert cache.lengths(0).tokens == 6
