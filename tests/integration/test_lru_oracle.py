"""A replay over the device alone hits exactly what an LRU over whole blocks hits: an independent implementation."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from hicache.build import build_cache, build_requests
from hicache.config import parse_config
from hicache.host_pool.pool import POISON_BYTE
from hicache.requests import Request
from hicache.sim.driver import Replay
from hicache.sim.options import ReplayOptions
from hicache.sim.ports import ReplayTarget
from hicache.sim.traces import read_trace
from hicache.sim.workload import BlockPrompt, TraceRequest, private_token
from hicache.streams import create_stream
from hicache.testing.chains import growing_chains

SHARED = Path(os.environ.get("HICACHE_SHARED", Path(__file__).parents[3] / "shared"))
TRACE = SHARED / "data" / "mooncake_conversation.trie.csv.gz"


@dataclass(frozen=True)
class Turn:
    """A prompt as the chain of its blocks, and its length and its answer's in tokens."""

    blocks: Sequence[int]
    tokens: int
    output: int


def lru_hit_tokens(turns: Iterable[Turn], capacity: int, block: int) -> int:
    """Tokens hit by an LRU over whole blocks, one request at a time; of a request, the later blocks go first."""
    cached: OrderedDict[int, None] = OrderedDict()
    hit_tokens = 0
    for turn in turns:
        whole = list(turn.blocks[: turn.tokens // block])
        usable = whole[: (turn.tokens - 1) // block]  # one token is left to compute
        hits = next((at for at, name in enumerate(usable) if name not in cached), len(usable))
        hit_tokens += hits * block
        mine = set(usable[:hits])
        needed = -(-(turn.tokens + turn.output) // block) - hits
        for name in [name for name in cached if name not in mine][: max(len(cached) + needed - capacity, 0)]:
            del cached[name]
        for name in reversed(whole):
            cached[name] = None
            cached.move_to_end(name)
    return hit_tokens


def replay_hit_tokens(requests: Iterable[TraceRequest], capacity: int, block: int) -> tuple[int, int]:
    """(hit tokens, prompt tokens) of the product."""
    config = parse_config(
        f"""
        model: {{name: oracle, layers: 1, kv_heads: 1, head_dim: 2, dtype: int8}}
        page_size: {block}
        tiers:
          - {{tier: device, device: cpu, size: {capacity} pages, eviction: lru}}
        """,
        source="oracle.yaml",
    )
    cache = build_cache(config)
    allocator = cache.tiers.device_allocator
    compute = create_stream("cpu", "compute")
    target = ReplayTarget(
        cache, build_requests(cache), Request, allocator, cache.tiers.device_pool, compute, capacity * block
    )
    options = ReplayOptions(max_running=1, window=1, chunk_tokens=1 << 20, step_tokens=1 << 20, decode_tokens=1 << 20)
    try:
        result = Replay.with_bytes(target, POISON_BYTE, options).run(requests)
    finally:
        compute.close()
        cache.close()
    return sum(result.hit_tokens.values()), result.prompt_tokens


def random_turns(seed: int, count: int, block: int) -> list[Turn]:
    rng = np.random.default_rng(seed)
    return [
        Turn(chain, len(chain) * block - int(rng.integers(0, block)), int(rng.integers(1, 3 * block)))
        for chain in growing_chains(rng, count)
    ]


def as_requests(turns: Sequence[Turn], block: int) -> list[TraceRequest]:
    return [
        TraceRequest(
            f"r{at}",
            float(at),
            None,
            BlockPrompt(np.array(turn.blocks, np.int32), block, turn.tokens, private_token(at)),
            turn.output,
        )
        for at, turn in enumerate(turns)
    ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [20, 40, 90])
def test_random_chats_hit_what_a_block_lru_hits(seed: int, capacity: int) -> None:
    turns = random_turns(seed, 150, 512)
    hits, asked = replay_hit_tokens(as_requests(turns, 512), capacity, 512)
    assert asked == sum(turn.tokens for turn in turns)
    assert hits == lru_hit_tokens(turns, capacity, 512) > 0


@pytest.mark.skipif(not TRACE.exists(), reason="the shared traces are not here")
@pytest.mark.parametrize("capacity", [500, 4_000])
def test_a_real_trace_hits_what_a_block_lru_hits(capacity: int) -> None:
    requests = list(islice(read_trace(TRACE), 1500))
    turns = [Turn(prompt_blocks(request), request.prompt_len, request.output_len) for request in requests]
    hits, _ = replay_hit_tokens(requests, capacity, 512)
    assert hits == pytest.approx(lru_hit_tokens(turns, capacity, 512), rel=0.01)


def prompt_blocks(request: TraceRequest) -> Sequence[int]:
    assert isinstance(request.prompt, BlockPrompt)
    return list(request.prompt.blocks)
