"""SIEVE and S3-FIFO: first in, first out, with one look at whether an entry was hit.

Both say "it stays where it is when it is hit". Here a hit entry leaves the order, locked by its request, and comes
back, so its place is remembered: it is the tick at which it was created, which split entries inherit.
"""

from __future__ import annotations

from typing import Generic, NamedTuple

from hicache.policies.base import E, EvictionOrder, Remembered, identity
from hicache.policies.basic import LazyHeap
from hicache.policies.memory import Recent, away_limit


class Sieve(EvictionOrder[E], Generic[E]):
    """SIEVE (Zhang et al., NSDI 2024): a hand goes from old to new, passes over what was hit and evicts the rest.

    `_ahead` holds what lies before the hand, `_behind` what it passed; when nothing is ahead it starts over.
    """

    def __init__(self) -> None:
        self._ahead = LazyHeap[E]()
        self._behind = LazyHeap[E]()
        self._hand = 0
        self._seen: dict[E, int] = {}  # hits when the hand last passed, or when it came
        self._away = Recent[E, int](away_limit(0))

    def add(self, entry: E) -> None:
        seen = self._away.pop(entry)
        self._seen[entry] = seen if seen is not None else 0
        (self._ahead if entry.created >= self._hand else self._behind).push(entry, entry.created)

    def _remove(self, entry: E) -> int:
        (self._ahead if entry in self._ahead else self._behind).remove(entry)
        return self._seen.pop(entry)

    def discard(self, entry: E) -> None:
        seen = self._remove(entry)
        self._away.limit = away_limit(len(self._seen))
        self._away.put(entry, seen)

    def evicted(self, entry: E) -> None:
        self._remove(entry)

    def touch(self, entry: E) -> None:
        """Its hits say that it was used."""

    def first(self) -> E | None:
        while self._seen:
            item = self._ahead.first()
            if item is None:
                self._ahead, self._behind, self._hand = self._behind, self._ahead, 0
                continue
            entry = item[1]
            self._hand = entry.created
            if entry.hits == self._seen[entry]:
                return entry
            self._seen[entry] = entry.hits
            self._ahead.remove(entry)
            self._behind.push(entry, entry.created)
        return None

    def __contains__(self, entry: object) -> bool:
        return entry in self._seen

    def __len__(self) -> int:
        return len(self._seen)


class _Place(NamedTuple):
    main: bool
    rank: int
    spent: int  # hits that do not count any more
    size: int


_SMALL_SHARE = 10
"""The small queue is kept to one in so many bytes."""
_PROMOTING_HITS = 2
_MAX_CREDIT = 3
_MAX_GHOSTS = 16_384


class S3Fifo(EvictionOrder[E], Generic[E]):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue, a main queue, and ghosts of what the small one evicted.

    From the small queue goes to the main one what was hit twice; from the main queue what was hit goes round again,
    three times at most. What was evicted from the small queue and comes back goes to the main one.
    """

    def __init__(self) -> None:
        self._queues = (LazyHeap[E](), LazyHeap[E]())
        self._size = [0, 0]
        self._places: dict[E, _Place] = {}
        self._away = Recent[E, _Place](away_limit(0))
        self._ghosts = Recent[int, bool](_MAX_GHOSTS)
        self._turn = 0

    def add(self, entry: E) -> None:
        place, size = self._away.pop(entry), len(entry.key)
        if place is None:
            self._put(entry, _Place(False, entry.created, 0, size))
        else:
            self._put(entry, place._replace(size=size))

    def _put(self, entry: E, place: _Place) -> None:
        self._places[entry] = place
        self._queues[place.main].push(entry, place.rank)
        self._size[place.main] += place.size

    def _take(self, entry: E) -> _Place:
        place = self._places.pop(entry)
        self._queues[place.main].remove(entry)
        self._size[place.main] -= place.size
        return place

    def _to_main(self, entry: E, spent: int, size: int) -> None:
        self._turn += 1
        self._put(entry, _Place(True, self._turn, spent, size))

    def discard(self, entry: E) -> None:
        place = self._take(entry)
        self._away.limit = away_limit(len(self._places))
        self._away.put(entry, place)

    def evicted(self, entry: E) -> None:
        if not self._take(entry).main:
            self._ghosts.put(identity(entry.key), True)

    def entered(self, entry: E) -> tuple[Remembered, ...]:
        if self._ghosts.pop(identity(entry.key)):
            self._turn += 1
            self._away.put(entry, _Place(True, self._turn, entry.hits, len(entry.key)))
        return ()

    def touch(self, entry: E) -> None:
        """Its hits say that it was used."""

    def first(self) -> E | None:
        while self._places:
            small, main = (queue.first() for queue in self._queues)
            if small is not None and (main is None or self._size[0] * _SMALL_SHARE > sum(self._size)):
                if self._credit(small[1]) < _PROMOTING_HITS:
                    return small[1]
                place = self._take(small[1])
                self._to_main(small[1], small[1].hits, place.size)
            elif main is not None:
                credit = min(self._credit(main[1]), _MAX_CREDIT)
                if not credit:
                    return main[1]
                place = self._take(main[1])
                self._to_main(main[1], main[1].hits - credit + 1, place.size)
        return None

    def _credit(self, entry: E) -> int:
        return entry.hits - self._places[entry].spent

    def __contains__(self, entry: object) -> bool:
        return entry in self._places

    def __len__(self) -> int:
        return len(self._places)
