"""Mutants of the quantizer: `Steps` is the honest one with a method for each step, a mutant overrides one method."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kivi.backends.reference import quantize as reference
from kivi.dtypes import largest, largest_scale, np_dtype
from kivi.errors import MetadataOverflowError
from tests.meta.mutants import mutant

F32 = np.dtype("float32")


class Steps:
    """`quantize_groups` of the reference backend, step by step. Unchanged, it must pass the whole suite."""

    def __call__(self, x, rule):
        self.rule, self.top = rule, (1 << rule.bits) - 1
        self.work = F32 if rule.numerics == "portable" else x.dtype
        self.metadata = np_dtype(rule.metadata)
        bad = self.bad(x)
        x = np.where(bad[..., None], self.work.type(0), x.astype(self.work))
        with np.errstate(all="ignore"):
            low, high = self.ends(x)
            scale = self.limit(self.store(self.span(low, high)), largest_scale(rule.metadata, rule.bits))
            origin = self.limit(self.plus_zero(self.store(self.origin(low, high, scale))), largest(rule.metadata))
            flat = self.flat(scale, low, high) | bad
            scale = np.where(flat, self.flat_scale(low), scale).astype(self.metadata)
            steps = self.divide(self.rise(x, low, origin), scale)
            codes = self.code(steps.astype(np.float32))
        codes[flat] = 0
        return codes, scale, np.where(bad, self.metadata.type(np.nan), origin).astype(self.metadata), 0

    def bad(self, x):
        return ~np.isfinite(x).all(axis=-1)

    def ends(self, x):
        return x.min(axis=-1), x.max(axis=-1)

    def span(self, low, high):
        return (high - low) / self.work.type(self.top)

    def origin(self, low, high, scale):
        return low

    def store(self, number):
        return number.astype(self.metadata)

    def plus_zero(self, origin):
        return origin + self.metadata.type(0)

    def limit(self, number, top):
        over = np.abs(number.astype(np.float32)) > top
        if over.any() and self.rule.overflow == "reject":
            raise MetadataOverflowError("metadata: use bfloat16")
        return np.where(over, np.copysign(np.float32(top), number.astype(np.float32)).astype(number.dtype), number)

    def flat(self, scale, low, high):
        return scale == 0

    def flat_scale(self, low):
        return self.metadata.type(1)

    def rise(self, x, low, origin):
        return x - origin.astype(self.work)[..., None]

    def divide(self, rise, scale):
        return rise / scale.astype(self.work)[..., None]

    def code(self, steps):
        return self.round(np.clip(steps, 0, self.top)).astype(np.uint8)

    def round(self, steps):
        return np.rint(steps)


def install(patch, steps) -> None:
    patch.setattr(reference, "quantize_groups", steps)


def fault(cls):
    """Register a subclass of `Steps` as a mutant."""

    def place(patch):
        install(patch, cls())

    place.__name__, place.__doc__ = cls.__name__, cls.__doc__
    return mutant(place)


@fault
class truncation(Steps):
    """Codes are truncated instead of rounded."""

    def round(self, steps):
        return np.floor(steps)


@fault
class ties_away(Steps):
    """Halves are rounded away from zero."""

    def round(self, steps):
        return np.floor(steps + np.float32(0.5))


@fault
class reciprocal(Steps):
    """Multiplies by a rounded reciprocal instead of dividing."""

    def divide(self, rise, scale):
        return rise * (self.work.type(1) / scale.astype(self.work))[..., None]


@fault
class double_division(Steps):
    """Divides in double precision and rounds once."""

    def divide(self, rise, scale):
        return np.rint(np.clip(rise.astype(np.float64) / scale.astype(np.float64)[..., None], 0, self.top))


@fault
class approximate_division(Steps):
    """The quotient is one ulp low now and then, as `div.full.f32` may be."""

    def divide(self, rise, scale):
        exact = super().divide(rise, scale).astype(np.float32)
        return np.where(exact.view(np.uint32) % 5 == 0, np.nextafter(exact, np.float32(0)), exact)


@fault
class power_of_two_levels(Steps):
    """2^b instead of 2^b - 1 steps."""

    def span(self, low, high):
        return (high - low) / self.work.type(self.top + 1)


@fault
class integer_zero_point(Steps):
    """The origin is an integer zero point, clamped to the codes, times the scale."""

    def origin(self, low, high, scale):
        safe = np.where(scale == 0, 1, scale).astype(np.float32)
        return -np.clip(np.rint(-low.astype(np.float32) / safe), 0, self.top) * safe


@fault
class grid_contains_zero(Steps):
    """Zero takes part in the minimum and the maximum."""

    def ends(self, x):
        return np.minimum(x.min(axis=-1), 0), np.maximum(x.max(axis=-1), 0)


@fault
class epsilon(Steps):
    """A constant group gets a tiny scale instead of 1."""

    def flat_scale(self, low):
        return self.metadata.type(1e-5)


@fault
class epsilon_in_range(Steps):
    """A small number is added to every range."""

    def span(self, low, high):
        return (high - low + self.work.type(1e-6)) / self.work.type(self.top)


@fault
class wrong_constant(Steps):
    """A constant group keeps its magnitude only."""

    def origin(self, low, high, scale):
        return np.where(low == high, np.abs(low), low)


@fault
class origin_is_maximum(Steps):
    """The origin has the sign of the maximum's end: codes count down from there."""

    def origin(self, low, high, scale):
        return high

    def rise(self, x, low, origin):
        return origin.astype(self.work)[..., None] - x


