"""MIN against trying everything, and on real traces against an independent sweep over intervals."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from hicache.sim.optimal import min_hits, min_hits_each, next_uses
from hicache.sim.page_policies import BlockCache, BlockRequest, block_requests, unique_blocks
from hicache.sim.traces import read_trace

SHARED = Path(os.environ.get("HICACHE_SHARED", Path(__file__).parents[4] / "shared"))
TRACE = SHARED / "data" / "mooncake_conversation.trie.csv.gz"


def chats(seed: int, count: int) -> list[BlockRequest]:
    """Prompts that grow, branch and come back; every block names its whole prefix."""
    rng = np.random.default_rng(seed)
    chains: list[list[int]] = [[]]
    fresh, requests = 0, list[BlockRequest]()
    for _ in range(count):
        base = chains[rng.integers(len(chains))]
        base = base[: rng.integers(len(base) + 1)] if rng.random() < 0.4 else base
        new = int(rng.integers(0 if base else 1, 3))
        chain = [*base, *range(fresh, fresh + new)][:5]
        fresh += new
        chains.append(chain)
        usable = len(chain) - int(rng.random() < 0.3)
        requests.append(BlockRequest(np.array(chain, np.int32), usable, len(chain) + 1))
    return requests


def best_of_all(requests: Sequence[BlockRequest], capacity: int) -> int:
    """Try every set of at most `capacity` blocks to keep after every request."""
    paths = [tuple(request.blocks.tolist()) for request in requests]

    @cache
    def best(at: int, kept: frozenset[int]) -> int:
        if at == len(paths):
            return 0
        hits = 0
        while hits < requests[at].usable and paths[at][hits] in kept:
            hits += 1
        there = kept | set(paths[at])
        alive = [block for block in there if any(block in path for path in paths[at + 1 :])]
        sizes = range(min(capacity, len(alive)), -1, -1)
        return hits + max(best(at + 1, frozenset(keep)) for size in sizes for keep in combinations(alive, size))

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
def test_nothing_is_better_than_min(seed: int, capacity: int) -> None:
    requests = chats(seed, 10)
    assert min_hits(requests, capacity).hits == best_of_all(requests, capacity)


def test_min_does_hit_something() -> None:
    assert sum(min_hits(chats(seed, 10), 2).hits for seed in range(12)) > 30


def interval_hits(requests: Sequence[BlockRequest], capacity: int) -> int:
    """Independent: gaps between uses as intervals; a sweep that lets the interval go that ends last when too many lie
    over one another. Counted are the intervals that survive."""
    open_until: list[tuple[int, int]] = []  # (end, block), sorted
    last: dict[int, int] = {}
    ends: dict[int, list[tuple[int, int]]] = {}
    for number, request in enumerate(requests):
        for at, block in enumerate(request.blocks.tolist()):
            if block in last and at < request.usable:
                ends.setdefault(last[block], []).append((number, block))
            last[block] = number
    hits = 0
    for number in range(len(requests)):
        hits += sum(end == number for end, _ in open_until)
        open_until = sorted([item for item in open_until if item[0] > number] + ends.get(number, []))[:capacity]
    return hits


@pytest.mark.skipif(not TRACE.exists(), reason="the shared traces are not here")
@pytest.mark.parametrize("capacity", [200, 1_000])
def test_min_of_a_real_trace_is_that_of_a_sweep_over_intervals(capacity: int) -> None:
    requests = block_requests(read_trace(TRACE, 2_000))
    assert min_hits(requests, capacity).hits == interval_hits(requests, capacity)


def test_next_uses_count_what_can_be_hit() -> None:
    one = BlockRequest(np.array([0, 1], np.int32), 2, 3)
    cut = BlockRequest(np.array([0, 1], np.int32), 1, 3)  # its last block holds the token that is left to compute
    assert next_uses([one, cut, one]) == [[1, 2], [2, 2], [1 << 60, 1 << 60]]
    assert next_uses([]) == []


@pytest.mark.parametrize("policy", ["lru", "adaptive", "s3fifo"])
def test_no_policy_is_above_the_bound(policy: str) -> None:
    requests = chats(3, 400)
    capacity = unique_blocks(requests) // 4
    run = BlockCache(capacity, policy).run(requests)
    assert 0 < run.hits <= min_hits(requests, capacity).hits
    assert run.blocks == sum(len(request.blocks) for request in requests)


def test_the_bound_is_told_request_by_request() -> None:
    requests = chats(5, 50)
    each = min_hits_each(requests, 4)
    assert sum(each) == min_hits(requests, 4).hits and len(each) == 50
    assert all(0 <= hits <= request.usable for hits, request in zip(each, requests, strict=True))
