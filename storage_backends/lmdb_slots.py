"""Sets of slot numbers in LMDB, as extents: they stay small, and a transaction that fails leaves them as they were."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hicache.errors import StoreCorruptError
from hicache.storage_backends.lmdb_schema import BLOCK_BYTES, seal, unseal

if TYPE_CHECKING:
    from lmdb import Transaction, _Database

_KEY = struct.Struct(">IQ")
_LENGTH = struct.Struct(">Q")

ALL_SLOTS = range(1 << 40)
"""Of one slab: as many as a location can tell apart."""

SEARCH_EXTENTS = 32
"""How many extents are looked at for one that holds a whole batch before it is put together from several."""


class ExtentSet:
    """Disjoint, non-adjacent extents of slots of one slab: (slot size in blocks, first slot) → number of slots."""

    def __init__(self, txn: Transaction[bytes], database: _Database, slot_bytes: int) -> None:
        self._cursor = txn.cursor(database)
        self._units = slot_bytes // BLOCK_BYTES

    def __iter__(self) -> Iterator[range]:
        """Ascending. The set must not change while it is iterated."""
        found = self._first()
        while found:
            yield self._here()
            found = self._cursor.next() and self._mine()

    def last(self) -> range | None:
        found = self._cursor.prev() if self._cursor.set_range(_KEY.pack(self._units + 1, 0)) else self._cursor.last()
        return self._here() if found and self._mine() else None

    def take(self, count: int) -> list[range]:
        """Remove and return up to `count` slots, lowest first, in one extent if a near one is large enough."""
        whole = self._find(count)
        if whole is not None:
            return [self._cut(whole, count)]
        taken = []
        while count and self._first():
            taken.append(self._cut(self._here(), count))
            count -= len(taken[-1])
        return taken

    def add(self, slots: Sequence[int]) -> None:
        for extent in extents_of(slots):
            self.add_extent(extent)

    def add_extent(self, extent: range) -> None:
        """Add slots, joining the neighbours. Raises StoreCorruptError if one of them is in the set already."""
        if self._cursor.set_range(self._key(extent.start)) and self._mine():
            after = self._here()
            self._check_apart(extent, after)
            if after.start == extent.stop:
                extent = range(extent.start, after.stop)
                self._cursor.delete()
        before = self._before(extent.start)
        if before is not None:
            self._check_apart(before, extent)
            if before.stop == extent.start:
                extent = range(before.start, extent.stop)
        self._put(extent)

    def discard(self, extent: range) -> None:
        """Remove an extent that lies within one of the set."""
        whole = self._before(extent.start + 1)
        if whole is None or whole.stop < extent.stop:
            raise StoreCorruptError(f"slots {extent.start} to {extent.stop - 1} are not where they should be")
        self._cursor.set_key(self._key(whole.start))
        self._cursor.delete()
        for rest in (range(whole.start, extent.start), range(extent.stop, whole.stop)):
            if len(rest):
                self._put(rest)

    def _before(self, slot: int) -> range | None:
        found = self._cursor.prev() if self._cursor.set_range(self._key(slot)) else self._cursor.last()
        return self._here() if found and self._mine() else None

    def _find(self, count: int) -> range | None:
        found = self._first()
        for _ in range(SEARCH_EXTENTS):
            if not found:
                break
            extent = self._here()
            if len(extent) >= count:
                return extent
            found = self._cursor.next() and self._mine()
        return None

    def _cut(self, extent: range, count: int) -> range:
        """Take the first `count` slots of an extent that is in the set."""
        self._cursor.set_key(self._key(extent.start))
        self._cursor.delete()
        if count < len(extent):
            self._put(extent[count:])
        return extent[:count]

    def _first(self) -> bool:
        return self._cursor.set_range(self._key(0)) and self._mine()

    def _mine(self) -> bool:
        return bool(_KEY.unpack(self._cursor.key())[0] == self._units)

    def _key(self, slot: int) -> bytes:
        return _KEY.pack(self._units, slot)

    def _here(self) -> range:
        key = self._cursor.key()
        start = _KEY.unpack(key)[1]
        return range(start, start + _LENGTH.unpack(unseal(key, self._cursor.value()))[0])

    def _put(self, extent: range) -> None:
        key = self._key(extent.start)
        self._cursor.put(key, seal(key, _LENGTH.pack(len(extent))))

    def _check_apart(self, first: range, second: range) -> None:
        if first.stop > second.start:
            raise StoreCorruptError(f"slot {second.start} of the slab of {self._units} blocks has two owners")


def extents_of(slots: Sequence[int]) -> Iterator[range]:
    """The slots, which are all different, as ascending extents."""
    ordered = sorted(slots)
    start = 0
    for index in range(1, len(ordered) + 1):
        if index == len(ordered) or ordered[index] != ordered[index - 1] + 1:
            yield range(ordered[start], ordered[index - 1] + 1)
            start = index
