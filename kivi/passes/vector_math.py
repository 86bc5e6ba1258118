"""Functions at `vec` level, of float32: polynomials, the same on every target, so that their errors are known and no library is called.

`tests/vector/test_math.py` measures the errors over all exponents.
"""

from __future__ import annotations

from kivi.ir.tile import Sign
from kivi.ir.vector_build import Vector, constant, where
from kivi.ir.xdsl import f32, i32
from kivi.passes.vector_numbers import multiply_add
from kivi.passes.vector_target import Target

#: 2^f for |f| <= 1/2, lowest power first: the minimax polynomial of degree 6 of the relative error, which is 2^-28.9 before rounding.
EXP2 = (
    1.0,
    6.931471824645996e-1,
    2.4022647738456726e-1,
    5.5503323674201965e-2,
    9.61843691766262e-3,
    1.3398875016719103e-3,
    1.5353361959569156e-4,
)
SHIFTER = 12582912.0  # 1.5 * 2^23: adding it rounds half to even to an integer, which then stands in the low bits
SHIFTER_BITS = 0x4B400000
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.42860682030941723212e-6  # the first has few bits, so that its multiples are exact


def _fraction_power(fraction: Vector, target: Target) -> Vector:
    """2^f for |f| <= 1/2."""
    power = constant(EXP2[-1], f32, fraction.lanes)
    for coefficient in reversed(EXP2[:-1]):
        power = multiply_add(power, fraction, constant(coefficient, f32), target)
    return power


def exp2_below_one(x: Vector, target: Target) -> Vector:
    """2^x for x <= 0; 0 below -126, NaN for NaN."""
    shifted = x + SHIFTER
    power = _fraction_power(x - (shifted - SHIFTER), target)
    scale = ((shifted.bits(i32) + 127) << 23).bits(f32)
    return where(x < -126.0, 0.0, power * scale)


def exp2(x: Vector, target: Target) -> Vector:
    """2^x for any x, subnormal and infinite results included."""
    bounded = where(x > 129.0, 129.0, where(x < -151.0, -151.0, x))
    shifted = bounded + SHIFTER
    return _scaled(_fraction_power(bounded - (shifted - SHIFTER), target), shifted.bits(i32) - SHIFTER_BITS)


def exp(x: Vector, target: Target) -> Vector:
    """e^x for any x, subnormal and infinite results included."""
    bounded = where(x > 89.0, 89.0, where(x < -104.0, -104.0, x))
    shifted = bounded * LOG2_E + SHIFTER
    whole = shifted - SHIFTER
    rest = (bounded - whole * LN2_HIGH) - whole * LN2_LOW
    return _scaled(_fraction_power(rest * LOG2_E, target), shifted.bits(i32) - SHIFTER_BITS)


def _scaled(x: Vector, exponent: Vector) -> Vector:
    """x * 2^exponent, -151 <= exponent <= 129, in two steps whose factors are normal numbers."""
    first = ((exponent + 152) >> 1) - 76
    for part in (first, exponent - first):
        x = x * ((part + 127) << 23).bits(f32)
    return x


def log2(x: Vector, target: Target) -> Vector:
    """log2 x; -inf for 0, NaN below."""
    tiny = x < 2.0**-126
    normal = where(tiny, x * 2.0**32, x)
    bits = normal.bits(i32) - 0x3F3504F3  # the mantissa is taken between sqrt(1/2) and sqrt(2)
    exponent = (bits >> 23) ^ 0x100
    exponent = exponent - 0x100 - where(tiny, 32, exponent * 0)
    m = ((bits & 0x7FFFFF) + 0x3F3504F3).bits(f32)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = constant(2 * LOG2_E / 9, f32, x.lanes)
    for n in (7, 5, 3):
        series = multiply_add(series, square, constant(2 * LOG2_E / n, f32), target)
    out = exponent.to(f32, Sign.SIGNED) + multiply_add(series * square, s, s * (2 * LOG2_E), target)
    out = where(x.equals(0.0), float("-inf"), where(x < 0.0, float("nan"), out))
    return where(x.equals(x), where(x.equals(float("inf")), x, out), x)


def round_even(x: Vector, target: Target) -> Vector:
    """The nearest integer, halves to even; the sign of zero is kept."""
    sign = x.bits(i32) & -2147483648
    magnitude = (x.bits(i32) & 0x7FFFFFFF).bits(f32)
    whole = (magnitude + 8388608.0) - 8388608.0
    return (where(magnitude < 8388608.0, whole, magnitude).bits(i32) | sign).bits(f32)
