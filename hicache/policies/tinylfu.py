"""TinyLFU: how often a content was seen lately, in little memory, whether it is cached or not."""

from __future__ import annotations

from typing import Generic

from hicache.policies.base import E, EvictionOrder, Remembered, identity
from hicache.policies.basic import Recency, Segmented
from hicache.policies.memory import Recent, away_limit

_ROWS = 4
_WIDTH = 1 << 14
_MOST = 15
_SAMPLE = 10 * _WIDTH
_HALVES = bytes(value >> 1 for value in range(256))
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)


class FrequencySketch:
    """Count-min sketch of identities whose counts are halved after every 163,840 (Einziger et al., TOS 2017).

    64 KiB; counts end at 15.
    """

    def __init__(self) -> None:
        self._rows = [bytearray(_WIDTH) for _ in range(_ROWS)]
        self._seen = 0

    def see(self, name: int) -> None:
        for row, multiplier in zip(self._rows, _MULTIPLIERS, strict=True):
            at = _slot(name, multiplier)
            if row[at] < _MOST:
                row[at] += 1
        self._seen += 1
        if self._seen >= _SAMPLE:
            self._rows = [row.translate(_HALVES) for row in self._rows]
            self._seen //= 2

    def count(self, name: int) -> int:
        """How often `name` was seen lately: not less, and seldom more."""
        return min(row[_slot(name, multiplier)] for row, multiplier in zip(self._rows, _MULTIPLIERS, strict=True))


def _slot(name: int, multiplier: int) -> int:
    return (name * multiplier & 0xFFFFFFFFFFFFFFFF) >> 50


_WINDOW_SHARE = 100
"""The window is kept to one in so many bytes, as in the paper."""


class WTinyLfu(EvictionOrder[E], Generic[E]):
    """W-TinyLFU (Einziger et al., 2017): a small lru window before a segmented lru that admits by frequency.

    When the window is too long, its least recent entry meets the next victim of the main part: the one that was
    seen less often goes, and the window's moves to the main part if it stays.
    """

    def __init__(self) -> None:
        self._sketch = FrequencySketch()
        self._window = Recency[E]()
        self._main = Segmented[E]()
        self._sizes: dict[E, int] = {}
        self._window_size = self._size = 0
        self._away = Recent[E, tuple[bool, int]](away_limit(0))  # was it in the main part, and its hits

    def add(self, entry: E) -> None:
        in_main, hits = self._away.pop(entry) or (False, 0)
        if entry.hits > hits:
            self._sketch.see(identity(entry.key))
        self._put(entry, in_main)

    def _put(self, entry: E, in_main: bool) -> None:
        size = self._sizes[entry] = len(entry.key)
        self._size += size
        if in_main:
            self._main.add(entry)
        else:
            self._window.add(entry)
            self._window_size += size

    def _take(self, entry: E) -> bool:
        """Returns whether it was in the main part."""
        size = self._sizes.pop(entry)
        self._size -= size
        if entry in self._window:
            self._window.discard(entry)
            self._window_size -= size
            return False
        self._main.discard(entry)
        return True

    def discard(self, entry: E) -> None:
        in_main = self._take(entry)
        self._away.limit = away_limit(len(self._sizes))
        self._away.put(entry, (in_main, entry.hits))

    def evicted(self, entry: E) -> None:
        self._take(entry)

    def entered(self, entry: E) -> tuple[Remembered, ...]:
        self._sketch.see(identity(entry.key))
        return ()

    def touch(self, entry: E) -> None:
        self._sketch.see(identity(entry.key))
        (self._window if entry in self._window else self._main).touch(entry)

    def first(self) -> E | None:
        while True:
            newcomer, victim = self._window.first(), self._main.first()
            if newcomer is None or (victim is not None and self._window_size * _WINDOW_SHARE <= self._size):
                return victim
            if victim is not None and self._count(newcomer) <= self._count(victim):
                return newcomer
            if victim is None and len(self._window) == 1:
                return newcomer
            self._take(newcomer)
            self._put(newcomer, in_main=True)

    def _count(self, entry: E) -> int:
        return self._sketch.count(identity(entry.key))

    def __contains__(self, entry: object) -> bool:
        return entry in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)
