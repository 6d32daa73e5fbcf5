"""Sets of slot numbers in LMDB, as extents: they stay small, and a transaction that fails leaves them as they were."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmdb import Transaction, _Database

_NUMBER = struct.Struct(">Q")

SEARCH_EXTENTS = 32
"""How many extents are looked at for one that holds a whole batch before it is put together from several."""


class ExtentSet:
    """Disjoint, non-adjacent extents of slots: first slot → number of slots (both u64, big-endian)."""

    def __init__(self, txn: Transaction[bytes], database: _Database) -> None:
        self._cursor = txn.cursor(database)

    def __iter__(self) -> Iterator[range]:
        """Ascending. The set must not change while it is iterated."""
        found = self._cursor.first()
        while found:
            yield self._here()
            found = self._cursor.next()

    def last(self) -> range | None:
        return self._here() if self._cursor.last() else None

    def take(self, count: int) -> list[range]:
        """Remove and return up to `count` slots, lowest first, in one extent if a near one is large enough."""
        whole = self._find(count)
        if whole is not None:
            return [self._cut(whole, count)]
        taken = []
        while count and self._cursor.first():
            taken.append(self._cut(self._here(), count))
            count -= len(taken[-1])
        return taken

    def add(self, slots: Sequence[int]) -> None:
        for extent in extents_of(slots):
            self.add_extent(extent)

    def add_extent(self, extent: range) -> None:
        """Add slots that are not in the set, joining the neighbours."""
        if self._cursor.set_range(_NUMBER.pack(extent.start)):
            after = self._here()
            if after.start == extent.stop:
                extent = range(extent.start, after.stop)
                self._cursor.delete()
        before = self._before(extent.start)
        if before is not None and before.stop == extent.start:
            extent = range(before.start, extent.stop)
        self._put(extent)

    def _before(self, slot: int) -> range | None:
        found = self._cursor.prev() if self._cursor.set_range(_NUMBER.pack(slot)) else self._cursor.last()
        return self._here() if found else None

    def _find(self, count: int) -> range | None:
        found = self._cursor.first()
        for _ in range(SEARCH_EXTENTS):
            if not found:
                break
            extent = self._here()
            if len(extent) >= count:
                return extent
            found = self._cursor.next()
        return None

    def _cut(self, extent: range, count: int) -> range:
        """Take the first `count` slots of an extent that is in the set."""
        self._cursor.set_key(_NUMBER.pack(extent.start))
        self._cursor.delete()
        if count < len(extent):
            self._put(extent[count:])
        return extent[:count]

    def _here(self) -> range:
        start, length = _NUMBER.unpack(self._cursor.key())[0], _NUMBER.unpack(self._cursor.value())[0]
        return range(start, start + length)

    def _put(self, extent: range) -> None:
        self._cursor.put(_NUMBER.pack(extent.start), _NUMBER.pack(len(extent)))


def extents_of(slots: Sequence[int]) -> Iterator[range]:
    """The slots, which are all different, as ascending extents."""
    ordered = sorted(slots)
    start = 0
    for index in range(1, len(ordered) + 1):
        if index == len(ordered) or ordered[index] != ordered[index - 1] + 1:
            yield range(ordered[start], ordered[index - 1] + 1)
            start = index
