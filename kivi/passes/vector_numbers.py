"""Formats of numbers at `vec` level: what a target has no instruction for is spelled out in integers.

float16 on a processor without conversions is 16 bits in memory, as bfloat16 is everywhere.
"""

from __future__ import annotations

from kivi.ir.build import TYPES
from kivi.ir.tile import PtrType, Sign
from kivi.ir.vector_build import Pointer, Vector, fma, where
from kivi.ir.xdsl import Attribute, f16, f32, i16, i32
from kivi.passes.vector_target import Target


def stored(dtype: str, target: Target) -> Attribute:
    """The type of a float in memory, as kernels of a target read it."""
    return i16 if dtype == "bfloat16" or (dtype == "float16" and not target.half) else TYPES[dtype]


def float_pointer(dtype: str, target: Target) -> PtrType:
    return PtrType(stored(dtype, target))


def load_float(source: Pointer, dtype: str, offset: Vector, lanes: int, target: Target, mask: Vector | None = None) -> Vector:
    """Neighbouring elements as float32, exactly; 0 where masked."""
    return widened(source.load(offset, lanes, mask), dtype, target)


def widened(x: Vector, dtype: str, target: Target) -> Vector:
    """Elements as they are stored, as float32."""
    if dtype == "bfloat16":
        return (x.to(i32) << 16).bits(f32)
    if dtype == "float16" and not target.half:
        return half_to_float(x)
    return x.to(f32)


def half_to_float(x: Vector) -> Vector:
    """float32 of the bits of float16: the exponent is rebased by a product, which makes subnormals normal."""
    bits = x.to(i32)
    rebased = ((bits & 0x7FFF) << 13).bits(f32) * 2.0**112
    infinite = ((bits & 0x7FFF) << 13) | 0x7F800000
    magnitude = where((bits & 0x7C00).equals(0x7C00), infinite, rebased.bits(i32))
    return (magnitude | ((bits & 0x8000) << 16)).bits(f32)


def float_to_half(x: Vector) -> Vector:
    """Bits of float16 (i16) nearest to float32 x, half to even. A NaN stays one."""
    bits = x.bits(i32)
    sign, magnitude = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    normal = (magnitude + ((magnitude >> 13) & 1) + (0xFFF - (112 << 23))) >> 13
    # Below 2^-14 the sum with 1/2 has the spacing of float16's subnormals: the addition rounds.
    subnormal = (magnitude.bits(f32) + 0.5).bits(i32) - 0x3F000000
    finite = where(magnitude < 0x38800000, subnormal, normal)
    out = where(magnitude >= 0x477FF000, 0x7C00, finite)
    out = where(magnitude > 0x7F800000, 0x7E00, out)
    return (out | sign).to(i16)


def rounded_to_half(x: Vector, target: Target) -> Vector:
    """float32 rounded half to even to float16, still in float32."""
    return x.to(f16).to(f32) if target.half else half_to_float(float_to_half(x))


def rounded_to_bfloat16(x: Vector) -> Vector:
    """float32 rounded half to even to bfloat16, still in float32. A NaN stays one."""
    bits = x.bits(i32)
    near = (bits + ((bits >> 16) & 1) + 0x7FFF) & -65536
    return where(x.equals(x), near, 0x7FC00000).bits(f32)


def multiply_add(a: Vector, b: Vector, c: Vector, target: Target) -> Vector:
    """a * b + c, rounded once where that is an instruction, twice elsewhere: for sums whose bound allows both."""
    return fma(a, b, c) if target.fma else a * b + c


def signed_float(x: Vector) -> Vector:
    """float32 of a non-negative i32: the signed conversion is an instruction on every target."""
    return x.to(f32, Sign.SIGNED)
