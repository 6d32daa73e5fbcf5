"""One tier by blocks against a plain lru of its own, on random chats and on a real trace."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hicache.sim.page_policies import BlockCache, BlockRequest, block_requests, unique_blocks
from hicache.sim.traces import read_trace
from hicache.sim.workload import TokenPrompt, TraceRequest
from hicache.testing.chains import growing_chains

SHARED = Path(os.environ.get("HICACHE_SHARED", Path(__file__).parents[4] / "shared"))
TRACE = SHARED / "data" / "mooncake_conversation.trie.csv.gz"


def lru_hits(requests: Sequence[BlockRequest], capacity: int) -> int:
    """Blocks hit by an lru over blocks; of a request, the later blocks go first. What does not fit is not cached."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        blocks = request.blocks.tolist()
        found = next((at for at in range(request.usable) if blocks[at] not in cached), request.usable)
        hits += found
        mine = blocks[:found]
        others = [name for name in cached if name not in mine]
        for name in others[: max(len(cached) + request.room - found - capacity, 0)]:
            del cached[name]
        fits = len(cached) + request.room - found <= capacity
        for name in reversed(blocks if fits else mine):
            cached[name] = None
            cached.move_to_end(name)
    return hits


def chats(seed: int, count: int) -> list[BlockRequest]:
    rng = np.random.default_rng(seed)
    return [
        BlockRequest(np.array(chain, np.int32), len(chain) - 1, len(chain) + int(rng.integers(3)))
        for chain in growing_chains(rng, count)
    ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [16, 40, 90])
def test_random_chats_hit_what_a_block_lru_hits(seed: int, capacity: int) -> None:
    requests = chats(seed, 150)
    assert BlockCache(capacity, "lru").run(requests).hits == lru_hits(requests, capacity) > 0


@pytest.mark.skipif(not TRACE.exists(), reason="the shared traces are not here")
def test_a_real_trace_hits_what_a_block_lru_hits() -> None:
    """Victims are cut by no less than an eighth of a node, so not exactly."""
    requests = block_requests(read_trace(TRACE, 1_500))
    assert BlockCache(2_000, "lru").run(requests).hits == pytest.approx(lru_hits(requests, 2_000), rel=0.01)


@pytest.mark.skipif(not TRACE.exists(), reason="the shared traces are not here")
def test_the_learned_order_gains_on_a_real_trace() -> None:
    requests = block_requests(read_trace(TRACE, 4_000))
    capacity = unique_blocks(requests) // 50
    lru, learned = (BlockCache(capacity, policy).run(requests).hits for policy in ("lru", "adaptive"))
    assert learned > 1.4 * lru > 0


def test_a_request_without_room_is_computed_and_not_cached() -> None:
    small, large = (BlockRequest(np.arange(size, dtype=np.int32), size, size) for size in (2, 9))
    cache = BlockCache(4, "lru")
    assert [cache.serve(request) for request in (small, large, small)] == [0, 2, 2]


def test_only_prompts_of_blocks_can_be_run() -> None:
    request = TraceRequest("r", 0.0, None, TokenPrompt(np.arange(4, dtype=np.int32)), 1)
    with pytest.raises(TypeError, match="prompts are blocks"):
        block_requests([request])
