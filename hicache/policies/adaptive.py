"""Learned hit density: which behaviour pays here, from the order's own entries and the ghosts of those it evicted."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Generic

from hicache.policies.base import E, EvictionOrder, Remembered, identity
from hicache.policies.cohorts import Cohorts, Member
from hicache.policies.lifetimes import BUCKETS, CLASSES, Lifetimes, bucket_of
from hicache.policies.memory import Recent, Timeline, away_limit

MAX_GHOSTS = 16_384
_RELEARN = 4  # times that the volume turns over between two looks at what was learned
_GROW = 128  # times that it does between two looks at who grew older
_MIN_ENTERED = 16
_CHAIN = 8  # entries away for each that is tracked: of a prompt inserted in chunks only the last node is


class HitDensity(EvictionOrder[E], Generic[E]):
    """The entry of which the fewest hits per byte and time are to be expected goes first.

    Classes are numbers of hits. What is expected of a class at an age is learned while it runs (`Lifetimes`), from
    entries and from ghosts alike: a ghost is an evicted entry's identity, class and last use, and when its content
    enters again this shows what keeping it would have brought. So it behaves like lru where reuse comes soon,
    keeps what was hit before where that pays, and keeps old entries rather than new ones where all reuse comes
    later than the tier turns over.
    """

    def __init__(self) -> None:
        self._lifetimes = Lifetimes()
        self._live = Cohorts[E](self._lifetimes, self._filled)
        self._ghosts = Cohorts[int](self._lifetimes)
        self._away = Recent[E, Member](away_limit(0))
        self._used_at = Timeline()
        self._volume = 0  # bytes of keys that entered
        self._grow_at = self._learn_at = 0
        self._entered = 0
        self._rank = [bucket * CLASSES for _ in range(CLASSES) for bucket in range(BUCKETS, 0, -1)]
        self._candidates: list[tuple[int, int]] = []  # rank and cohort, of all that are not empty and some that are

    def _filled(self, cohort: int) -> None:
        heapq.heappush(self._candidates, (self._rank[cohort], cohort))

    def add(self, entry: E) -> None:
        known = self._away.pop(entry)
        if known is not None and entry.hits == known.hits:
            stamp = known.stamp
        else:
            if known is not None:
                self._reused(known.cohort, known.size)
            stamp = int(self._used_at.at(entry.tick))
        self._put(entry, stamp)

    def _put(self, entry: E, stamp: int) -> None:
        self._live.put(entry, min(entry.hits, CLASSES - 1), stamp, len(entry.key), entry.hits, self._volume)

    def _reused(self, cohort: int, size: int) -> None:
        self._lifetimes.exposed[cohort] += size
        self._lifetimes.reused[cohort] += size

    def discard(self, entry: E) -> None:
        member = self._live.pop(entry)
        if member is not None:
            self._away.limit = away_limit(_CHAIN * len(self._live))
            self._away.put(entry, member)

    def touch(self, entry: E) -> None:
        member = self._live.get(entry)
        if member is not None and entry.hits > member.hits:
            self._live.pop(entry)
            self._reused(member.cohort, member.size)
            self._put(entry, self._volume)

    def evicted(self, entry: E) -> None:
        member = self._live.pop(entry)
        if member is None:
            return
        name = identity(entry.key)
        self._ghosts.pop(name)
        self._ghosts.put(name, member.kind, member.stamp, member.size, member.hits, self._volume)
        while len(self._ghosts) > MAX_GHOSTS:
            oldest = self._ghosts.oldest()
            if oldest is not None:
                self._ghosts.pop(oldest)

    def entered(self, entry: E) -> Sequence[Remembered]:
        size, at, known = len(entry.key), 0, list[Remembered]()
        self._used_at.note(entry.tick, self._volume)
        while at < size:
            ghost = self._ghosts.pop(identity(entry.key, at))
            if ghost is None:
                break
            self._reused(ghost.kind * BUCKETS + bucket_of(self._volume - ghost.stamp), ghost.size)
            known.append(Remembered(min(ghost.size, size - at), ghost.hits + 1))
            at += ghost.size
        self._volume += size
        self._entered += 1
        if self._volume >= self._grow_at:
            self._live.grow(self._volume)
            self._grow_at = self._volume + self._live.size // _GROW
        return known

    def first(self) -> E | None:
        if self._volume >= self._learn_at and self._entered >= _MIN_ENTERED:
            self._learn()
        while self._candidates:
            entry = self._live.head(self._candidates[0][1])
            if entry is not None:
                return entry
            heapq.heappop(self._candidates)
        return None

    def _learn(self) -> None:
        """Rank the cohorts anew by what was seen."""
        self._live.grow(self._volume)
        self._ghosts.grow(self._volume)
        order = self._lifetimes.densities(float(self._live.size)).ravel().argsort(kind="stable")
        for rank, cohort in enumerate(order.tolist()):
            self._rank[cohort] = rank
        self._candidates = [(self._rank[cohort], cohort) for cohort in self._live.cohorts]
        heapq.heapify(self._candidates)
        self._lifetimes.decay()
        self._learn_at = self._volume + self._live.size // _RELEARN
        self._entered = 0

    def __contains__(self, entry: object) -> bool:
        return entry in self._live

    def __len__(self) -> int:
        return len(self._live)
