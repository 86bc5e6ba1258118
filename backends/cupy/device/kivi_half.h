// Half precision as the kernels need it: 16 bits in memory, converted by the two instructions that do so. It takes the place of
// cuda_fp16.h, which is not always installed and is slow to compile. The counterpart for CPUs is shim/kivi_half.h.
#pragma once

struct f16 {
    unsigned short bits;
};
static __device__ inline unsigned short f16_bits(f16 x) { return x.bits; }
static __device__ inline f16 f16_of_bits(unsigned short x) {
    f16 out = {x};
    return out;
}
static __device__ inline float f16_to_f32(f16 x) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
    return out;
}
static __device__ inline f16 f32_to_f16(float x) {
    f16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
    return out;
}
