// CUDA C on a CPU: what a kernel's text needs, and nothing else, so that it compiles in milliseconds. It is included in front of the
// unmodified text; `runtime.cpp` runs the threads of a block.
#pragma once

#define __global__
#define __launch_bounds__(...)
#define __shared__ static  // one block runs at a time
#define __align__(bytes) __attribute__((aligned(bytes)))

struct __align__(16) uint4 {
    unsigned x, y, z, w;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4{x, y, z, w}; }

struct Dim3 {
    unsigned x, y, z;
};
extern "C" {
extern Dim3 threadIdx, blockIdx;  // of the thread that is running
void shim_barrier(int line);
unsigned long long shim_exchange(unsigned long long value, unsigned mask, int down, int offset, int width, int line);

float fmaf(float, float, float);
float fmaxf(float, float);
float fminf(float, float);
double fmax(double, double);
double fmin(double, double);
float expf(float);
float exp2f(float);
float log2f(float);
float fabsf(float);
float rintf(float);
}

#define __syncthreads() shim_barrier(__LINE__)
#define __shfl_xor_sync(mask, value, offset, width) shim_shuffle(value, mask, 0, offset, width, __LINE__)
#define __shfl_down_sync(mask, value, offset, width) shim_shuffle(value, mask, 1, offset, width, __LINE__)

template <class T>
static inline T shim_shuffle(T value, unsigned mask, int down, int offset, int width, int line) {
    unsigned long long word = 0;
    __builtin_memcpy(&word, &value, sizeof value);
    word = shim_exchange(word, mask, down, offset, width, line);
    __builtin_memcpy(&value, &word, sizeof value);
    return value;
}

template <class To, class From>
static inline To shim_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps the width");
    To out;
    __builtin_memcpy(&out, &x, sizeof out);
    return out;
}
static inline unsigned __float_as_uint(float x) { return shim_bits<unsigned>(x); }
static inline float __uint_as_float(unsigned x) { return shim_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return shim_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return shim_bits<double>(x); }

// The compiler is told not to contract, so each of these rounds once.
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }

// What runs a kernel: its arguments are addresses of values of its parameter types.
template <int... I>
struct Numbers {};
template <int N, int... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <int... I>
struct Count<0, I...> {
    typedef Numbers<I...> type;
};
template <class... A, int... I>
static inline void shim_call(void (*kernel)(A...), void **given, Numbers<I...>) {
    kernel(*(A *)given[I]...);
}
template <class... A>
static inline void shim_call(void (*kernel)(A...), void **given) {
    shim_call(kernel, given, typename Count<sizeof...(A)>::type());
}
#define SHIM_ENTRY(kernel) \
    extern "C" void shim_entry(void **given) { shim_call(kernel, given); }
