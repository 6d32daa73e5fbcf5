// Loads and stores of payload in global memory: device memory, or pinned host memory that the GPU addresses.
//
// Compiled by NVRTC without include paths but this folder's, by nvcc, and by g++ for the shim of the tests, which
// brings its own `shim_load` and `shim_store`.
//
// Written as PTX because an address that was read from a table is generic to the compiler: it would neither emit
// ld.global nor trust that a store leaves the tables alone. The volatile statements keep their order among
// themselves (loads in flight before stores) and nothing else is kept from moving.

#pragma once

// The type of an access of so many bytes.
template <int bytes>
struct Access;
template <>
struct Access<16> {
    typedef uint4 type;
};
template <>
struct Access<8> {
    typedef uint2 type;
};
template <>
struct Access<4> {
    typedef unsigned int type;
};
template <>
struct Access<2> {
    typedef unsigned short type;
};
template <>
struct Access<1> {
    typedef unsigned char type;
};

#ifdef __CUDACC__

__device__ __forceinline__ uint4 load(const uint4* from) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}

__device__ __forceinline__ uint2 load(const uint2* from) {
    uint2 value;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(from));
    return value;
}

__device__ __forceinline__ unsigned int load(const unsigned int* from) {
    unsigned int value;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(value) : "l"(from));
    return value;
}

__device__ __forceinline__ unsigned short load(const unsigned short* from) {
    unsigned short value;
    asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(value) : "l"(from));
    return value;
}

__device__ __forceinline__ unsigned char load(const unsigned char* from) {
    unsigned int value;
    asm volatile("ld.global.L1::no_allocate.u8 %0, [%1];" : "=r"(value) : "l"(from));
    return static_cast<unsigned char>(value);
}

__device__ __forceinline__ void store(uint4* to, uint4 value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w));
}

__device__ __forceinline__ void store(uint2* to, uint2 value) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" : : "l"(to), "r"(value.x), "r"(value.y));
}

__device__ __forceinline__ void store(unsigned int* to, unsigned int value) {
    asm volatile("st.global.u32 [%0], %1;" : : "l"(to), "r"(value));
}

__device__ __forceinline__ void store(unsigned short* to, unsigned short value) {
    asm volatile("st.global.u16 [%0], %1;" : : "l"(to), "h"(value));
}

__device__ __forceinline__ void store(unsigned char* to, unsigned char value) {
    asm volatile("st.global.u8 [%0], %1;" : : "l"(to), "r"(static_cast<unsigned int>(value)));
}

#else

template <typename T>
T load(const T* from) {
    return shim_load(from);
}

template <typename T>
void store(T* to, T value) {
    shim_store(to, value);
}

#endif
