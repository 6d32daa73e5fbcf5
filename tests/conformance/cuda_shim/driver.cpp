// Runs kernels on the CPU, block by block: see shim.hpp. A .cu file compiled by g++ is linked to this.

#include "shim.hpp"

#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace {

constexpr unsigned int warp_size = 32;
constexpr std::size_t stack_bytes = 64 << 10;

struct Region {
    std::uint64_t address, bytes;
    std::uint32_t writable;
};

struct Access {
    std::uint64_t address;
    unsigned int bytes;
    bool operator<(const Access& other) const { return address < other.address; }
};

enum class State { ready, at_warp, at_block, done };

struct Fiber {
    ucontext_t context;
    State state;
    std::vector<char> stack;
    unsigned int exchanged;
};

using Kernel = void (*)(const unsigned long long*, unsigned char*, const int*, const int*, unsigned int, unsigned int,
                        unsigned long long);

struct Arguments {
    const unsigned long long* planes;
    unsigned char* host;
    const int *device_pages, *host_pages;
    std::uint32_t num_pages, num_planes;
    std::uint64_t first;
};

std::vector<Fiber> fibers;
std::vector<Region> regions;
std::vector<Access> stores;
std::uint64_t writable_bytes;  // that were not yet stored to
std::string failure;
ucontext_t scheduler;
Kernel kernel;
Arguments arguments;

void fail(const char* what, std::uint64_t address, unsigned int bytes) {
    if (!failure.empty()) return;
    char text[200];
    std::snprintf(text, sizeof text, "%s: %u bytes at %llx by thread %u of block %u", what, bytes,
                  static_cast<unsigned long long>(address), threadIdx.x, blockIdx.x);
    failure = text;
}

void wait(State state) {
    Fiber& fiber = fibers[threadIdx.x];
    fiber.state = state;
    swapcontext(&fiber.context, &scheduler);
}

void check(const char* what, std::uint64_t address, unsigned int bytes, bool write) {
    bool inside = false;
    for (const Region& region : regions) {
        const std::uint64_t offset = address - region.address;
        inside |= (region.writable || !write) && offset < region.bytes && offset + bytes <= region.bytes;
    }
    if (address % bytes != 0) fail("an unaligned access", address, bytes);
    if (!inside) fail(what, address, bytes);
    if (!failure.empty()) wait(State::done);  // for ever
}

void run_thread() {
    const Arguments& a = arguments;
    kernel(a.planes, a.host, a.device_pages, a.host_pages, a.num_pages, a.num_planes, a.first);
    fibers[threadIdx.x].state = State::done;  // and on to the scheduler, by uc_link
}

void prepare(Fiber& fiber) {
    getcontext(&fiber.context);
    fiber.stack.resize(stack_bytes);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    fiber.state = State::ready;
    makecontext(&fiber.context, run_thread, 0);
}

// Lets the threads first .. last go on if all of them that still run wait in `state`; whether any did.
bool release(unsigned int first, unsigned int last, State state) {
    bool any = false;
    for (unsigned int thread = first; thread < last; ++thread) {
        if (fibers[thread].state != state && fibers[thread].state != State::done) return false;
        any |= fibers[thread].state == state;
    }
    for (unsigned int thread = first; thread < last; ++thread) {
        if (fibers[thread].state == state) fibers[thread].state = State::ready;
    }
    return any;
}

bool release_all() {
    bool any = release(0, blockDim.x, State::at_block);
    for (unsigned int first = 0; first < blockDim.x; first += warp_size) {
        any |= release(first, std::min(first + warp_size, blockDim.x), State::at_warp);
    }
    return any;
}

// Lets all threads run that can, but for those of the warp `waiting`; the first of them depends on the seed.
void run_round(std::uint32_t& seed, unsigned int waiting) {
    seed = seed * 1664525u + 1013904223u;
    const unsigned int start = seed >> 8;
    for (unsigned int turn = 0; turn < blockDim.x && failure.empty(); ++turn) {
        const unsigned int forward = (start + turn) % blockDim.x;
        threadIdx.x = seed >> 31 ? forward : blockDim.x - 1 - forward;
        if (fibers[threadIdx.x].state != State::ready || threadIdx.x / warp_size == waiting) continue;
        swapcontext(&scheduler, &fibers[threadIdx.x].context);
    }
}

// One warp, chosen by the seed, is slow: it goes on only when no other can, so that a missing barrier shows.
void run_block(std::uint32_t& seed) {
    for (unsigned int thread = 0; thread < blockDim.x; ++thread) prepare(fibers[thread]);
    const unsigned int slow = (seed >> 16) % (blockDim.x / warp_size);
    do {
        do {
            run_round(seed, slow);
        } while (failure.empty() && release_all());
        run_round(seed, ~0u);
    } while (failure.empty() && release_all());
    for (unsigned int thread = 0; thread < blockDim.x; ++thread) {
        if (fibers[thread].state != State::done) {
            threadIdx.x = thread;
            fail("threads of a block wait at different barriers", 0, 0);
        }
    }
}

void check_stores() {
    std::sort(stores.begin(), stores.end());
    for (std::size_t index = 1; index < stores.size(); ++index) {
        if (stores[index - 1].address + stores[index - 1].bytes > stores[index].address) {
            fail("a byte was written twice", stores[index].address, stores[index].bytes);
        }
    }
}

}  // namespace

void shim_check_load(const void* address, unsigned int bytes) {
    check("a load outside the pools", reinterpret_cast<std::uint64_t>(address), bytes, false);
}

void shim_check_store(const void* address, unsigned int bytes) {
    const Access access{reinterpret_cast<std::uint64_t>(address), bytes};
    if (bytes > writable_bytes) fail("a byte was written twice", access.address, bytes);  // for ever, perhaps
    check("a store outside what may be written", access.address, bytes, true);
    writable_bytes -= bytes;
    stores.push_back(access);
}

void __syncthreads() { wait(State::at_block); }

unsigned int __shfl_xor_sync(unsigned int mask, unsigned int value, int distance) {
    if (mask != 0xFFFFFFFFu) fail("a shuffle of a part of a warp", 0, 0);
    const unsigned int thread = threadIdx.x;
    fibers[thread].exchanged = value;
    wait(State::at_warp);
    const unsigned int other = fibers[thread ^ static_cast<unsigned int>(distance)].exchanged;
    wait(State::at_warp);  // nobody overwrites what another has yet to read
    return other;
}

extern "C" void __ubsan_on_report() { fail("undefined behaviour, see stderr", 0, 0); }

// Runs `grid` blocks of `block` threads. Returns what went wrong first, or an empty string; `num_stores` is set to
// the number of stores.
extern "C" const char* shim_launch(Kernel what, std::uint32_t grid, std::uint32_t block, std::uint32_t seed,
                                   const Region* pools, std::uint32_t num_pools, const Arguments* with,
                                   std::uint64_t* num_stores) {
    failure.clear();
    stores.clear();
    kernel = what;
    arguments = *with;
    regions.assign(pools, pools + num_pools);
    writable_bytes = 0;
    for (const Region& region : regions) writable_bytes += region.writable ? region.bytes : 0;
    if (fibers.size() < block) fibers.resize(block);
    gridDim = {grid, 1, 1};
    blockDim = {block, 1, 1};
    for (std::uint32_t index = 0; index < grid && failure.empty(); ++index) {
        blockIdx = {index, 0, 0};
        run_block(seed);
    }
    *num_stores = stores.size();
    check_stores();
    return failure.c_str();
}