@fault
class metadata_truncated(Steps):
    """Scale and origin are truncated to the metadata dtype."""

    def store(self, number):
        rounded = number.astype(self.metadata)
        beyond = np.abs(rounded.astype(np.float64)) > np.abs(number.astype(np.float64))
        toward_zero = (rounded.view(f"uint{8 * self.metadata.itemsize}") - beyond).astype(f"uint{8 * self.metadata.itemsize}").view(self.metadata)
        return np.where(beyond & np.isfinite(rounded), toward_zero, rounded)


@fault
class bf16_metadata_truncated(Steps):
    """fp32 to bf16 keeps the upper half of the bits (as the Triton interpreter does)."""

    def store(self, number):
        if self.metadata != np.dtype(ml_dtypes.bfloat16):
            return number.astype(self.metadata)
        return (np.ascontiguousarray(number.astype(np.float32)).view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)


@fault
class unrounded_scale(Steps):
    """Codes are computed with the scale before it is rounded to the metadata dtype."""

    def span(self, low, high):
        self.wide = super().span(low, high)
        return self.wide

    def divide(self, rise, scale):
        wide = np.where(self.wide == 0, 1, self.wide).astype(self.work)
        return rise / np.where(np.isfinite(wide), wide, 1)[..., None].astype(self.work)


@fault
class unrounded_origin(Steps):
    """Codes are computed from the minimum instead of the stored origin."""

    def rise(self, x, low, origin):
        return x - low[..., None]


@fault
class half_arithmetic(Steps):
    """Portable numerics compute in fp16 when the metadata is fp16."""

    def span(self, low, high):
        if self.metadata == np.float16:
            return (high - low).astype(np.float16) / np.float16(self.top)
        return super().span(low, high)


@fault
class wide_staged(Steps):
    """Staged numerics keep the difference in fp32."""

    def rise(self, x, low, origin):
        return x.astype(np.float32) - origin.astype(np.float32)[..., None]

    def divide(self, rise, scale):
        return (rise / scale.astype(np.float32)[..., None]).astype(self.work)


@fault
class no_clamp(Steps):
    """Codes are not clamped before they become bytes."""

    def code(self, steps):
        return np.rint(np.clip(steps, -1e9, 1e9)).astype(np.int64).astype(np.uint8)


@fault
class wrapped_codes(Steps):
    """Codes above the top wrap instead of being clamped."""

    def code(self, steps):
        return (np.rint(np.clip(steps, 0, 1e9)).astype(np.int64) & self.top).astype(np.uint8)


@fault
class flush_subnormals(Steps):
    """Subnormal fp32 numbers are flushed to zero."""

    def span(self, low, high):
        number = super().span(low, high)
        return np.where(np.abs(number.astype(np.float32)) < 2.0**-126, self.work.type(0), number)


