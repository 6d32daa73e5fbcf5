// Page copies that quantise on the way: a value becomes one byte, with one float32 scale for each plane of a page.
//
// A host page is what the disk tier's codec of the same name encodes, bit for bit:
//     | scales: float32 of each plane | codes from CODES_OFFSET: one byte a value, planes one after the other |
// A device page of plane p begins at planes[p] + device_pages[i] * PLANE_BYTES, a host page at
// host + host_pages[i] * PAGE_STRIDE; planes[0] is plane number first_plane of the host page.
//
// Macros:
//     DTYPE          DTYPE_float32, DTYPE_float16 or DTYPE_bfloat16
//     FORMAT         FORMAT_fp8 (e4m3fn) or FORMAT_int8
//     PLANE_BYTES    bytes of one plane of one page on the device
//     PAGE_STRIDE    bytes from one host page to the next, a multiple of 4
//     CODES_OFFSET   where the codes begin in a host page: the codec's is 4 * all planes of a page
//     VECTOR_BYTES   16, 8, 4, 2 or 1: codes that a thread takes at once; divides CODES_OFFSET, PAGE_STRIDE and the
//                    values of a plane. Device addresses are multiples of as many values, or of 16 bytes.
//     MAX_THREADS    the largest block it is launched with, 512 unless given
//
// Launch: one-dimensional blocks of a multiple of 32 threads, any number of them, no dynamic shared memory;
// num_pages and num_planes of at least 1. A block takes one plane of one page at a time.

#include "memory.cuh"
#include "numbers.cuh"
#include "pages.cuh"

#ifndef MAX_THREADS
#define MAX_THREADS 512
#endif

#if DTYPE == DTYPE_float32
typedef unsigned int Value;
#elif DTYPE == DTYPE_float16 || DTYPE == DTYPE_bfloat16
typedef unsigned short Value;
#else
#error "DTYPE is DTYPE_float32, DTYPE_float16 or DTYPE_bfloat16"
#endif

constexpr u64 plane_bytes = PLANE_BYTES;
constexpr u64 plane_values = plane_bytes / sizeof(Value);
constexpr u64 page_stride = PAGE_STRIDE;
constexpr u64 codes_offset = CODES_OFFSET;
static_assert(plane_bytes > 0 && plane_bytes % (VECTOR_BYTES * sizeof(Value)) == 0, "PLANE_BYTES is unaligned");
static_assert(page_stride % VECTOR_BYTES == 0 && page_stride % 4 == 0, "PAGE_STRIDE is unaligned");
static_assert(codes_offset % VECTOR_BYTES == 0, "CODES_OFFSET is unaligned");
static_assert(codes_offset + plane_values <= page_stride, "PAGE_STRIDE is too small");
static_assert(plane_values < 1ull << 31, "PLANE_BYTES is too large for 32-bit numbers of values");
static_assert(MAX_THREADS % 32 == 0, "MAX_THREADS is no multiple of 32");

// A group: the values that a thread takes at once, and their codes.
constexpr u32 group_bytes = VECTOR_BYTES * sizeof(Value);
constexpr u32 group_count = plane_bytes / group_bytes;
typedef Access<VECTOR_BYTES>::type CodeVector;
typedef Access<(group_bytes < 16 ? group_bytes : 16)>::type ValueVector;
constexpr u32 group_vectors = group_bytes / sizeof(ValueVector);

union Values {
    ValueVector vectors[group_vectors];
    Value values[VECTOR_BYTES];
};

union Codes {
    CodeVector vector;
    unsigned char codes[VECTOR_BYTES];
};

__device__ __forceinline__ Values load_values(const ValueVector* plane, u32 group) {
    Values group_values;
#pragma unroll
    for (u32 part = 0; part < group_vectors; ++part) {
        group_values.vectors[part] = load(plane + group * group_vectors + part);
    }
    return group_values;
}

struct Peak {
    u32 bits;       // of the largest finite magnitude
    u32 nonfinite;  // whether there is another
};

__device__ __forceinline__ Peak larger(Peak a, Peak b) {
    return Peak{a.bits > b.bits ? a.bits : b.bits, a.nonfinite | b.nonfinite};
}

__device__ __forceinline__ Peak peak_of_thread(const ValueVector* plane) {
    Peak peak{0, 0};
#pragma unroll 4
    for (u32 group = threadIdx.x; group < group_count; group += blockDim.x) {
        const Values values = load_values(plane, group);
#pragma unroll
        for (u32 index = 0; index < VECTOR_BYTES; ++index) {
            const u32 magnitude = __float_as_uint(widened(values.values[index])) & ~sign_bit;
            const bool finite = magnitude < infinity;
            peak = larger(peak, Peak{finite ? magnitude : 0, !finite});
        }
    }
    return peak;
}

