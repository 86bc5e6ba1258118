typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char s8;
typedef short s16;
typedef int s32;
typedef long long s64;

extern "C" __global__ void __launch_bounds__(32) strided_copy(u16 *x, u16 *o, u64 stride, u64 n) {
    u32 thread = threadIdx.x;
    u32 block = blockIdx.x;
    u64 wide = (u64)block;
    u64 size = 32ull;
    u64 first = wide * size;
    u64 v9 = (u64)thread;
    u64 v10 = first + v9;
    u64 v11 = v10 * stride;
    bool v12 = v10 < n;
    u16 v13 = 0u;
    u16 v14 = v12 ? x[(s64)v11] : v13;
    if (v12) {
        o[(s64)v10] = v14;
    }
}
