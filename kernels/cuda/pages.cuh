// What the kernels share: short names, and the walk over (page, item) pairs.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 warp_threads = 32;

// Walks over items 0, 1, 2 ... of page 0, then of page 1 and so on, in steps of `step` items. Only the start
// divides; pages and items stay below 2^32 where their product does not.
struct Cursor {
    u32 page, item;
    u32 page_step, item_step, page_items;

    __device__ Cursor(u32 start, u32 step, u32 items)
        : page(start / items),
          item(start % items),
          page_step(step / items),
          item_step(step % items),
          page_items(items) {}

    __device__ void advance() {
        page += page_step;
        item += item_step;
        if (item >= page_items) {
            item -= page_items;
            ++page;
        }
    }
};
