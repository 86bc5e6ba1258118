"""Any history of cache operations against the naive model of the conformance suite, which keeps plain lists of tokens.

Lengths, codes, scales, origins and floating rows must be equal, outputs must lie within the derived bound, and the books must
balance after every step: references of pages, and bytes measured against formula plus padding.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kivi
from kivi.conformance import bounds, model, oracle
from kivi.dtypes import np_dtype

HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 1, 6, 5


class Histories(RuleBasedStateMachine):
    @initialize(
        order=st.sampled_from(["attend_then_seal", "seal_then_attend"]),
        numerics=st.sampled_from(["portable", "staged"]),
        bits=st.sampled_from([(1, 4), (2, 2), (3, 1), (8, 3)]),
        residuals=st.sampled_from([(4, 4), (4, 7), (6, 6)]),
        layout=st.sampled_from(["auto", "lanes32", "hp16", "bytes_lsb"]),
        dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
        batch=st.integers(1, 3),
    )
    def start(self, order, numerics, bits, residuals, layout, dtype, batch):
        metadata = "input" if numerics == "staged" else "float16"
        self.spec = kivi.CacheSpec(name="machine").override(
            {
                "order": order,
                "numerics": numerics,
                "packing.layout": layout,
                "key.bits": bits[0],
                "key.group": 2,
                "key.residual": residuals[0],
                "key.metadata": metadata,
                "value.bits": bits[1],
                "value.group": 4,
                "value.residual": residuals[1],
                "value.metadata": metadata,
            }
        )
        self.dtype = dtype
        self.cache = kivi.KVCache(
            self.spec, batch=batch, q_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, value_head_dim=VALUE_DIM, dtype=dtype
        )
        self.naive = model.NaiveCache(self.spec, batch)
        self.aside: list = []
        self.random = np.random.default_rng(len(layout) + sum(bits) + batch)

    def _rows(self, heads: int, n: int, dim: int) -> np.ndarray:
        return self.random.normal(0.3, 1.0, (self.cache.batch, heads, n, dim)).astype(np_dtype(self.dtype))

    def _attend(self, counts: list[int], commit: bool) -> None:
        counts = [counts[b % len(counts)] for b in range(self.cache.batch)]
        n = max(1, *counts)
        q, k, v = self._rows(HEADS, n, DIM), self._rows(KV_HEADS, n, DIM), self._rows(KV_HEADS, n, VALUE_DIM)
        out = self.cache.attend(q, k, v, counts=counts, commit=commit)
        assert out.dtype == q.dtype
        for b, seen in enumerate(self.naive.attend(q, k, v, counts, commit)):
            assert not out[b, :, counts[b] :].any()
            if seen is None:
                continue
            for h, exact in enumerate(oracle.attend(seen, DIM**-0.5)):
                limit = bounds.output_bound(exact, bounds.Numerics(accumulate="float64"), self.dtype).total
                assert (np.abs(out[b, h, : counts[b]].astype(np.float64) - exact.out) <= limit).all()

    @precondition(lambda self: not any(self.naive.pending(b) for b in range(self.cache.batch)))
    @rule(counts=st.lists(st.integers(0, 15), min_size=1, max_size=3))
    def attend(self, counts):
        self._attend(counts, commit=True)

    @precondition(lambda self: not any(self.naive.pending(b) for b in range(self.cache.batch)))
    @rule(steps=st.integers(1, 9))
    def decode(self, steps):
        for _ in range(steps):
            self._attend([1], commit=True)

    @rule(counts=st.lists(st.integers(0, 15), min_size=1, max_size=3))
    def speculate(self, counts):
        self._attend(counts, commit=False)

    @rule(n=st.none() | st.integers(0, 12))
    def commit(self, n):
        self.cache.commit(n)
        self.naive.commit(n)

    @rule(data=st.data())
    def commit_each(self, data):
        keep = [data.draw(st.integers(0, self.naive.pending(b))) for b in range(self.cache.batch)]
        self.cache.commit(keep)
        self.naive.commit(keep)

    @rule()
    def rollback(self):
        self.cache.rollback()
        self.naive.rollback()

    @precondition(lambda self: not any(self.naive.pending(b) for b in range(self.cache.batch)))
    @rule(data=st.data())
    def crop(self, data):
        lengths = [data.draw(st.integers(0, self.naive.lengths(b)["tokens"])) for b in range(self.cache.batch)]
        self.cache.crop(lengths)
        self.naive.crop(lengths)

    @precondition(lambda self: not any(self.naive.pending(b) for b in range(self.cache.batch)))
    @rule(data=st.data())
    def reorder(self, data):
        b = self.cache.batch
        index = data.draw(st.lists(st.integers(0, b - 1), min_size=b, max_size=b))
        self.cache.reorder(index)
        self.naive.reorder(index)

    @precondition(lambda self: not any(self.naive.pending(b) for b in range(self.cache.batch)))
    @rule(data=st.data())
    def select(self, data):
        index = data.draw(st.lists(st.integers(0, self.cache.batch - 1), min_size=1, max_size=3))
        self.cache.select(index)
        self.naive.select(index)

    @precondition(lambda self: self.cache.batch == 1 and not self.naive.pending(0))
    @rule(n=st.integers(1, 3))
    def repeat(self, n):
        self.cache.repeat(n)
        self.naive.repeat(n)

    @precondition(lambda self: not any(self.naive.pending(b) for b in range(self.cache.batch)))
    @rule()
    def fork(self):
        """Go on with the child; the parent must not notice what the child does."""
        if len(self.aside) < 2:
            self.aside.append((self.cache, self.naive))
            self.cache, self.naive = self.cache.fork(), self.naive.fork()

    @precondition(lambda self: self.aside)
    @rule()
    def swap(self):
        self.aside.insert(0, (self.cache, self.naive))
        self.cache, self.naive = self.aside.pop()

    @precondition(lambda self: not any(self.naive.pending(b) for b in range(self.cache.batch)))
    @rule()
    def move(self):
        self.cache.to(kivi.get_backend("reference"))

    @rule()
    def reset(self):
        self.cache.reset()
        self.naive.reset()

    @invariant()
    def equal(self):
        if not hasattr(self, "cache"):
            return
        for cache, naive in [(self.cache, self.naive), *self.aside]:
            for b in range(cache.batch):
                assert dict(cache.lengths(b)) == naive.lengths(b)
                assert cache.pending(b) == naive.pending(b)
                _compare(cache, naive, b)
            memory = cache.memory()
            assert memory["formula"] + sum(memory["padding"].values()) == memory["measured"] == cache.nbytes

    @invariant()
    def references(self):
        if not hasattr(self, "cache"):
            return
        caches = [self.cache, *(cache for cache, _ in self.aside)]
        for pool in {id(c.pool): c.pool for c in caches}.values():
            uses = [0] * len(pool.refs)
            for cache in caches:
                for b in range(cache.batch):
                    for page, _, _ in cache._state.rows(b) if cache.pool is pool else []:
                        uses[page] += 1
                    assert cache.pool is not pool or all(pool.refs[p] == 1 for p in cache._state.open_pages(b))
            assert pool.refs == uses
            assert sorted(pool._free) == [p for p, n in enumerate(uses) if n == 0]


def _compare(cache: kivi.KVCache, naive: model.NaiveCache, b: int) -> None:
    sealed, residual = cache.sealed(b), cache.residual(b)
    for which in ("key", "value"):
        expected = naive.sealed(b, which)
        assert (expected is None) == (sealed[which] == [])
        group = (cache.spec.key if which == "key" else cache.spec.value).group
        at = 0
        for first, qt in sealed[which]:
            assert first == at
            at += qt.tokens
            span = slice(first, at)
            assert np.array_equal(qt.codes()[0], expected.codes[:, span])
            axis, size = (1, qt.tokens) if which == "key" else (2, qt.shape[3])
            for ours, theirs in ((qt.scale, expected.scale), (qt.origin, expected.origin)):
                spread = np.take(np.repeat(ours[0], group, axis=axis), range(size), axis=axis)
                assert np.array_equal(spread, theirs[:, span])
                assert spread.dtype == theirs.dtype
        assert at == naive.lengths(b)[f"{which}_sealed"]
        floating = naive.residual(b, which)
        assert residual[which].shape[1] == naive.lengths(b)[f"{which}_residual"]
        assert floating is None or np.array_equal(residual[which], floating)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=300, stateful_step_count=20)
