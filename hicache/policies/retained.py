"""Soft retention as an order: the lowest priority that is left goes first, then the least recently used."""

from __future__ import annotations

import heapq
from itertools import count
from typing import Generic

from hicache.policies.base import E, EntryView, EvictionOrder
from hicache.policies.basic import Recency
from hicache.policies.memory import Timeline
from hicache.policies.retention import DEFAULT_PRIORITY, MAX_PRIORITY

_STEP = 5
"""Priorities are told apart in steps of so many."""


class Retained(EvictionOrder[E], Generic[E]):
    """Entries by what is left of their retention; each is looked at again when that falls by a step.

    Nothing is ever refused: when all entries are wanted, the least wanted goes.
    """

    def __init__(self) -> None:
        self._levels = [Recency[E]() for _ in range(MAX_PRIORITY // _STEP + 1)]
        self._level: dict[E, int] = {}
        self._due: list[tuple[float, int, E]] = []
        self._serial = count()
        self._used_at = Timeline()
        self._now = 0.0

    def advance(self, now: float) -> None:
        self._now = now

    def add(self, entry: E) -> None:
        self._used_at.note(entry.tick, self._now)
        level = self._level[entry] = self._level_of(entry)
        self._levels[level].add(entry)
        retention = entry.retention
        if retention is not None and level != DEFAULT_PRIORITY // _STEP:
            pause = retention.duration * _STEP / max(abs(retention.priority - DEFAULT_PRIORITY), _STEP)
            heapq.heappush(self._due, (self._now + pause, next(self._serial), entry))
            self._drop_stale()

    def _level_of(self, entry: EntryView) -> int:
        if entry.retention is None:
            return DEFAULT_PRIORITY // _STEP
        age = self._now - self._used_at.at(entry.tick)
        return round(entry.retention.priority_at(age) / _STEP)

    def _drop_stale(self) -> None:
        """Keep the heap in proportion to the entries."""
        if len(self._due) > 2 * len(self._level) + 64:
            latest = {item[2]: item for item in sorted(self._due, key=lambda item: item[1]) if item[2] in self._level}
            self._due = list(latest.values())
            heapq.heapify(self._due)

    def discard(self, entry: E) -> None:
        self._levels[self._level.pop(entry)].discard(entry)

    def touch(self, entry: E) -> None:
        self.discard(entry)
        self.add(entry)

    def first(self) -> E | None:
        while self._due and self._due[0][0] <= self._now:
            entry = heapq.heappop(self._due)[2]
            if entry in self._level:
                self.touch(entry)
        return next((level.first() for level in self._levels if len(level)), None)

    def __contains__(self, entry: object) -> bool:
        return entry in self._level

    def __len__(self) -> int:
        return len(self._level)
