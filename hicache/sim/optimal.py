"""MIN: the most block hits that any policy of one tier can have, for one request at a time.

Belady's rule with bypass: after each request keep, of what was kept and what the request brought, the
`capacity` blocks whose next use comes first; of blocks used next by the same request those nearer to the root. What
the request needs room for while it runs is not counted against the capacity, and a block that is not worth keeping is
not kept.

Why nothing does better: keeping a block from one use to the next wins one hit and takes one of `capacity` places in
the gap between any two requests in between. The rule is the greedy choice that is optimal for such intervals with
k places (Faigle and Nawijn, 1995; Carlisle and Lloyd, 1995). That a hit needs all blocks before it costs nothing:
whoever uses a block uses the blocks before it, so these are used next no later, and the order above keeps them longer.
A policy under which a running request takes places, as in `page_policies`, or one that cannot bypass, is at or below
this bound. Blocks count alike, so it bounds block hits and, as all blocks have as many tokens, hit tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from hicache.sim.page_policies import BlockRequest, HitCount

NEVER = 1 << 60


def min_hits(requests: Sequence[BlockRequest], capacity: int) -> HitCount:
    """Hits of the offline optimum with `capacity` blocks."""
    return HitCount(sum(min_hits_each(requests, capacity)), sum(len(request.blocks) for request in requests))


def min_hits_each(requests: Sequence[BlockRequest], capacity: int) -> list[int]:
    """The same for each request."""
    uses = next_uses(requests)
    kept: dict[int, int] = {}  # block -> the request that uses it next
    furthest: list[tuple[int, int, int]] = []  # -next use, -depth, block; stale ones are dropped when they surface
    hits = []
    for request, following in zip(requests, uses, strict=True):
        blocks = request.blocks.tolist()
        hits.append(next((at for at in range(request.usable) if blocks[at] not in kept), request.usable))
        for depth, (block, use) in enumerate(zip(blocks, following, strict=True)):
            if use == NEVER:
                kept.pop(block, None)
            else:
                kept[block] = use
                heapq.heappush(furthest, (-use, -depth, block))
        while len(kept) > capacity:
            use, _, block = heapq.heappop(furthest)
            if kept.get(block) == -use:
                del kept[block]
    return hits


def next_uses(requests: Sequence[BlockRequest]) -> list[list[int]]:
    """For each request and block, the number of the next request that can hit the block, or NEVER."""
    if not requests:
        return []
    following = np.full(1 + max(int(request.blocks.max(initial=-1)) for request in requests), NEVER)
    uses: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        request = requests[number]
        uses.append(following[request.blocks].tolist())
        following[request.blocks[: request.usable]] = number
    uses.reverse()
    return uses
