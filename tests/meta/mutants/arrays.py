"""Mutants of how arrays go in and out: memory that is kept, overwritten, reused or misread."""

from __future__ import annotations

import numpy as np

from kivi.cache import KVCache
from tests.meta.mutants import mutant


@mutant
def keeps_the_callers_arrays(patch):
    """Floating rows are the caller's memory until the next call."""
    honest = KVCache.attend
    last = {}

    def wrong(self, q, k, v, counts=None, commit=True):
        if id(self) in last:
            at, rows = last.pop(id(self))
            for b, (stored, n) in enumerate(at):
                for window, x in zip((self._state.windows.key, self._state.windows.value), rows, strict=True):
                    window[b][:, np.arange(stored, stored + n) % window.shape[2]] = x[b][:, :n]
        before = self._state.stored.copy()
        out = honest(self, q, k, v, counts, commit)
        if k.shape[2] == 1 and (self._state.key_sealed <= before).all():
            last[id(self)] = [(int(t), int(s - t)) for t, s in zip(before, self._state.stored, strict=True)], (k, v)
        return out

    patch.setattr(KVCache, "attend", wrong)


@mutant
def overwrites_queries(patch):
    """The softmax scale is multiplied into the caller's queries."""
    honest = KVCache.attend

    def wrong(self, q, k, v, counts=None, commit=True):
        out = honest(self, q, k, v, counts, commit)
        if q.flags.writeable:
            q *= 0.5
        return out

    patch.setattr(KVCache, "attend", wrong)


@mutant
def one_output_buffer(patch):
    """Outputs of one shape share a buffer."""
    honest = KVCache.attend
    buffers = {}

    def wrong(self, q, k, v, counts=None, commit=True):
        out = honest(self, q, k, v, counts, commit)
        buffer = buffers.setdefault((id(self), out.shape, str(out.dtype)), out)
        buffer[...] = out
        return buffer

    patch.setattr(KVCache, "attend", wrong)


@mutant
def strides_ignored(patch):
    """Arrays are read as if they were contiguous."""
    honest = KVCache.attend

    def flat(x):
        return (
            np.lib.stride_tricks.as_strided(x, x.shape, np.empty(x.shape, x.dtype).strides)
            if x.strides[-1] != x.itemsize and x.strides[-1] > 0
            else x
        )

    patch.setattr(
        KVCache, "attend", lambda self, q, k, v, counts=None, commit=True: honest(self, flat(q), flat(k), flat(v), counts, commit)
    )
