// Page copies between layer-first device planes and page-first host memory, as they are: no value is changed.
//
// Plane p of page i lies at
//     device   planes[p] + device_pages[i] * PLANE_BYTES
//     host     host + host_pages[i] * PAGE_STRIDE + first_byte + p * PLANE_BYTES
//
// Macros:
//     VECTOR_BYTES   16, 8, 4, 2 or 1: width of an access; divides every address and size above
//     PLANE_BYTES    bytes of one plane of one page
//     PAGE_STRIDE    bytes from one host page to the next
//     UNROLL         accesses that a thread keeps in flight, 8 unless given
//     MAX_THREADS    the largest block it is launched with, 512 unless given
//     LANE_LINEAR    1 or 0: chooses one of the two divisions of work below, by the size of a plane unless given
//
// Launch: one-dimensional blocks of a multiple of 32 threads, any number of them, no shared memory;
// num_pages and num_planes of at least 1. A grid that is too small or too large only changes who copies what.

#include "memory.cuh"
#include "pages.cuh"

#ifndef UNROLL
#define UNROLL 8
#endif
#ifndef MAX_THREADS
#define MAX_THREADS 512
#endif

typedef Access<VECTOR_BYTES>::type Vector;

constexpr u64 plane_bytes = PLANE_BYTES;
constexpr u64 page_stride = PAGE_STRIDE;
static_assert(plane_bytes > 0 && plane_bytes % VECTOR_BYTES == 0, "PLANE_BYTES is no multiple of VECTOR_BYTES");
static_assert(page_stride >= plane_bytes && page_stride % VECTOR_BYTES == 0, "PAGE_STRIDE is too small or unaligned");
static_assert(page_stride / VECTOR_BYTES < 1ull << 31, "PAGE_STRIDE is too large for 32-bit vector numbers");
static_assert(UNROLL >= 1 && UNROLL <= 16, "UNROLL is 1 to 16");

constexpr u32 plane_vectors = PLANE_BYTES / VECTOR_BYTES;

// Tiles: a plane is cut into as few as UNROLL rows of a warp allow, equal but for the last one.
constexpr u32 plane_tiles = (plane_vectors + warp_threads * UNROLL - 1) / (warp_threads * UNROLL);
constexpr u32 plane_rows = (plane_vectors + warp_threads - 1) / warp_threads;
constexpr u32 tile_rows = (plane_rows + plane_tiles - 1) / plane_tiles;
constexpr u32 tile_vectors = tile_rows * warp_threads;
constexpr bool tiles_are_full = plane_vectors % tile_vectors == 0;

#ifndef LANE_LINEAR
#define LANE_LINEAR (plane_vectors < 4 * warp_threads)
#endif

struct Copy {
    const u64* __restrict__ planes;
    unsigned char* host;
    const int* __restrict__ device_pages;
    const int* __restrict__ host_pages;
    u32 num_pages, num_planes;
    u64 first_byte;

    // Vector number `vector` of one plane of one page.
    __device__ Vector* on_device(u32 page, u32 plane, u32 vector) const {
        const u64 offset = static_cast<u32>(device_pages[page]) * plane_bytes;
        return reinterpret_cast<Vector*>(planes[plane] + offset) + vector;
    }

    __device__ Vector* on_host(u32 page, u32 plane, u32 vector) const {
        const u64 offset = static_cast<u32>(host_pages[page]) * page_stride + first_byte + plane * plane_bytes;
        return reinterpret_cast<Vector*>(host + offset) + vector;
    }
};

// All loads of a thread are on their way before its first store waits for one.
__device__ __forceinline__ void copy_tile(const Vector* from, Vector* to, u32 lane, u32 count) {
    Vector values[tile_rows];
#pragma unroll
    for (u32 row = 0; row < tile_rows; ++row) {
        const u32 vector = row * warp_threads + lane;
        if (tiles_are_full || vector < count) values[row] = load(from + vector);
    }
#pragma unroll
    for (u32 row = 0; row < tile_rows; ++row) {
        const u32 vector = row * warp_threads + lane;
        if (tiles_are_full || vector < count) store(to + vector, values[row]);
    }
}

// Planes of several rows: a warp takes a tile. Tiles follow each other as their bytes do on the host.
template <bool to_host>
__device__ __forceinline__ void copy_by_tiles(const Copy& copy, u32 thread, u32 threads) {
    const u32 lane = thread % warp_threads;
    Cursor at(thread / warp_threads, threads / warp_threads, copy.num_planes * plane_tiles);
    for (; at.page < copy.num_pages; at.advance()) {
        const u32 plane = at.item / plane_tiles;
        const u32 first = at.item % plane_tiles * tile_vectors;
        const u32 left = plane_vectors - first;
        Vector* device = copy.on_device(at.page, plane, first);
        Vector* host = copy.on_host(at.page, plane, first);
        copy_tile(to_host ? device : host, to_host ? host : device, lane, left < tile_vectors ? left : tile_vectors);
    }
}

// Small planes: a thread takes a vector, so that a row of a warp may go over several planes and pages.
template <bool to_host>
__device__ __forceinline__ void copy_by_lanes(const Copy& copy, u32 thread, u32 threads) {
    Cursor at(thread, threads, copy.num_planes * plane_vectors);
    while (at.page < copy.num_pages) {
        const Vector* from[UNROLL];
        Vector* to[UNROLL];
        Vector values[UNROLL];
#pragma unroll
        for (u32 row = 0; row < UNROLL; ++row, at.advance()) {
            to[row] = nullptr;
            if (at.page >= copy.num_pages) continue;
            Vector* device = copy.on_device(at.page, at.item / plane_vectors, at.item % plane_vectors);
            Vector* host = copy.on_host(at.page, at.item / plane_vectors, at.item % plane_vectors);
            from[row] = to_host ? device : host;
            to[row] = to_host ? host : device;
        }
#pragma unroll
        for (u32 row = 0; row < UNROLL; ++row) {
            if (to[row] != nullptr) values[row] = load(from[row]);
        }
#pragma unroll
        for (u32 row = 0; row < UNROLL; ++row) {
            if (to[row] != nullptr) store(to[row], values[row]);
        }
    }
}

template <bool to_host>
__device__ __forceinline__ void copy_pages(const Copy& copy) {
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 threads = gridDim.x * blockDim.x;
    if (LANE_LINEAR) {
        copy_by_lanes<to_host>(copy, thread, threads);
    } else {
        copy_by_tiles<to_host>(copy, thread, threads);
    }
}

// Device to host.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    gather_pages(const u64* __restrict__ planes, unsigned char* host, const int* __restrict__ device_pages,
                 const int* __restrict__ host_pages, u32 num_pages, u32 num_planes, u64 first_byte) {
    copy_pages<true>(Copy{planes, host, device_pages, host_pages, num_pages, num_planes, first_byte});
}

// Host to device.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    scatter_pages(const u64* __restrict__ planes, unsigned char* host, const int* __restrict__ device_pages,
                  const int* __restrict__ host_pages, u32 num_pages, u32 num_planes, u64 first_byte) {
    copy_pages<false>(Copy{planes, host, device_pages, host_pages, num_pages, num_planes, first_byte});
}
