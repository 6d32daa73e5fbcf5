"""Which pages were used since the last write transaction: readers only note them, so that a read never writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

MAX_NOTED = 4096
"""Beyond that the oldest notes are forgotten."""

FLUSH_AT = 2048
"""So many notes are worth a write transaction of their own, where nothing else is written."""


class RecentKeys:
    """Keys in the order of their use. Safe to use from several threads."""

    def __init__(self) -> None:
        self._keys: deque[bytes] = deque(maxlen=MAX_NOTED)

    def note(self, keys: Sequence[bytes], count: int) -> int:
        """The first `count` pages of a chain were used: noting the deepest is enough. Returns the number of notes."""
        if count:
            self._keys.append(keys[count - 1])
        return len(self._keys)

    def take(self) -> list[bytes]:
        """Each noted key once, the most recently used last; nothing is noted any more."""
        keys = [self._keys.popleft() for _ in range(len(self._keys))]
        return list(dict.fromkeys(reversed(keys)))[::-1]
