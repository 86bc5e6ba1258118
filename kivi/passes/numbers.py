"""The arithmetic of SPEC 3 as `tile` operations: all in float32, every rounding explicit.

bfloat16 exists in memory only. It is loaded as 16 bits and widened by a shift, and rounded half to even in integers, so no target
needs a bfloat16 unit and none can round it differently. Half and bfloat16 arithmetic of `staged` numerics is float32 arithmetic
with a rounding after each operation, which is the correctly rounded result, since 24 >= 2 * 11 + 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from kivi.dtypes import largest, largest_scale
from kivi.ir.build import TYPES, Pointer, Tile, where
from kivi.ir.tile import PtrType
from kivi.ir.xdsl import f16, f32, i16, i32
from kivi.spec import CacheSpec


@dataclass(frozen=True)
class Numbers:
    """What decides the numbers of one side of a cache."""

    bits: int
    group: int
    numerics: str
    dtype: str
    metadata: str
    nonfinite: str
    overflow: str

    @classmethod
    def of(cls, spec: CacheSpec, which: str, dtype: str, metadata: str) -> Numbers:
        side = spec.key if which == "key" else spec.value
        return cls(side.bits, side.group, spec.numerics, dtype, metadata, spec.nonfinite, spec.overflow)

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1


def float_pointer(dtype: str) -> PtrType:
    """The type of a pointer to floats in memory."""
    return PtrType(i16 if dtype == "bfloat16" else TYPES[dtype])


def load_float(source: Pointer, dtype: str, offset: Tile, mask: Tile | None = None, other: float | None = None) -> Tile:
    """Elements as float32, exactly; `other` where masked."""
    if dtype == "bfloat16":
        x = (source.load(offset, mask).to(i32) << 16).bits(f32)
    else:
        x = source.load(offset, mask).to(f32)
    return x if other is None or mask is None else where(mask, x, other)


def store_float(target: Pointer, dtype: str, offset: Tile, x: Tile, mask: Tile | None = None) -> None:
    """float32 rounded half to even to `dtype`."""
    if dtype == "bfloat16":
        target.store(offset, (bfloat16_bits(x) >> 16).to(i16), mask)
    else:
        target.store(offset, x.to(TYPES[dtype]), mask)


def bfloat16_bits(x: Tile) -> Tile:
    """The bits of x rounded to bfloat16, in the upper half of an i32. A NaN stays one."""
    bits = x.bits(i32)
    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) & -65536
    return where(x.equals(x), rounded, 0x7FC00000)


def rounded(x: Tile, dtype: str) -> Tile:
    """float32 x as the nearest number of `dtype`, still in float32."""
    if dtype == "float32":
        return x
    return bfloat16_bits(x).bits(f32) if dtype == "bfloat16" else x.to(f16).to(f32)


def is_finite(x: Tile) -> Tile:
    return (x.bits(i32) & 0x7F800000).differs(0x7F800000)


def scale_and_origin(low: Tile, high: Tile, bad: Tile, n: Numbers) -> tuple[Tile, Tile, Tile, Tile]:
    """(scale, origin, overflow, flat) of groups with finite extremes `low` and `high`: SPEC 3.2, 3.3, 3.5 to 3.7.

    `bad` marks groups that hold NaN or Inf. overflow (i32) counts the numbers of a group that the metadata dtype cannot hold; they
    are clamped, and under "reject" the caller must refuse the step. flat marks groups whose codes are 0 whatever scale and origin
    say: those that hold one number, or numbers too close for a scale. Their scale is stored as 1, as that of other groups may be.
    """
    span = high - low
    if n.numerics == "staged":
        span = rounded(span, n.dtype)
    scale = rounded(span / float(n.top), n.metadata)
    origin = rounded(low, n.metadata) + 0.0  # -0 is stored as +0
    limit, most = largest_scale(n.metadata, n.bits), largest(n.metadata)
    overflow = where(scale > limit, 1, scale.bits(i32) * 0) + where((origin < -most) | (origin > most), 1, scale.bits(i32) * 0)
    scale = scale.minimum(limit)
    origin = origin.maximum(-most).minimum(most)
    flat = scale.equals(0.0) | bad
    scale = where(flat, 1.0, scale)
    origin = where(bad, float("nan"), origin)
    return scale, origin, overflow, flat


def codes(x: Tile, scale: Tile, origin: Tile, flat: Tile, n: Numbers) -> Tile:
    """Codes as i32 of elements x with the stored scale and origin; 0 in a flat group, which a bad one is, too."""
    rise = x - origin
    if n.numerics == "staged":
        rise = rounded(rise, n.dtype)
    steps = rise / scale
    if n.numerics == "staged":
        steps = rounded(steps, n.dtype)
    clamped = steps.maximum(0.0).minimum(float(n.top))
    whole = round_half_even(clamped).to(i32)
    return where(flat, 0, whole)


def round_half_even(x: Tile) -> Tile:
    """The nearest integer of 0 <= x < 2^22, halves to even, by the spacing of float32 at 1.5 * 2^23."""
    return (x + 12582912.0) - 12582912.0


def dequantized(code: Tile, scale: Tile, origin: Tile) -> Tile:
    """float32 scale * code + origin, two roundings: SPEC 3.4."""
    return scale * code.to(f32) + origin
