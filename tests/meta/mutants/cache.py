"""Mutants of the schedule: what is sealed when, what is read in which state, what commit, rollback and ragged calls do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kivi.backend import Windows
from kivi.backends.reference import driver
from kivi.cache import KVCache
from kivi.conformance import Subject
from tests.meta.mutants import mutant


class OtherOrder(Subject):
    """Caches with the other order than the spec says."""

    def cache(self, spec, **geometry):
        other = {"attend_then_seal": "seal_then_attend", "seal_then_attend": "attend_then_seal"}[spec.order]
        return super().cache(spec.override({"order": other}), **geometry) if self.wrong(spec) else super().cache(spec, **geometry)

    def wrong(self, spec):
        return spec.order == self.only


def other_order(only: str) -> Subject:
    import kivi

    subject = OtherOrder(kivi.get_backend("reference"))
    subject.only = only
    return subject


@mutant
def seal_before_scores(patch):
    """attend_then_seal seals first."""
    return other_order("attend_then_seal")


@mutant
def scores_before_seal(patch):
    """seal_then_attend attends first."""
    return other_order("seal_then_attend")


def grow(patch, change) -> None:
    """Replace the frontiers that a step leads to: change(cache, old state, tokens, counts) -> (blocks, value_sealed)."""
    honest = KVCache._grow

    def wrong(self, state, tokens, counts, k, v):
        residual, value_residual = self.spec.key.residual, self.spec.value.residual
        blocks, value_sealed = change(self, state, tokens, counts)
        key_sealed = state.key_sealed + blocks * residual
        value_sealed = np.minimum(np.maximum(state.value_sealed, value_sealed), key_sealed)
        table, pages = self._extend_table(state, blocks)
        draft = replace(state, tokens=tokens, key_sealed=key_sealed, value_sealed=value_sealed, pages=pages, table=table)
        try:
            seals = [*self._key_seals(state, draft), *self._value_seals(state, draft)]
            target = Windows(
                self._window(state.windows.key, state.key_sealed, key_sealed, state.stored, counts, residual),
                self._window(state.windows.value, state.value_sealed, value_sealed, state.stored, counts, value_residual),
            )
            self.backend.append(
                self.pool, driver.Append(state.stored, counts, tuple(seals), key_sealed, value_sealed, state.windows, target), k, v
            )
        except BaseException:
            self._give_back(state, draft)
            raise
        return replace(draft, windows=target)

    assert honest is not wrong
    patch.setattr(KVCache, "_grow", wrong)


def blocks_of(cache, state, tokens):
    return (tokens - state.key_sealed) // cache.spec.key.residual


@mutant
def seal_by_length_of_call(patch):
    """Keys are sealed only when one call brings a whole block."""
    grow(patch, lambda c, s, t, n: (np.where(n >= c.spec.key.residual, blocks_of(c, s, t), 0), t - c.spec.value.residual))


@mutant
def seal_when_exactly_full(patch):
    """Keys are sealed only when their window is exactly full: an append that jumps over R never seals."""
    grow(
        patch,
        lambda c, s, t, n: (np.where((t - s.key_sealed) % c.spec.key.residual == 0, blocks_of(c, s, t), 0), t - c.spec.value.residual),
    )


@mutant
def one_block_a_call(patch):
    """At most one key block is sealed in a call."""
    grow(patch, lambda c, s, t, n: (np.minimum(1, blocks_of(c, s, t)), t - c.spec.value.residual))


@mutant
def key_seals_late(patch):
    """Keys are sealed at R + 1."""
    grow(patch, lambda c, s, t, n: ((t - s.key_sealed - 1) // c.spec.key.residual, t - c.spec.value.residual))


@mutant
def value_evicts_two(patch):
    """The value window gives up two rows when it is over-full."""
    grow(
        patch,
        lambda c, s, t, n: (blocks_of(c, s, t), np.where(t - s.value_sealed > c.spec.value.residual, t - c.spec.value.residual + 1, 0)),
    )


@mutant
def value_window_of_keys(patch):
    """The value window is as long as the key window."""
    grow(patch, lambda c, s, t, n: (blocks_of(c, s, t), t - c.spec.key.residual))


@mutant
def values_flushed_with_keys(patch):
    """All values but those of the last block are sealed when keys are."""
    grow(
        patch,
        lambda c, s, t, n: (
            blocks_of(c, s, t),
            np.where(blocks_of(c, s, t) > 0, s.key_sealed + blocks_of(c, s, t) * c.spec.key.residual, t - c.spec.value.residual),
        ),
    )


@mutant
def prompt_flushed(patch):
    """A prompt is sealed as a whole, values included."""
    grow(
        patch, lambda c, s, t, n: (blocks_of(c, s, t), np.where((s.tokens == 0) & (t >= c.spec.key.residual), t, t - c.spec.value.residual))
    )


@mutant
def ragged_count_ignored(patch):
    """All requests grow by the longest count."""
    honest = KVCache._grow
    patch.setattr(
        KVCache,
        "_grow",
        lambda self, s, t, n, k, v: honest(
            self, s, np.where(n > 0, t - n + n.max(), t) if k is not None else t, np.where(n > 0, n.max(), 0), k, v
        ),
    )


@mutant
def prefill_decided_for_the_batch(patch):
    """Whether a call is a prefill is decided by the longest request (report 24)."""
    honest = KVCache._reading_after_seal

    def wrong(self, before, after, counts):
        return honest(self, replace(before, tokens=np.full_like(before.tokens, before.tokens.max())), after, counts)

    patch.setattr(KVCache, "_reading_after_seal", wrong)


@mutant
def prefill_not_exact(patch):
    """seal_then_attend reads sealed tokens in the prefill, too."""
    honest = KVCache._reading_after_seal
    patch.setattr(KVCache, "_reading_after_seal", lambda self, b, a, n: honest(self, replace(b, tokens=b.tokens + 1), a, n))


@mutant
def stale_after_reset(patch):
    """reset forgets the tokens but keeps the frontiers' floating rows."""

    def wrong(self):
        self._state = replace(self._state, tokens=self._state.tokens - self._state.value_sealed * 0, pending=self._state.pending * 0)
        kept = np.minimum(self._state.tokens, self._state.key_sealed)
        self._state = replace(self._state, tokens=kept, value_sealed=np.minimum(self._state.value_sealed, kept))

    patch.setattr(KVCache, "reset", wrong)


