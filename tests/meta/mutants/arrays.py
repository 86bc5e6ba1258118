"""Mutants of how arrays go in and out: memory that is kept, overwritten, reused or misread."""

from __future__ import annotations

from dataclasses import replace

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


def overwriting(patch, change) -> None:
    """After each attend `change` is called with the caller's arrays that can be written to."""
    honest = KVCache.attend

    def wrong(self, q, k, v, counts=None, commit=True):
        out = honest(self, q, k, v, counts, commit)
        change(*(x if isinstance(x, np.ndarray) and x.flags.writeable else np.zeros(1) for x in (q, k, v, counts)))
        return out

    patch.setattr(KVCache, "attend", wrong)


@mutant
def overwrites_keys(patch):
    """The caller's keys are quantized in place."""
    overwriting(patch, lambda q, k, v, counts: np.round(k, 1, out=k) if k.dtype == np.float32 else None)


@mutant
def overwrites_values(patch):
    """The last row of the caller's values is overwritten."""

    def change(q, k, v, counts):
        v[..., -1:, :] = 0

    overwriting(patch, change)


@mutant
def overwrites_counts(patch):
    """The caller's counts are used to count down."""

    def change(q, k, v, counts):
        counts[...] = 0

    overwriting(patch, change)


@mutant
def keeps_the_callers_counts(patch):
    """The counts of a first call are the lengths from then on, and stay the caller's memory."""
    honest = KVCache.attend

    def wrong(self, q, k, v, counts=None, commit=True):
        first = commit and not self._state.stored.any()
        out = honest(self, q, k, v, counts, commit)
        if first and isinstance(counts, np.ndarray):
            self._state = replace(self._state, tokens=counts)
        return out

    patch.setattr(KVCache, "attend", wrong)


@mutant
def floating_rows_are_views(patch):
    """residual() hands out the window itself where the rows lie side by side."""

    def wrong(self, request):
        s, out = self._state, {}
        for which, window in (("key", s.windows.key), ("value", s.windows.value)):
            slots = np.arange(self._sealed(which, request), s.tokens[request]) % window.shape[2]
            adjacent = len(slots) and slots[-1] - slots[0] == len(slots) - 1
            out[which] = window[request][:, slots[0] : slots[-1] + 1] if adjacent else window[request][:, slots]
        return out

    patch.setattr(KVCache, "residual", wrong)


@mutant
def sealed_scales_are_views(patch):
    """sealed() hands out the page's own scales where one page holds the segment."""
    honest = KVCache.sealed

    def wrong(self, request):
        found = honest(self, request)
        for which, parts in found.items():
            if len(parts) == 1 and self._state.pages[request] == 1:
                (first, qt), page = parts[0], int(self._state.table[request, 0, 0])
                scale = self.pool.view(page, f"{which}.scale")[None, :, : qt.scale.shape[2]]
                found[which] = [(first, replace(qt, scale=scale))]
        return found

    patch.setattr(KVCache, "sealed", wrong)


@mutant
def sealed_is_kept(patch):
    """sealed() keeps what it handed out and hands it out again until the lengths change."""
    honest, kept = KVCache.sealed, {}

    def wrong(self, request):
        key = id(self), request, self._state.table.tobytes(), int(self._state.key_sealed[request]), int(self._state.value_sealed[request])
        kept.setdefault(id(self), self)
        return kept.setdefault(key, honest(self, request))

    patch.setattr(KVCache, "sealed", wrong)


@mutant
def layout_misreported(patch):
    """What ran is reported with the native layout, also where the spec names another."""
    honest = KVCache.ran
    native = "official_int32"
    patch.setattr(KVCache, "ran", property(lambda self: honest.fget(self)._replace(layout=native)))


@mutant
def named_layout_ignored(patch):
    """Words are stored in the native layout, also where the spec names another."""
    from kivi.backend import Backend
    from kivi.layout import named_layout

    patch.setattr(Backend, "layout_for", lambda self, spec: named_layout(self.manifest.capabilities.native_layout))
