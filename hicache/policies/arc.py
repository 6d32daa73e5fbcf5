"""ARC: two recency lists, and ghosts that say which of them should be longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from hicache.policies.base import E, EvictionOrder, Remembered, identity
from hicache.policies.basic import Recency
from hicache.policies.memory import Recent

_MAX_GHOSTS = 16_384


class _Side(Generic[E]):
    """One of the lists, its size in bytes, and the ghosts of what was evicted from it."""

    def __init__(self) -> None:
        self.entries = Recency[E]()
        self.ghosts = Recent[int, int](_MAX_GHOSTS)
        self.size = 0


class Arc(EvictionOrder[E], Generic[E]):
    """ARC (Megiddo and Modha, FAST 2003), in bytes: `_once` holds what was never hit, `_again` the rest.

    A ghost of either list that comes back moves the target size of `_once` (`_target`) in that list's favour, and
    its entry counts as used again. The capacity of the paper is what the order tracks now.
    """

    def __init__(self) -> None:
        self._once = _Side[E]()
        self._again = _Side[E]()
        self._sides: dict[E, _Side[E]] = {}
        self._target = 0.0

    def add(self, entry: E) -> None:
        side = self._sides[entry] = self._again if entry.hits else self._once
        side.entries.add(entry)
        side.size += len(entry.key)

    def discard(self, entry: E) -> None:
        side = self._sides.pop(entry)
        side.entries.discard(entry)
        side.size -= len(entry.key)

    def touch(self, entry: E) -> None:
        self.discard(entry)
        self.add(entry)

    def evicted(self, entry: E) -> None:
        self._sides[entry].ghosts.put(identity(entry.key), len(entry.key))
        self.discard(entry)

    def entered(self, entry: E) -> Sequence[Remembered]:
        name = identity(entry.key)
        size = self._once.ghosts.pop(name)
        if size is not None:
            self._move_target(size, len(self._again.ghosts) / (len(self._once.ghosts) + 1))
        else:
            size = self._again.ghosts.pop(name)
            if size is None:
                return ()
            self._move_target(-size, len(self._once.ghosts) / (len(self._again.ghosts) + 1))
        return (Remembered(min(size, len(entry.key)), 1),)

    def _move_target(self, by: int, ratio: float) -> None:
        moved = self._target + by * max(ratio, 1.0)
        self._target = min(max(moved, 0.0), float(self._once.size + self._again.size))

    def first(self) -> E | None:
        once, again = self._once, self._again
        if len(once.entries) and (once.size > self._target or not len(again.entries)):
            return once.entries.first()
        return again.entries.first()

    def __contains__(self, entry: object) -> bool:
        return entry in self._sides

    def __len__(self) -> int:
        return len(self._sides)
