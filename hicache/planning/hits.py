"""Hits per policy and capacity: lru for every capacity in one pass, other policies by the tree itself, size by size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hicache.errors import ConfigError
from hicache.planning.pages import Ints, PageTrace
from hicache.planning.stack import Reuse, reuse_of
from hicache.policies.eviction import EVICTION_POLICIES
from hicache.sim.optimal import min_hits
from hicache.sim.page_policies import BlockCache

ONE_PASS = "lru"
Tick = Callable[[str], None]
"""Called with what is about to be simulated."""


def check_policies(names: Sequence[str]) -> tuple[str, ...]:
    """lru first, then the others as they were named. Raises ConfigError for an unknown one."""
    for name in names:
        if name not in EVICTION_POLICIES:
            raise ConfigError(f"policy {name!r} is not known, use some of {', '.join(EVICTION_POLICIES)}")
    return (ONE_PASS, *dict.fromkeys(name for name in names if name != ONE_PASS))


class Hits:
    """Pages that each request of a trace hits, by policy and capacity. What was simulated is kept."""

    def __init__(self, pages: PageTrace, tick: Tick = lambda what: None) -> None:
        self.pages = pages
        self.reuse: Reuse = reuse_of(pages)
        self._tick = tick
        self._known: dict[tuple[str, int], Ints] = {}
        self._bounds: dict[int, float] = {}

    @property
    def reachable(self) -> int:
        """Tokens that a cache without limit hits."""
        return len(self.reuse.reach) * self.pages.page_size

    def of(self, policy: str, capacity: int) -> Ints:
        """Hits of each request in a cache of `capacity` pages."""
        found = self._known.get((policy, capacity))
        if found is None:
            found = self._known[policy, capacity] = self._simulated(policy, capacity)
        return found

    def _simulated(self, policy: str, capacity: int) -> Ints:
        if policy == ONE_PASS:
            return self.reuse.hits(capacity)
        self._tick(f"{policy}, {capacity:,} pages")
        if capacity < 1:
            return np.zeros(len(self.pages.requests), np.int64)
        cache = BlockCache(capacity, policy)
        return np.array([cache.serve(request) for request in self.pages.requests], np.int64)

    def bound(self, capacity: int) -> float:
        """Share of all prompt tokens that MIN hits in a cache of `capacity` pages."""
        if capacity >= self.pages.unique_pages:
            return self.reachable / max(self.pages.total_tokens, 1)
        found = self._bounds.get(capacity)
        if found is None:
            self._tick(f"MIN, {capacity:,} pages")
            hits = min_hits(self.pages.requests, capacity)
            found = self._bounds[capacity] = hits.rate(self.pages.page_size, max(self.pages.total_tokens, 1))
        return found
