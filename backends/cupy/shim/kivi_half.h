// Half precision on a CPU without it: 16 bits, converted in integers. The counterpart for GPUs is device/kivi_half.h.
#pragma once

struct f16 {
    unsigned short bits;
};
static inline unsigned short f16_bits(f16 x) { return x.bits; }
static inline f16 f16_of_bits(unsigned short x) { return f16{x}; }

static inline float f16_to_f32(f16 x) {
    unsigned sign = (unsigned)(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
    if (rest >= 0x7c00) return __uint_as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);  // Inf, NaN
    if (rest >= 0x400) return __uint_as_float(sign | ((rest << 13) + (112u << 23)));
    return __uint_as_float(sign | __float_as_uint((float)rest * 5.9604644775390625e-8f));  // subnormal: an exact product, with 2^-24
}

static inline f16 f32_to_f16(float x) {
    unsigned word = __float_as_uint(x), sign = word >> 16 & 0x8000, rest = word & 0x7fffffff;
    if (rest > 0x7f800000) return f16{(unsigned short)(sign | 0x7e00)};   // NaN
    if (rest >= 0x477ff000) return f16{(unsigned short)(sign | 0x7c00)};  // from 65520 on: Inf
    if (rest >= 0x38800000) {                                             // normal: half to even by the bits that go
        unsigned shifted = rest - (112u << 23);
        return f16{(unsigned short)(sign | (shifted + 0xfff + (shifted >> 13 & 1)) >> 13)};
    }
    // Subnormal: float addition rounds half to even at a spacing of 2^-24, which is the ulp of 0.5.
    float spaced = __uint_as_float(rest) + 0.5f;
    return f16{(unsigned short)(sign | (__float_as_uint(spaced) - 0x3f000000))};
}
