"""The eviction order: pages without children by namespace, segment and stamp, oldest first."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from hicache.errors import StoreCorruptError
from hicache.hashing import DIGEST_BYTES

if TYPE_CHECKING:
    from lmdb import Transaction, _Database

PROBATION, PROTECTED = 0, 1
"""Segments: a namespace's pages on probation go before its protected ones. Only slru protects."""

_KEY = struct.Struct(">HBQ")


class Entry(NamedTuple):
    space: int
    segment: int
    stamp: int
    key: bytes


class EvictionOrder:
    def __init__(self, txn: Transaction[bytes], database: _Database) -> None:
        self._txn = txn
        self._database = database

    def enter(self, space: int, segment: int, stamp: int, key: bytes) -> None:
        if not self._txn.put(_KEY.pack(space, segment, stamp), key, overwrite=False, db=self._database):
            raise StoreCorruptError(f"two pages have the stamp {stamp}")

    def leave(self, space: int, segment: int, stamp: int) -> bool:
        """False if there was no such entry."""
        return self._txn.delete(_KEY.pack(space, segment, stamp), db=self._database)

    def at(self, space: int, segment: int, stamp: int) -> bytes | None:
        """Key of the page in this place."""
        return self._txn.get(_KEY.pack(space, segment, stamp), db=self._database)

    def first(self, space: int, segment: int) -> Entry | None:
        """The oldest entry of a segment."""
        return next(self._from(space, segment, 0), None)

    def last(self, space: int, segment: int) -> Entry | None:
        """The newest entry of a segment."""
        cursor = self._txn.cursor(self._database)
        found = cursor.prev() if cursor.set_range(_KEY.pack(space, segment + 1, 0)) else cursor.last()
        if not found:
            return None
        here_space, here_segment, stamp = _KEY.unpack(cursor.key())
        if (here_space, here_segment) != (space, segment):
            return None
        return Entry(space, segment, stamp, cursor.value())

    def heads(self, space: int) -> list[Entry]:
        """The oldest entry of each segment that has any."""
        entries = (self.first(space, segment) for segment in (PROBATION, PROTECTED))
        return [entry for entry in entries if entry is not None]

    def next_victim(self, space: int, starts: Mapping[int, int]) -> Entry | None:
        """The entry that goes next, those on probation first; `starts`: by segment, the stamp to look from."""
        for segment in (PROBATION, PROTECTED):
            entry = next(self._from(space, segment, starts.get(segment, 0)), None)
            if entry is not None:
                return entry
        return None

    def entries(self, space: int) -> Iterator[Entry]:
        """All of a namespace, in the order in which they would go."""
        for segment in (PROBATION, PROTECTED):
            yield from self._from(space, segment, 0)

    def _from(self, space: int, segment: int, stamp: int) -> Iterator[Entry]:
        """Entries of a segment with this stamp or a later one."""
        cursor = self._txn.cursor(self._database)
        found = cursor.set_range(_KEY.pack(space, segment, stamp))
        while found:
            here_space, here_segment, here_stamp = _KEY.unpack(cursor.key())
            if (here_space, here_segment) != (space, segment):
                return
            key = cursor.value()
            if len(key) != DIGEST_BYTES:
                raise StoreCorruptError(f"the entry with stamp {here_stamp} names no page")
            yield Entry(space, segment, here_stamp, key)
            found = cursor.next()
