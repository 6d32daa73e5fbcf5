"""What orders keep beside the entries they track, bounded: entries that may come back, and what a tick meant."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A map that forgets what was put into it first, beyond `limit` items."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._items: OrderedDict[K, V] = OrderedDict()

    def put(self, key: K, value: V) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        while len(self._items) > self.limit:
            self._items.popitem(last=False)

    def pop(self, key: K) -> V | None:
        return self._items.pop(key, None)

    def __len__(self) -> int:
        return len(self._items)


def away_limit(live: int) -> int:
    """How many entries that left are remembered: as many as are tracked, and a few."""
    return live + 64


_MAX_POINTS = 4096


class Timeline:
    """A value that only grows, by tick. Old points are thinned out, again and again: the later a tick, the more exact.

    Of the last few thousand points none or few are missing; before the last 20,000 or so only the first is left.
    """

    def __init__(self) -> None:
        self._ticks = [0]
        self._values = [0.0]

    def note(self, tick: int, value: float) -> None:
        """The value is `value` from `tick` on; the first value of a tick counts."""
        if tick <= self._ticks[-1] or value == self._values[-1]:
            return
        self._ticks.append(tick)
        self._values.append(value)
        if len(self._ticks) > _MAX_POINTS:
            self._ticks, self._values = self._ticks[::2], self._values[::2]

    def at(self, tick: int) -> float:
        return self._values[max(bisect_right(self._ticks, tick) - 1, 0)]
