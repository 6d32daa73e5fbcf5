"""Every eviction policy that ships passes the suite that ships, alone and queue-aware."""

from __future__ import annotations

import pytest

from hicache.policies.base import EvictionOrder
from hicache.policies.eviction import EVICTION_POLICIES, eviction_order, known_evictions
from hicache.testing.policies import Entry, EvictionConformance
from hicache.types import Tier


@pytest.mark.parametrize("name", EVICTION_POLICIES, scope="class")
class TestPolicies(EvictionConformance):
    @pytest.fixture(autouse=True)
    def _named(self, name: str) -> None:
        self.name = name

    def order(self) -> EvictionOrder[Entry]:
        return eviction_order(self.name, Tier.HOST)


@pytest.mark.parametrize("name", ["lru", "adaptive", "sieve", "retention"], scope="class")
class TestQueueAware(EvictionConformance):
    @pytest.fixture(autouse=True)
    def _named(self, name: str) -> None:
        self.name = name

    def order(self) -> EvictionOrder[Entry]:
        return eviction_order(self.name, queue_aware=True)


def test_the_list_is_what_can_be_made() -> None:
    assert set(EVICTION_POLICIES) <= set(known_evictions())
