typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char s8;
typedef short s16;
typedef int s32;
typedef long long s64;

extern "C" __global__ void __launch_bounds__(32) row_totals(u16 *x, float *o, u32 n) {
    __shared__ float v3[8];
    __shared__ __align__(16) u16 v4[128];
    u32 thread = threadIdx.x;
    u32 block = blockIdx.x;
    u32 size = 8u;
    u32 length = 16u;
    u32 first = block * size;
    bool v10 = (s32)thread < (s32)length;
    u32 v11 = 0u;
    u32 v12 = 2u;
    if (v10) {
        u32 v13 = thread % v12;
        u32 v14 = thread / v12;
        u32 v15 = v13 * size;
        u32 v16 = thread * size;
        u32 v17 = v16;
        u32 v18 = first + v14;
        u32 v19 = v18 * length;
        u32 v20 = v19 + v15;
        bool v21 = (s32)v18 < (s32)n;
        *(uint4 *)&v4[v17] = v21 ? *(const uint4 *)&x[(s32)v20] : make_uint4(0u, 0u, 0u, 0u);
    }
    __syncthreads();
    u32 v22 = 4u;
    u32 v23 = thread % v22;
    u32 v24 = thread / v22;
    float v25 = -0.0f;
    u32 v26 = 1u;
    u32 v27 = v24 * length;
    float v28 = v25;
    for (u32 v29 = v11; (s32)v29 < (s32)v22; v29 += v26) {
        u32 v30 = v29 * v22;
        u32 v31 = v30 + v23;
        u32 v32 = v27 + v31;
        u32 v33 = v32;
        u16 v34 = v4[v33];
        float v35 = (float)(s16)v34;
        float v36 = __fadd_rn(v28, v35);
        v28 = v36;
    }
    float v38 = __shfl_xor_sync(0xffffffffu, v28, 2, 32);
    float v39 = __fadd_rn(v28, v38);
    float v40 = __shfl_xor_sync(0xffffffffu, v39, 1, 32);
    float v41 = __fadd_rn(v39, v40);
    bool v42 = (s32)v23 < (s32)v26;
    u32 v43 = v24;
    if (v42) {
        v3[v43] = v41;
    }
    __syncthreads();
    bool v44 = (s32)thread < (s32)size;
    if (v44) {
        u32 v45 = first + thread;
        u32 v46 = thread;
        float v47 = v3[v46];
        bool v48 = (s32)v45 < (s32)n;
        if (v48) {
            o[(s32)v45] = v47;
        }
    }
}
