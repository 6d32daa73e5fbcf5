"""The one-pass stack against a cache of each size, page by page: an independent implementation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest

from hicache.planning.pages import PageTrace, page_trace
from hicache.planning.stack import reuse_of
from hicache.sim.page_policies import BlockCache, BlockRequest
from hicache.sim.workload import BlockPrompt, TraceRequest, private_token


def lru_hits(requests: Sequence[BlockRequest], capacity: int) -> list[int]:
    """Hits of each request in one cache of `capacity` pages; the deeper of two pages used together goes first."""
    cached: OrderedDict[int, None] = OrderedDict()
    found = []
    for request in requests:
        usable = request.blocks[: request.usable].tolist()
        hits = next((at for at, page in enumerate(usable) if page not in cached), len(usable))
        found.append(hits)
        mine = set(usable[:hits])
        fits = request.room <= capacity
        others = [page for page in cached if page not in mine]
        excess = len(cached) + request.room - hits - capacity
        for page in others[: max(excess, 0)] if fits else others:
            del cached[page]
        for page in reversed(request.blocks.tolist() if fits else usable[:hits]):
            cached[page] = None
            cached.move_to_end(page)
    return found


def random_trace(seed: int, block: int = 4) -> list[TraceRequest]:
    """Chats that grow and fork, some of whole blocks, some with long answers."""
    rng = np.random.default_rng(seed)
    chains: list[list[int]] = [[]]
    trace, fresh = [], 0
    for at in range(200):
        base = chains[rng.integers(len(chains))]
        base = base[: rng.integers(len(base) + 1)] if rng.random() < 0.4 else base
        new = int(rng.integers(0 if base else 1, 5))
        chain = [*base, *range(fresh, fresh + new)]
        fresh += new
        chains.append(chain)
        length = len(chain) * block - int(rng.integers(0, block))
        prompt = BlockPrompt(np.array(chain, np.int32), block, length, private_token(at))
        trace.append(TraceRequest(f"r{at}", 10.0 * at, None, prompt, int(rng.integers(1, 6 * block))))
    return trace


@pytest.mark.parametrize("seed", range(8))
def test_every_size_hits_what_a_cache_of_that_size_hits(seed: int) -> None:
    pages = page_trace(random_trace(seed), 64)
    reuse = reuse_of(pages)
    asked = sum(len(request.blocks) for request in pages.requests)
    seen = set()
    for capacity in [*range(1, 60), 75, 100, 150, 200, 400]:
        assert reuse.hits(capacity).tolist() == lru_hits(pages.requests, capacity), capacity
        seen.add(int(reuse.hits(capacity).sum()))
    assert len(seen) > 20
    assert max(seen) < asked


def test_the_tree_hits_about_as_much_as_the_stack() -> None:
    """The product evicts runs of pages and not single ones, so it is near and not equal."""
    pages = page_trace(random_trace(3), 64)
    for capacity in (40, 80, 160):
        tree = BlockCache(capacity, "lru").run(pages.requests).hits
        assert tree == pytest.approx(int(reuse_of(pages).hits(capacity).sum()), rel=0.05)


def test_idle_is_the_time_since_a_page_was_last_used() -> None:
    def ask(rid: str, at_ms: float, pages: int) -> TraceRequest:
        return TraceRequest(rid, at_ms, None, BlockPrompt(np.arange(pages, dtype=np.int32), 4, pages * 4 + 1, 7), 1)

    reuse = reuse_of(page_trace([ask("a", 1000, 1), ask("b", 3000, 2), ask("c", 8000, 2)], 64))
    assert reuse.idle.tolist() == [2.0, 5.0, 5.0]
    assert reuse.starts.tolist() == [0, 0, 1, 3]


def test_the_table_of_runs_is_compacted() -> None:
    pages = page_trace(random_trace(1) * 20, 64)
    assert isinstance(pages, PageTrace)
    assert reuse_of(pages).hits(70).tolist() == lru_hits(pages.requests, 70)