@fault
class flush_half_subnormals(Steps):
    """Subnormal fp16 scales are flushed to zero."""

    def store(self, number):
        stored = number.astype(self.metadata)
        return np.where(np.abs(stored.astype(np.float32)) < 2.0**-14, self.metadata.type(0), stored) if self.metadata == np.float16 else stored


@fault
class minus_zero(Steps):
    """An origin of -0 is stored as it is."""

    def plus_zero(self, origin):
        return origin


@fault
class degenerate_by_range(Steps):
    """Only max == min counts as degenerate; a scale that underflows is replaced by the smallest number."""

    def flat(self, scale, low, high):
        return low == high

    def limit(self, number, top):
        return np.where(number == 0, self.metadata.type(2.0**-24), super().limit(number, top)) if number.dtype == np.float16 else super().limit(number, top)


@fault
class infinity_stored(Steps):
    """`saturate` stores infinities."""

    def limit(self, number, top):
        return number if self.rule.overflow == "saturate" else super().limit(number, top)


@fault
class range_clamped_with_origin(Steps):
    """`saturate` takes the scale from the clamped origin."""

    def span(self, low, high):
        low = np.maximum(low.astype(np.float32), np.float32(-largest(self.rule.metadata)))
        return (high.astype(np.float32) - low) / np.float32(self.top)


@fault
class overflow_ignored(Steps):
    """`reject` clamps without a word."""

    def limit(self, number, top):
        over = np.abs(number.astype(np.float32)) > top
        return np.where(over, np.copysign(np.float32(top), number.astype(np.float32)).astype(number.dtype), number)


@fault
class nan_skipped(Steps):
    """`propagate` leaves NaN out of the group's range instead of poisoning it."""

    def bad(self, x):
        return np.isnan(x).all(axis=-1) | np.isinf(x).any(axis=-1)

    def ends(self, x):
        return np.nanmin(x, axis=-1), np.nanmax(x, axis=-1)


@fault
class infinity_tolerated(Steps):
    """`propagate` poisons groups for NaN only."""

    def bad(self, x):
        return np.isnan(x).any(axis=-1)

    def ends(self, x):
        x = np.nan_to_num(x, posinf=1e4, neginf=-1e4)
        return x.min(axis=-1), x.max(axis=-1)


@fault
class top_code_unused(Steps):
    """Eight-bit codes stop at 254."""

    def code(self, steps):
        return np.minimum(super().code(steps), 254)


@fault
class nan_spreads(Steps):
    """`propagate` poisons the neighbouring group as well."""

    def bad(self, x):
        bad = super().bad(x)
        return bad | np.roll(bad, 1, axis=-1) if bad.ndim else bad


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
    _regrouped(patch, "key", lambda x, rule: np.where(np.arange(x.shape[-2])[:, None] % 2, x.min(-3, keepdims=True), x.max(-3, keepdims=True)))


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
            return reference.spread(scale.astype(kind), codes, which, group) * codes.astype(kind) + reference.spread(origin.astype(kind), codes, which, group)

    patch.setattr(reference, "dequantize", narrow)


@mutant
def nan_accepted(patch):
    """`reject` lets Inf pass."""
    from kivi.backends.reference.driver import ReferenceBackend

    honest = ReferenceBackend.first_bad
    patch.setattr(ReferenceBackend, "first_bad", lambda self, x, counts, lowest: honest(self, np.where(np.isinf(x), x.dtype.type(0), x), counts, lowest))


@mutant
def padding_inspected(patch):
    """`reject` looks at padding rows."""
    from kivi.backends.reference.driver import ReferenceBackend

    honest = ReferenceBackend.first_bad
    patch.setattr(ReferenceBackend, "first_bad", lambda self, x, counts, lowest: honest(self, x, np.full_like(counts, x.shape[2]), lowest))


@mutant
def wrong_head_named(patch):
    """The error for a NaN names head 0 whatever the head."""
    from kivi import backend

    honest = backend.place
    patch.setattr(backend, "place", lambda index, tokens=None: honest((index[0], 0, *index[2:]), tokens))
