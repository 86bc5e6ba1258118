typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char s8;
typedef short s16;
typedef int s32;
typedef long long s64;

extern "C" __global__ void __launch_bounds__(32) row_softmax(float *x, float *o, u32 n) {
    __shared__ float v3[1];
    __shared__ float v4[1];
    u32 thread = threadIdx.x;
    u32 row = blockIdx.x;
    u32 first = row * n;
    float low = -1.0000000150474662e+30f;
    u32 v9 = 32u;
    u32 v10 = thread % v9;
    u32 v11 = thread / v9;
    float v12 = __uint_as_float(4286578688u);
    u32 v13 = 0u;
    u32 v14 = 2u;
    u32 v15 = 1u;
    float v16 = v12;
    for (u32 v17 = v13; (s32)v17 < (s32)v14; v17 += v15) {
        u32 v18 = v17 * v9;
        u32 v19 = v18 + v10;
        u32 v20 = first + v19;
        bool v21 = (s32)v19 < (s32)n;
        float v22 = v21 ? x[(s32)v20] : low;
        float v23 = fmaxf(v16, v22);
        v16 = v23;
    }
    float v25 = __shfl_xor_sync(0xffffffffu, v16, 16, 32);
    float v26 = fmaxf(v16, v25);
    float v27 = __shfl_xor_sync(0xffffffffu, v26, 8, 32);
    float v28 = fmaxf(v26, v27);
    float v29 = __shfl_xor_sync(0xffffffffu, v28, 4, 32);
    float v30 = fmaxf(v28, v29);
    float v31 = __shfl_xor_sync(0xffffffffu, v30, 2, 32);
    float v32 = fmaxf(v30, v31);
    float v33 = __shfl_xor_sync(0xffffffffu, v32, 1, 32);
    float v34 = fmaxf(v32, v33);
    bool v35 = (s32)v10 < (s32)v15;
    u32 v36 = v11;
    if (v35) {
        v4[v36] = v34;
    }
    __syncthreads();
    u32 v37 = thread % v9;
    float v38 = -0.0f;
    u32 v39 = v13;
    float v40 = v4[v39];
    float v41 = v38;
    for (u32 v42 = v13; (s32)v42 < (s32)v14; v42 += v15) {
        u32 v43 = v42 * v9;
        u32 v44 = v43 + v37;
        u32 v45 = first + v44;
        bool v46 = (s32)v44 < (s32)n;
        float v47 = v46 ? x[(s32)v45] : low;
        float v48 = __fsub_rn(v47, v40);
        float v49 = expf(v48);
        float v50 = __fadd_rn(v41, v49);
        v41 = v50;
    }
    float v52 = __shfl_xor_sync(0xffffffffu, v41, 16, 32);
    float v53 = __fadd_rn(v41, v52);
    float v54 = __shfl_xor_sync(0xffffffffu, v53, 8, 32);
    float v55 = __fadd_rn(v53, v54);
    float v56 = __shfl_xor_sync(0xffffffffu, v55, 4, 32);
    float v57 = __fadd_rn(v55, v56);
    float v58 = __shfl_xor_sync(0xffffffffu, v57, 2, 32);
    float v59 = __fadd_rn(v57, v58);
    float v60 = __shfl_xor_sync(0xffffffffu, v59, 1, 32);
    float v61 = __fadd_rn(v59, v60);
    bool v62 = (s32)v37 < (s32)v15;
    if (v62) {
        v3[v36] = v61;
    }
    __syncthreads();
    float v63 = v4[v39];
    float v64 = v3[v39];
    for (u32 v65 = v13; (s32)v65 < (s32)v14; v65 += v15) {
        u32 v66 = v65 * v9;
        u32 v67 = v66 + thread;
        u32 v68 = first + v67;
        bool v69 = (s32)v67 < (s32)n;
        float v70 = v69 ? x[(s32)v68] : low;
        float v71 = __fsub_rn(v70, v63);
        float v72 = expf(v71);
        float v73 = __fdiv_rn(v72, v64);
        if (v69) {
            o[(s32)v68] = v73;
        }
    }
}
