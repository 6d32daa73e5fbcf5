"""Which pages were used since the last write transaction: readers only note them, so that a read never writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

MAX_NOTED = 4096
"""Beyond that the oldest notes are forgotten."""

FLUSH_AT = 2048
"""So many notes are worth a write transaction of their own, where nothing else is written."""


class RecentKeys:
    """Keys in the order of their use, with its time in seconds. Safe to use from several threads."""

    def __init__(self) -> None:
        self._notes: deque[tuple[float, bytes]] = deque(maxlen=MAX_NOTED)

    def __len__(self) -> int:
        return len(self._notes)

    def note(self, keys: Sequence[bytes], count: int, now: float = 0.0) -> None:
        """The first `count` pages of a chain were used: noting the deepest is enough."""
        if count:
            self._notes.append((now, keys[count - 1]))

    def older_than(self, time: float) -> bool:
        """Is there a note from before that time?"""
        try:
            return self._notes[0][0] < time
        except IndexError:
            return False

    def take(self, since: float = 0.0) -> list[bytes]:
        """Each key noted at that time or later once, the most recently used last; nothing is noted any more."""
        notes = [self._notes.popleft() for _ in range(len(self._notes))]
        recent = [key for time, key in notes if time >= since]
        return list(dict.fromkeys(reversed(recent)))[::-1]
