"""Queue-awareness: what waiting requests will hit goes last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from hicache.policies.base import E, EvictionOrder, Remembered


class QueueAware(EvictionOrder[E], Generic[E]):
    """Two orders of the same kind: `rest` goes before `awaited`. It never blocks: in the end the awaited go too.

    A change of `awaited` is told by `touch`. `rest` is told what enters, and is the only one that recalls anything.
    """

    def __init__(self, rest: EvictionOrder[E], awaited: EvictionOrder[E]) -> None:
        self._rest = rest
        self._awaited = awaited

    def _of(self, entry: E) -> EvictionOrder[E]:
        return self._awaited if entry in self._awaited else self._rest

    def add(self, entry: E) -> None:
        (self._awaited if entry.awaited else self._rest).add(entry)

    def discard(self, entry: E) -> None:
        self._of(entry).discard(entry)

    def touch(self, entry: E) -> None:
        if (entry in self._awaited) == bool(entry.awaited):
            self._of(entry).touch(entry)
        else:
            self._of(entry).discard(entry)
            self.add(entry)

    def evicted(self, entry: E) -> None:
        self._of(entry).evicted(entry)

    def entered(self, entry: E) -> Sequence[Remembered]:
        self._awaited.entered(entry)
        return self._rest.entered(entry)

    def advance(self, now: float) -> None:
        self._rest.advance(now)
        self._awaited.advance(now)

    def first(self) -> E | None:
        return self._rest.first() or self._awaited.first()

    def __contains__(self, entry: object) -> bool:
        return entry in self._rest or entry in self._awaited

    def __len__(self) -> int:
        return len(self._rest) + len(self._awaited)
