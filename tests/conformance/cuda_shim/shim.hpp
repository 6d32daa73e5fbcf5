// CUDA C++ on a CPU: what a kernel needs to be compiled by g++ and run block by block (driver.cpp).
//
// A block's threads are fibers on one CPU thread. Payload goes through shim_load and shim_store, which check every
// access; shared memory is a static variable, since one block runs at a time.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(threads)

struct dim3 {
    unsigned int x, y, z;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned int x, y;
};

extern dim3 gridDim, blockDim, blockIdx, threadIdx;

// Return only if the running thread may touch these bytes: the launch ends with the first failure.
void shim_check_load(const void* address, unsigned int bytes);
void shim_check_store(const void* address, unsigned int bytes);

template <typename T>
T shim_load(const T* from) {
    shim_check_load(from, sizeof(T));
    return *from;
}

template <typename T>
void shim_store(T* to, T value) {
    shim_check_store(to, sizeof(T));
    *to = value;
}

void __syncthreads();
unsigned int __shfl_xor_sync(unsigned int mask, unsigned int value, int distance);

template <typename To, typename From>
To shim_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "of the same size");
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

// x86-64 and AArch64 round float operations to nearest even, without excess precision; the compiler is told not to
// contract them (-ffp-contract=off).
inline float __uint_as_float(unsigned int bits) { return shim_bits<float>(bits); }
inline unsigned int __float_as_uint(float value) { return shim_bits<unsigned int>(value); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __float2int_rn(float value) { return static_cast<int>(std::nearbyint(value)); }
