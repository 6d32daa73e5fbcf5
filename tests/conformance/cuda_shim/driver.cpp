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

bool may_touch(const char* what, std::uint64_t address, unsigned int bytes, bool write) {
    if (address % bytes != 0) {
        fail("an unaligned access", address, bytes);
        return false;
    }
    for (const Region& region : regions) {
        if (address - region.address < region.bytes && address - region.address + bytes <= region.bytes) {
            if (!write || region.writable) return true;
        }
    }
    fail(what, address, bytes);
    return false;
}

void wait(State state) {
    Fiber& fiber = fibers[threadIdx.x];
    fiber.state = state;
    swapcontext(&fiber.context, &scheduler);
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

// The order of the threads differs from round to round, and with the seed.
void run_block(std::uint32_t& seed) {
    for (unsigned int thread = 0; thread < blockDim.x; ++thread) prepare(fibers[thread]);
    do {
        seed = seed * 1664525u + 1013904223u;
        const unsigned int start = seed >> 8;
        for (unsigned int turn = 0; turn < blockDim.x; ++turn) {
            const unsigned int forward = (start + turn) % blockDim.x;
            threadIdx.x = seed >> 31 ? forward : blockDim.x - 1 - forward;
            if (fibers[threadIdx.x].state == State::ready) swapcontext(&scheduler, &fibers[threadIdx.x].context);
        }
    } while (release_all());
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

bool shim_may_load(const void* address, unsigned int bytes) {
    return may_touch("a load outside the pools", reinterpret_cast<std::uint64_t>(address), bytes, false);
}

bool shim_may_store(const void* address, unsigned int bytes) {
    const Access access{reinterpret_cast<std::uint64_t>(address), bytes};
    if (!may_touch("a store outside what may be written", access.address, bytes, true)) return false;
    stores.push_back(access);
    return true;
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