@mutant
def reset_keeps_one_request(patch):
    """reset empties all requests but the last."""
    honest = KVCache.reset

    def wrong(self):
        last = self.batch - 1
        if not last:
            return honest(self)
        counts = np.where(np.arange(self.batch) == last, self._state.tokens, 0)
        self._state = replace(self._state, pending=self._state.pending * 0)
        return self.crop(counts.tolist())

    patch.setattr(KVCache, "reset", wrong)


@mutant
def commit_seals_pending_early(patch):
    """attend(commit=False) seals as if the tokens were committed."""
    honest = KVCache.attend

    def wrong(self, q, k, v, counts=None, commit=True):
        if commit:
            return honest(self, q, k, v, counts, True)
        out = honest(self, q, k, v, counts, False)
        pending = self._state.pending
        self.commit()
        key, value = self._state.key_sealed, self._state.value_sealed
        tokens = np.maximum(self._state.tokens - pending, key)
        self._state = replace(self._state, tokens=tokens, pending=self._state.tokens - tokens, key_sealed=key, value_sealed=value)
        return out

    patch.setattr(KVCache, "attend", wrong)


@mutant
def commit_keeps_all(patch):
    """commit(n) keeps every pending token."""
    honest = KVCache.commit
    patch.setattr(KVCache, "commit", lambda self, n=None: honest(self, None))


@mutant
def commit_keeps_one_more(patch):
    """commit(n) keeps n + 1 tokens."""
    honest = KVCache.commit
    patch.setattr(
        KVCache,
        "commit",
        lambda self, n=None: honest(self, None if n is None else np.minimum(np.asarray(n) + 1, self._state.pending).tolist()),
    )


@mutant
def commit_takes_the_last(patch):
    """commit(n) keeps the last n pending tokens."""
    honest = KVCache.commit

    def wrong(self, n=None):
        s = self._state
        if n is not None:
            for b, (pending, keep) in enumerate(zip(s.pending, np.minimum(n, s.pending) + 0 * s.pending, strict=True)):
                for window in (s.windows.key, s.windows.value):
                    tokens = s.tokens[b] + np.arange(pending)
                    rows = window[b][:, tokens % window.shape[2]]
                    window[b][:, tokens % window.shape[2]] = np.roll(rows, int(keep), axis=1)
        honest(self, n)

    patch.setattr(KVCache, "commit", wrong)


@mutant
def rollback_keeps_rows(patch):
    """rollback keeps one pending token."""
    patch.setattr(KVCache, "rollback", lambda self: self.commit(1))


@mutant
def rollback_of_first_request(patch):
    """rollback drops the pending tokens of request 0 only, and commits the others'."""
    patch.setattr(KVCache, "rollback", lambda self: self.commit(np.where(np.arange(self.batch) == 0, 0, self._state.pending).tolist()))


@mutant
def pending_hidden(patch):
    """A draft does not see the draft before it."""
    honest = KVCache._reading

    def wrong(self, state, chunk, counts):
        reading = honest(self, state, chunk, counts)
        return replace(reading, stored=state.tokens)

    patch.setattr(KVCache, "_reading", wrong)


@mutant
def pending_counted(patch):
    """lengths counts pending tokens."""
    honest = KVCache.lengths

    def wrong(self, request):
        found, waiting = honest(self, request), self.pending(request)
        return found._replace(tokens=found.tokens + waiting, key_residual=found.key_residual + waiting)

    patch.setattr(KVCache, "lengths", wrong)


@mutant
def pending_ignored_by_edits(patch):
    """Edits while tokens are pending commit them silently."""

    def settled(self, what):
        if self._state.pending.any():
            self.commit()
        return self._state

    patch.setattr(KVCache, "_settled", settled)


@mutant
def short_window(patch):
    """A chunk longer than the window overwrites rows that are still floating."""

    def wrong(self, window, old_from, new_from, stored, counts, residual):
        return window

    patch.setattr(KVCache, "_window", wrong)


@mutant
def state_changes_before_checks(patch):
    """A refused call leaves its tokens behind."""
    honest = KVCache.attend

    def wrong(self, q, k, v, counts=None, commit=True):
        from kivi.errors import NonFiniteError

        try:
            return honest(self, q, k, v, counts, commit)
        except NonFiniteError:
            clean = [np.nan_to_num(x, posinf=0, neginf=0) for x in (q, k, v)]
            honest(self, *clean, counts, commit)
            raise

    patch.setattr(KVCache, "attend", wrong)


@mutant
def token_order_reversed_in_chunk(patch):
    """A long chunk is stored in reverse."""
    honest = KVCache._grow

    def wrong(self, state, tokens, counts, k, v):
        if k is not None and k.shape[2] > 8 and (counts == k.shape[2]).all():
            k = k[:, :, ::-1]
        return honest(self, state, tokens, counts, k, v)

    patch.setattr(KVCache, "_grow", wrong)
