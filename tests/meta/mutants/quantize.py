"""Mutants of the quantizer's arithmetic: each overrides one step of `Steps`."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kivi.backends.reference import quantize as reference
from kivi.dtypes import largest
from tests.meta.mutants import mutant
from tests.meta.steps import Steps


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
        toward_zero = (
            (rounded.view(f"uint{8 * self.metadata.itemsize}") - beyond).astype(f"uint{8 * self.metadata.itemsize}").view(self.metadata)
        )
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
        return (
            np.where(np.abs(stored.astype(np.float32)) < 2.0**-14, self.metadata.type(0), stored) if self.metadata == np.float16 else stored
        )


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
        return (
            np.where(number == 0, self.metadata.type(2.0**-24), super().limit(number, top))
            if number.dtype == np.float16
            else super().limit(number, top)
        )


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
