typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char s8;
typedef short s16;
typedef int s32;
typedef long long s64;

extern "C" __global__ void __launch_bounds__(32) prefix_minimum(float *x, float *o, u32 blocks) {
    float v3[1];
    __shared__ float v4[1];
    __shared__ float v5[8];
    float v6[1];
    __shared__ float v7[1];
    u32 thread = threadIdx.x;
    u32 row = blockIdx.x;
    u32 zero = 0u;
    u32 one = 1u;
    u32 eight = 8u;
    u32 stride = blocks * eight;
    u32 first = row * stride;
    float high = 1.0000000150474662e+30f;
    bool v16 = (s32)thread < (s32)one;
    u32 v17 = zero;
    if (v16) {
        v6[v17] = high;
    }
    if (v16) {
        float v18 = v6[v17];
        u32 v19 = thread;
        v7[v19] = v18;
    }
    float v20 = __uint_as_float(2139095040u);
    for (u32 i = zero; (s32)i < (s32)blocks; i += one) {
        u32 skip = i * eight;
        u32 place = first + skip;
        if (v16) {
            float v24 = v20;
            for (u32 v25 = zero; (s32)v25 < (s32)eight; v25 += one) {
                u32 v26 = place + v25;
                float v27 = x[(s32)v26];
                float v28 = fminf(v24, v27);
                u32 v29 = v25;
                v5[v29] = v28;
                v24 = v28;
            }
        }
        __syncthreads();
        bool v31 = (s32)thread < (s32)eight;
        float v32 = v7[v17];
        if (v31) {
            u32 v33 = place + thread;
            u32 v34 = thread;
            float v35 = v5[v34];
            float v36 = fminf(v35, v32);
            o[(s32)v33] = v36;
        }
        u32 v37 = thread % eight;
        u32 v38 = thread / eight;
        bool v39 = (s32)v38 < (s32)one;
        u32 v40 = v37;
        float v41 = v5[v40];
        float v42 = v7[v17];
        float v43 = fminf(v41, v42);
        float v44 = fminf(v20, v43);
        float v45 = __shfl_xor_sync(0xffffffffu, v44, 4, 32);
        float v46 = fminf(v44, v45);
        float v47 = __shfl_xor_sync(0xffffffffu, v46, 2, 32);
        float v48 = fminf(v46, v47);
        float v49 = __shfl_xor_sync(0xffffffffu, v48, 1, 32);
        float v50 = fminf(v48, v49);
        bool v51 = (s32)v37 < (s32)one;
        bool v52 = v51 & v39;
        u32 v53 = v38;
        if (v52) {
            v4[v53] = v50;
        }
        __syncthreads();
        float v54 = v4[v17];
        if (v16) {
            v3[v17] = v54;
        }
        if (v16) {
            float v55 = v3[v17];
            u32 v56 = thread;
            v7[v56] = v55;
        }
        __syncthreads();
    }
}
