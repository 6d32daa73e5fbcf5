"""Each eviction order against a brute-force sort, and its memory against the number of live entries."""

from __future__ import annotations

from bisect import insort_right
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.policies.base import EvictionOrder
from hicache.policies.basic import Segmented
from hicache.policies.eviction import eviction_order, register_eviction
from hicache.testing.policies import Entry

RANKS: dict[str, Callable[[Entry], tuple[int, ...]]] = {
    "lru": lambda entry: (entry.tick,),
    "lfu": lambda entry: (entry.hits, entry.tick),
    "priority": lambda entry: (entry.priority, entry.tick),
    "fifo": lambda entry: (entry.created,),
    "filo": lambda entry: (-entry.created,),
    "mru": lambda entry: (-entry.tick,),
}

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["new", "new", "touch", "touch", "discard", "readd", "age", "evict", "raise"]),
        st.integers(0, 30),
        st.booleans(),
    ),
    max_size=120,
)


class Pool:
    """Entries inside and outside of an order, driven as the ledger drives it."""

    def __init__(self, order: EvictionOrder[Entry]) -> None:
        self.order = order
        self.inside: list[Entry] = []
        self.outside: list[Entry] = []
        self.clock = 0

    def apply(self, what: str, index: int, same_tick: bool) -> None:
        self.clock += not same_tick
        if what == "new":
            self.inside.append(Entry(self.clock, self.clock, priority=index % 3))
            self.order.add(self.inside[-1])
        elif what == "readd" and self.outside:
            self.inside.append(self.outside.pop(index % len(self.outside)))
            self.order.add(self.inside[-1])
        elif what == "age" and self.outside:
            entry = self.outside[index % len(self.outside)]
            entry.tick, entry.hits = self.clock, entry.hits + 1
        elif self.inside:
            self.apply_inside(what, self.inside[index % len(self.inside)])

    def apply_inside(self, what: str, entry: Entry) -> None:
        if what == "evict":
            entry = self.order.first() or entry
        if what in ("discard", "evict"):
            self.inside.remove(entry)
            self.order.discard(entry)
            if what == "discard":
                self.outside.append(entry)
        elif what in ("touch", "raise"):
            entry.tick = self.clock
            entry.hits += what == "touch"
            entry.priority += what == "raise"
            self.order.touch(entry)

    def check_membership(self) -> None:
        assert len(self.order) == len(self.inside)
        assert all(entry in self.order for entry in self.inside)
        assert not any(entry in self.order for entry in self.outside)


@pytest.mark.parametrize("name", RANKS)
@settings(max_examples=150)
@given(operations=OPERATIONS)
def test_the_victim_has_the_lowest_rank(name: str, operations: list[tuple[str, int, bool]]) -> None:
    pool, rank = Pool(eviction_order(name)), RANKS[name]
    for operation in operations:
        pool.apply(*operation)
        pool.check_membership()
        first = pool.order.first()
        assert (first is None) == (not pool.inside)
        if first is not None:
            assert first in pool.inside
            assert rank(first) == min(map(rank, pool.inside))
    while (first := pool.order.first()) is not None:
        assert rank(first) == min(map(rank, pool.inside))
        pool.apply_inside("evict", first)
    assert not pool.inside and not len(pool.order)


class Segment:
    """A plain list of (used, entry), least recently used first."""

    def __init__(self) -> None:
        self.items: list[tuple[int, Entry]] = []
        self.newest = 0

    def add(self, entry: Entry, used: int) -> None:
        self.newest = max(self.newest, used)
        insort_right(self.items, (used, entry), key=lambda item: item[0])

    def remove(self, entry: Entry) -> None:
        self.items = [item for item in self.items if item[1] is not entry]


class TwoLists:
    """Segmented LRU in so many words."""

    def __init__(self) -> None:
        self.probation, self.protected = Segment(), Segment()

    def add(self, entry: Entry) -> None:
        (self.protected if entry.hits else self.probation).add(entry, entry.tick)
        while len(self.protected.items) * 10 > 8 * (len(self.protected.items) + len(self.probation.items)):
            _, oldest = self.protected.items.pop(0)
            self.probation.add(oldest, max(self.probation.newest, oldest.tick))

    def discard(self, entry: Entry) -> None:
        self.probation.remove(entry)
        self.protected.remove(entry)

    def order(self) -> list[Entry]:
        return [entry for _, entry in self.probation.items + self.protected.items]


class Mirrored(Segmented[Entry]):
    """The order under test, which tells the model everything it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TwoLists()

    def add(self, entry: Entry) -> None:
        self.model.discard(entry)
        self.model.add(entry)
        super().add(entry)

    def discard(self, entry: Entry) -> None:
        self.model.discard(entry)
        super().discard(entry)


@settings(max_examples=300)
@given(operations=OPERATIONS)
def test_slru_is_two_lists(operations: list[tuple[str, int, bool]]) -> None:
    order = Mirrored()
    pool = Pool(order)
    for what, index, _ in operations:
        pool.apply(what, index, False)  # with equal ticks the two lists would not say who comes first
        pool.check_membership()
        expected = order.model.order()
        assert order.first() is (expected[0] if expected else None)
    while (first := order.first()) is not None:
        assert first is order.model.order()[0]
        pool.apply_inside("evict", first)


def test_slru_protects_at_most_four_fifths() -> None:
    """Ten entries are hit: the two that were hit first are on probation again and go first."""
    order: EvictionOrder[Entry] = eviction_order("slru")
    entries = [Entry(tick=i, created=i) for i in range(10)]
    for entry in entries:
        order.add(entry)
    for clock, entry in enumerate(entries, 10):
        entry.tick, entry.hits = clock, 1
        order.touch(entry)
    newcomer = Entry(tick=30)
    order.add(newcomer)  # 11 entries: 8 of them stay protected
    went = []
    while (first := order.first()) is not None:
        went.append(first)
        order.discard(first)
    assert went == [*entries[:2], newcomer, *entries[2:]]


def test_slru_evicts_the_unhit_before_older_hits() -> None:
    order: EvictionOrder[Entry] = eviction_order("slru")
    hit = [Entry(tick=i, hits=1) for i in range(2)]
    scan = [Entry(tick=10 + i) for i in range(3)]
    for entry in [*scan, *hit]:
        order.add(entry)
    assert order.first() is scan[0]


def test_an_unknown_policy_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'lruu' is not known, use one of lru, slru, lfu, priority,"):
        eviction_order("lruu")


def test_a_name_is_never_replaced() -> None:
    with pytest.raises(ConfigError, match=r"'lru' is registered already, choose another name"):
        register_eviction("lru", lambda tier: Segmented())
