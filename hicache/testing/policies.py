"""What every eviction order must keep, as tests: subclass `EvictionConformance` and give it your factory.

class TestMine(EvictionConformance):
    def order(self) -> EvictionOrder[Entry]:
        return MyOrder()
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import count

import pytest

from hicache.policies.base import EvictionOrder
from hicache.policies.retention import Retention

_names = count()
_HEADER = 8


@dataclass(eq=False)
class Entry:
    """An entry as policies see it, without a tree. Its key is one of its own unless given."""

    tick: int = 0
    created: int = 0
    hits: int = 0
    priority: int = 0
    key: bytes = b""
    start: int = 0
    awaited: int = 0
    retention: Retention | None = None
    lowest: int = 0

    def __post_init__(self) -> None:
        if not self.key:
            self.key = next(_names).to_bytes(_HEADER, "little") * 32


class Driver:
    """Moves entries as the tree's ledger does: at random, the same way for the same seed.

    Locked entries have left the order for a while; they are used when they come back, or not.
    """

    def __init__(self, order: EvictionOrder[Entry], seed: int = 0) -> None:
        self.order = order
        self.inside: list[Entry] = []
        self.locked: list[Entry] = []
        self.gone: list[Entry] = []
        self.tick = 0
        self.rng = random.Random(seed)

    def step(self) -> None:
        moves = {self.enter: 4, self.lock: 3, self.unlock: 3, self.use: 3, self.evict: 3, self.split: 1, self.merge: 1}
        self.tick += self.rng.random() < 0.8
        self.order.advance(float(self.tick))
        self.rng.choices(list(moves), list(moves.values()))[0]()

    def enter(self) -> None:
        """A new content, or one that was evicted."""
        entry = Entry(self.tick, self.tick, priority=self.rng.randrange(3), start=self.rng.randrange(5) * 64)
        if self.gone and self.rng.random() < 0.5:
            entry.key = self.gone.pop(self.rng.randrange(len(self.gone))).key
        if self.rng.random() < 0.3:
            entry.retention = Retention(self.rng.randrange(101), self.rng.uniform(1, 50))
        known = self.order.entered(entry)
        assert sum(part.size for part in known) <= len(entry.key) and all(part.size > 0 for part in known)
        self.order.add(entry)
        self.inside.append(entry)

    def lock(self) -> None:
        if self.inside:
            entry = self._any(self.inside)
            self.order.discard(entry)
            self.locked.append(entry)

    def unlock(self) -> None:
        if self.locked:
            entry = self._any(self.locked)
            if self.rng.random() < 0.7:
                entry.tick, entry.hits = self.tick, entry.hits + 1
            self.order.add(entry)
            self.inside.append(entry)

    def use(self) -> None:
        if self.inside:
            entry = self.rng.choice(self.inside)
            entry.tick = self.tick
            what = self.rng.randrange(4)
            entry.hits += what < 2
            entry.priority += what == 2
            entry.awaited = int(what == 3)
            self.order.touch(entry)

    def evict(self) -> Entry | None:
        victim = self.order.first()
        if victim is not None:
            self.inside.remove(victim)
            self.order.evicted(victim)
            self.gone.append(victim)
        return victim

    def split(self) -> None:
        """The lower half stays the same object; the upper one is evictable only when the lower one has gone."""
        long = [entry for entry in self.inside if len(entry.key) >= 128]
        if long:
            lower = self.rng.choice(long)
            self.order.discard(lower)
            cut = len(lower.key) // 128 * 64
            upper = Entry(lower.tick, lower.created, lower.hits, lower.priority, lower.key[:cut], lower.start)
            lower.key, lower.start = lower.key[cut:], lower.start + cut // 4
            self.order.add(lower)
            self.order.evicted(lower)
            self.inside.remove(lower)
            self.order.add(upper)
            self.inside.append(upper)

    def merge(self) -> None:
        """One takes over the key of another, which leaves without a word."""
        if len(self.inside) > 1:
            upper, lower = self._any(self.inside), self.inside[0]
            self.order.discard(upper)
            self.order.discard(lower)
            lower.key, lower.start = upper.key + lower.key, upper.start
            lower.created = min(upper.created, lower.created)
            self.order.add(lower)

    def _any(self, entries: list[Entry]) -> Entry:
        return entries.pop(self.rng.randrange(len(entries)))


class EvictionConformance:
    """The promises of `EvictionOrder`."""

    def order(self) -> EvictionOrder[Entry]:
        """A new, empty order."""
        raise NotImplementedError

    def test_it_starts_and_ends_empty(self) -> None:
        order, entry = self.order(), Entry(tick=1, created=1)
        assert order.first() is None and not len(order) and entry not in order
        order.entered(entry)
        order.add(entry)
        assert order.first() is entry and len(order) == 1 and entry in order
        order.evicted(entry)
        assert order.first() is None and not len(order) and entry not in order

    @pytest.mark.parametrize("seed", range(8))
    def test_it_tracks_exactly_what_it_was_told(self, seed: int) -> None:
        driver = Driver(self.order(), seed)
        for _ in range(400):
            driver.step()
            assert len(driver.order) == len(driver.inside)
            assert all(entry in driver.order for entry in driver.inside)
            assert not any(entry in driver.order for entry in driver.locked)

    @pytest.mark.parametrize("seed", range(8))
    def test_the_victim_is_tracked_and_stays_so_until_it_is_told(self, seed: int) -> None:
        driver = Driver(self.order(), seed)
        for _ in range(300):
            driver.step()
            victim = driver.order.first()
            assert victim in driver.inside if driver.inside else victim is None
            assert driver.order.first() is victim

    @pytest.mark.parametrize("seed", range(4))
    def test_everything_goes_in_the_end(self, seed: int) -> None:
        """It never blocks the pool: while something is tracked there is a victim."""
        driver = Driver(self.order(), seed)
        for _ in range(300):
            driver.step()
        for _ in range(len(driver.inside)):
            assert driver.evict() is not None
        assert not driver.inside and driver.order.first() is None and not len(driver.order)

    def test_the_same_history_has_the_same_victims(self) -> None:
        """Nothing random, no clock and no address of an object: replays can be repeated, and ranks agree."""
        histories = []
        for _ in range(2):
            driver, victims = Driver(self.order(), 5), list[tuple[int, int, int]]()
            for _ in range(500):
                driver.step()
                victim = driver.order.first()
                victims.append((victim.created, victim.tick, victim.hits) if victim else (-1, -1, -1))
            histories.append(victims)
        assert histories[0] == histories[1]

    def test_memory_does_not_grow_with_what_has_left(self) -> None:
        """Beside ghosts, which have a bound of their own, as much is held after many rounds as after a few."""
        order, entries = self.order(), [Entry(at, at) for at in range(20)]
        for entry in entries:
            order.add(entry)
        held, tick = list[int](), 20
        for cycle in range(6_000):
            tick += 1
            entry, used = entries[cycle * 7 % 20], entries[cycle * 3 % 20]
            order.discard(entry)
            order.add(entry)
            used.tick, used.hits = tick, used.hits + 1
            order.touch(used)
            if cycle % 1_000 == 999:
                order.first()
                held.append(_held(order, set()))
        assert held[-1] <= 2 * held[0] + 500


def _held(thing: object, seen: set[int]) -> int:
    """Items in all containers that `thing` holds, itself included."""
    if id(thing) in seen or isinstance(thing, Entry):
        return 0
    seen.add(id(thing))
    if isinstance(thing, dict):
        return len(thing) + sum(_held(value, seen) for value in thing.values())
    if isinstance(thing, list | tuple):
        return len(thing) + sum(_held(value, seen) for value in thing)
    return sum(_held(value, seen) for value in vars(thing).values()) if hasattr(thing, "__dict__") else 0
