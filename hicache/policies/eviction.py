"""Eviction policies by name: which of the evictable entries goes first.

The tree tells an order exactly which entries are evictable now; an order never scans and never
sees a node, only its access history. Each operation is O(log n) or better at any size.

| policy    | victim                                                              | class      |
|-----------|---------------------------------------------------------------------|------------|
| lru       | least recently used                                                 | Recency    |
| slru      | lru of those never hit, then of the rest                            | Segmented  |
| lfu       | fewest hits, then lru                                               | Bucketed   |
| priority  | lowest priority, then lru                                           | Bucketed   |
| fifo      | oldest                                                              | Ranked     |
| filo      | newest                                                              | Ranked     |
| mru       | most recently used                                                  | Ranked     |
| sieve     | oldest that was not hit since the hand passed                       | Sieve      |
| s3fifo    | oldest of a small queue that was not hit twice, or of the main one  | S3Fifo     |
| arc       | lru of those never hit or of the rest, in a share learned of ghosts | Arc        |
| wtinylfu  | seen less often of two: lru of a window, slru of the rest           | WTinyLfu   |
| gdsf      | cheapest to compute or to load again for its uses                   | CostAware  |
| retention | lowest retention left, then lru                                     | Retained   |
| adaptive  | fewest hits to be expected per byte and time, as learned            | HitDensity |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hicache.errors import ConfigError
from hicache.policies.adaptive import HitDensity
from hicache.policies.arc import Arc
from hicache.policies.awaited import QueueAware
from hicache.policies.base import E, EvictionOrder
from hicache.policies.basic import Bucketed, Ranked, Recency, Segmented
from hicache.policies.cost import CostAware
from hicache.policies.fifo_queues import S3Fifo, Sieve
from hicache.policies.retained import Retained
from hicache.policies.tinylfu import WTinyLfu
from hicache.types import Tier

OrderFactory = Callable[[Tier], EvictionOrder[Any]]
"""Makes a new order for a tier."""

EVICTION_POLICIES = (
    "lru",
    "lfu",
    "fifo",
    "filo",
    "mru",
    "slru",
    "priority",
    "sieve",
    "s3fifo",
    "arc",
    "wtinylfu",
    "gdsf",
    "retention",
    "adaptive",
)
"""Those that ship with hicache."""

_factories: dict[str, OrderFactory] = {
    "lru": lambda tier: Recency(),
    "slru": lambda tier: Segmented(),
    "lfu": lambda tier: Bucketed(lambda entry: entry.hits),
    "priority": lambda tier: Bucketed(lambda entry: entry.priority),
    "fifo": lambda tier: Ranked(lambda entry: entry.created),
    "filo": lambda tier: Ranked(lambda entry: -entry.created),
    "mru": lambda tier: Ranked(lambda entry: -entry.tick),
    "sieve": lambda tier: Sieve(),
    "s3fifo": lambda tier: S3Fifo(),
    "arc": lambda tier: Arc(),
    "wtinylfu": lambda tier: WTinyLfu(),
    "gdsf": CostAware,
    "retention": lambda tier: Retained(),
    "adaptive": lambda tier: HitDensity(),
}


def register_eviction(name: str, factory: OrderFactory) -> None:
    """Make a policy known by `name`, for configurations too. Raises ConfigError if the name is taken."""
    if name in _factories:
        raise ConfigError(f"eviction {name!r} is registered already, choose another name")
    _factories[name] = factory


def known_evictions() -> list[str]:
    return list(_factories)


def eviction_order(name: str, tier: Tier = Tier.DEVICE, queue_aware: bool = False) -> EvictionOrder[E]:
    """A new order by its configuration name. Raises ConfigError for an unknown one."""
    factory = _factories.get(name)
    if factory is None:
        raise ConfigError(f"eviction {name!r} is not known, use one of {', '.join(_factories)}")
    return QueueAware(factory(tier), factory(tier)) if queue_aware else factory(tier)