// The peak of the whole block, known to all of its threads.
__device__ __forceinline__ Peak peak_of_block(Peak peak, Peak* warps) {
#pragma unroll
    for (u32 distance = warp_threads / 2; distance > 0; distance /= 2) {
        const u32 bits = __shfl_xor_sync(0xFFFFFFFFu, peak.bits, distance);
        peak = larger(peak, Peak{bits, __shfl_xor_sync(0xFFFFFFFFu, peak.nonfinite, distance)});
    }
    if (threadIdx.x % warp_threads == 0) warps[threadIdx.x / warp_threads] = peak;
    __syncthreads();
    for (u32 warp = 0; warp < blockDim.x / warp_threads; ++warp) peak = larger(peak, warps[warp]);
    __syncthreads();  // `warps` is free again
    return peak;
}

__device__ __forceinline__ void encode(const ValueVector* plane, CodeVector* to, Peak peak, float scale) {
    const float divisor = scale > 0.0f ? scale : 1.0f;
    const u32 bound = peak.nonfinite ? peak.bits : infinity;
    for (u32 group = threadIdx.x; group < group_count; group += blockDim.x) {
        const Values values = load_values(plane, group);
        Codes codes;
#pragma unroll
        for (u32 index = 0; index < VECTOR_BYTES; ++index) {
            codes.codes[index] = code_of(tamed(widened(values.values[index]), bound), divisor);
        }
        store(to + group, codes.vector);
    }
}

__device__ __forceinline__ void decode(const CodeVector* from, ValueVector* plane, float scale) {
    for (u32 group = threadIdx.x; group < group_count; group += blockDim.x) {
        Codes codes;
        codes.vector = load(from + group);
        Values values;
#pragma unroll
        for (u32 index = 0; index < VECTOR_BYTES; ++index) values.values[index] = value_of(codes.codes[index], scale);
#pragma unroll
        for (u32 part = 0; part < group_vectors; ++part) {
            store(plane + group * group_vectors + part, values.vectors[part]);
        }
    }
}

__device__ __forceinline__ ValueVector* plane_at(u64 plane, int page) {
    return reinterpret_cast<ValueVector*>(plane + static_cast<u32>(page) * plane_bytes);
}

__device__ __forceinline__ unsigned char* host_at(unsigned char* host, int page) {
    return host + static_cast<u32>(page) * page_stride;
}

__device__ __forceinline__ u32* scale_at(unsigned char* host_page, u64 plane) {
    return reinterpret_cast<u32*>(host_page) + plane;
}

__device__ __forceinline__ CodeVector* codes_at(unsigned char* host_page, u64 plane) {
    return reinterpret_cast<CodeVector*>(host_page + codes_offset + plane * plane_values);
}

// Device to host.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    gather_quantised(const u64* __restrict__ planes, unsigned char* host, const int* __restrict__ device_pages,
                     const int* __restrict__ host_pages, u32 num_pages, u32 num_planes, u64 first_plane) {
    __shared__ Peak warps[MAX_THREADS / warp_threads];
    for (Cursor at(blockIdx.x, gridDim.x, num_planes); at.page < num_pages; at.advance()) {
        const ValueVector* plane = plane_at(planes[at.item], device_pages[at.page]);
        unsigned char* page = host_at(host, host_pages[at.page]);
        const Peak peak = peak_of_block(peak_of_thread(plane), warps);
        const float scale = scale_of(__uint_as_float(peak.bits));
        if (threadIdx.x == 0) store(scale_at(page, first_plane + at.item), __float_as_uint(scale));
        encode(plane, codes_at(page, first_plane + at.item), peak, scale);
    }
}

// Host to device.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    scatter_quantised(const u64* __restrict__ planes, unsigned char* host, const int* __restrict__ device_pages,
                      const int* __restrict__ host_pages, u32 num_pages, u32 num_planes, u64 first_plane) {
    __shared__ u32 shared_scale;  // read once: each warp's own load would cross the bus again
    for (Cursor at(blockIdx.x, gridDim.x, num_planes); at.page < num_pages; at.advance()) {
        unsigned char* page = host_at(host, host_pages[at.page]);
        if (threadIdx.x == 0) shared_scale = load(scale_at(page, first_plane + at.item));
        __syncthreads();
        const float scale = __uint_as_float(shared_scale);
        __syncthreads();  // `shared_scale` is free again
        decode(codes_at(page, first_plane + at.item), plane_at(planes[at.item], device_pages[at.page]), scale);
    }
}
