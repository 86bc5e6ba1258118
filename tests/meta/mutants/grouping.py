"""Mutants of grouping, dequantizing and of what is refused."""

from __future__ import annotations

import numpy as np

from kivi import backend
from kivi.backends.reference import quantize as reference
from kivi.backends.reference.driver import ReferenceBackend
from kivi.dtypes import np_dtype
from tests.meta.mutants import mutant


def _regrouped(patch, which, change) -> None:
    """Quantize groups whose elements are taken from elsewhere: `change(x, rule)` gives a tensor to take ranges from."""
    honest = reference.quantize

    def wrong(x, rule):
        if rule.which != which:
            return honest(x, rule)
        changed = change(x, rule)
        if np.array_equal(changed.astype(np.float32), x.astype(np.float32), equal_nan=True):
            return honest(x, rule)
        _, scale, origin, clamped = honest(changed, rule)
        spread = [reference.spread(a.astype(np.float32), x, rule.which, rule.group) for a in (scale, origin)]
        with np.errstate(all="ignore"):
            codes = np.rint(np.clip((x.astype(np.float32) - spread[1]) / spread[0], 0, 2**rule.bits - 1))
        return np.nan_to_num(codes).astype(np.uint8), scale, origin, clamped

    patch.setattr(reference, "quantize", wrong)


@mutant
def key_per_token(patch):
    """Keys are grouped along channels of one token."""

    def transposed_tiles(x, rule):
        g, channels = rule.group, x.shape[-1] - x.shape[-1] % rule.group
        out = np.array(x)
        tiles = x[..., :channels].reshape(*x.shape[:-2], x.shape[-2] // g, g, channels // g, g)
        out[..., :channels] = np.swapaxes(tiles, -1, -3).reshape(*x.shape[:-1], channels)
        return out

    _regrouped(patch, "key", transposed_tiles)


@mutant
def value_per_channel(patch):
    """Values are grouped along tokens: the tokens of one call share the range of each channel group's first channel."""

    def along_tokens(x, rule):
        out = np.array(x)
        for c in range(0, x.shape[-1], rule.group):
            low, high = x[..., c].min(-1, keepdims=True), x[..., c].max(-1, keepdims=True)
            out[..., c : c + rule.group] = low[..., None]
            out[..., c] = high
        return out

    _regrouped(patch, "value", along_tokens)


@mutant
def key_across_heads(patch):
    """Key groups span the heads."""
    _regrouped(
        patch, "key", lambda x, rule: np.where(np.arange(x.shape[-2])[:, None] % 2, x.min(-3, keepdims=True), x.max(-3, keepdims=True))
    )


@mutant
def value_across_heads(patch):
    """Value groups span the heads."""
    _regrouped(patch, "value", lambda x, rule: np.where(np.arange(x.shape[-1]) % 2, x.min(-3, keepdims=True), x.max(-3, keepdims=True)))


@mutant
def across_requests(patch):
    """Groups of a whole tensor span the requests."""
    for which in ("key", "value"):
        _regrouped(patch, which, lambda x, rule: np.broadcast_to(x.max(0), x.shape) if x.ndim == 4 and rule.which == "value" else x)


@mutant
def padding_lanes(patch):
    """A short last group is filled with zeros, which enter its range."""

    def filled(x, rule):
        tail = x.shape[-1] % rule.group
        out = np.array(x)
        if tail > 1:
            out[..., -1] = np.minimum(x[..., -tail:].min(-1), 0)
            out[..., -2] = np.maximum(x[..., -tail:].max(-1), 0)
        return out

    _regrouped(patch, "value", filled)


@mutant
def power_of_two_lanes(patch):
    """A head dimension that is no power of two is padded with zeros that enter the last group's range."""

    def filled(x, rule):
        out = np.array(x)
        if x.shape[-1] & (x.shape[-1] - 1) and rule.group > 1:
            last = x[..., -(x.shape[-1] % rule.group or rule.group) :]
            out[..., -last.shape[-1]] = np.minimum(last.min(-1), 0)
            out[..., -1] = np.maximum(last.max(-1), 0)
        return out

    _regrouped(patch, "value", filled)


@mutant
def tail_reads_on(patch):
    """A short last value group reads on into the next token."""

    def further(x, rule):
        tail = x.shape[-1] % rule.group
        out = np.array(x)
        if tail > 1:
            following = np.roll(x[..., : rule.group - tail], -1, axis=-2)
            out[..., -1] = np.minimum(x[..., -tail:].min(-1), following.min(-1))
            out[..., -2] = np.maximum(x[..., -tail:].max(-1), following.max(-1))
        return out

    _regrouped(patch, "value", further)


@mutant
def tail_group_whole(patch):
    """A short last value group borrows channels of the one before."""

    def longer(x, rule):
        tail = x.shape[-1] % rule.group
        out = np.array(x)
        if tail > 1 and x.shape[-1] > rule.group:
            out[..., -1], out[..., -2] = x[..., -rule.group :].min(-1), x[..., -rule.group :].max(-1)
        return out

    _regrouped(patch, "value", longer)


@mutant
def fused_dequantize(patch):
    """Dequantize contracts multiply and add."""

    def fused(codes, scale, origin, which, group, dtype):
        exact = reference.exact(codes, scale, origin, which, group)
        with np.errstate(over="ignore", invalid="ignore"):
            return exact.astype(np.float32).astype(np_dtype(dtype))

    patch.setattr(reference, "dequantize", fused)


@mutant
def dequantize_in_target(patch):
    """Dequantize computes in the requested dtype instead of casting last."""

    def narrow(codes, scale, origin, which, group, dtype):
        kind = np_dtype(dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            return reference.spread(scale.astype(kind), codes, which, group) * codes.astype(kind) + reference.spread(
                origin.astype(kind), codes, which, group
            )

    patch.setattr(reference, "dequantize", narrow)


@mutant
def nan_accepted(patch):
    """`reject` lets Inf pass."""
    honest = ReferenceBackend.first_bad
    patch.setattr(
        ReferenceBackend,
        "first_bad",
        lambda self, x, counts, lowest: honest(self, np.where(np.isinf(x), x.dtype.type(0), x), counts, lowest),
    )


@mutant
def padding_inspected(patch):
    """`reject` looks at padding rows."""
    honest = ReferenceBackend.first_bad
    patch.setattr(ReferenceBackend, "first_bad", lambda self, x, counts, lowest: honest(self, x, np.full_like(counts, x.shape[2]), lowest))


@mutant
def wrong_head_named(patch):
    """The error for a NaN names head 0 whatever the head."""
    honest = backend.place
    patch.setattr(backend, "place", lambda index, tokens=None: honest((index[0], 0, *index[2:]), tokens))
