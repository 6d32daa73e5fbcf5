"""The transactional index: which pages are stored, where, who their children are, and who goes next.

    pages      key (32 bytes)              → location, checksum, stamp, parent
    children   parent key + child key      → nothing
    order      stamp (u64)                 → key, for pages without children only: the eviction order
    free       first slot → count          slots with blocks on disk and no page   (slab only)
    holes      first slot → count          slots without blocks                    (slab only)
    values     location → bytes                                                    (inline only)
    meta       "state" → IndexState, "identity" → JSON

Three rules keep every call cheap. A page's parent is always stored, so presence along a chain is
monotone and found by bisection. Only the deepest page of an access is stamped; a page inherits the
stamp of a child that leaves, because whoever used the child used the parent. Stamps are unique and
grow, so the order is appended to.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from lmdb import Transaction

from hicache.hashing import DIGEST_BYTES
from hicache.storage_backends.base import PageRun
from hicache.storage_backends.lmdb_schema import Databases, IndexState, NewPage, PageRecord

_STAMP = struct.Struct(">Q")


class IndexView:
    """The index as one transaction sees it."""

    def __init__(self, txn: Transaction[bytes], databases: Databases) -> None:
        self.txn = txn
        self.databases = databases

    @property
    def pages(self) -> int:
        return self.txn.stat(self.databases.pages)["entries"]

    def state(self) -> IndexState:
        return IndexState.load(self.txn, self.databases)

    def record(self, key: bytes) -> PageRecord | None:
        raw = self.txn.get(key, db=self.databases.pages)
        return None if raw is None else PageRecord.unpack(raw)

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many leading keys of a chain are stored."""
        get, pages = self.txn.get, self.databases.pages
        return bisect_left(keys, True, key=lambda key: get(key, db=pages) is None)

    def plan(self, runs: Sequence[PageRun], room: int) -> tuple[list[NewPage], list[int]]:
        """Pages to be written, at most `room`, and how many leading pages of each run are stored then."""
        planned: dict[bytes, NewPage] = {}
        counts = []
        for run in runs:
            if run.parent is not None and run.parent not in planned and not self._has(run.parent):
                counts.append(0)
                continue
            start = self._first_new(run.keys, planned)
            stop = min(len(run.keys), start + room - len(planned))
            parents = [run.parent, *run.keys]
            for key, parent, buffer in zip(run.keys[start:stop], parents[start:stop], run.buffers[start:stop]):
                planned[key] = NewPage(key, parent, buffer)
            counts.append(stop)
        return list(planned.values()), counts

    def _has(self, key: bytes) -> bool:
        return self.txn.get(key, db=self.databases.pages) is not None

    def _first_new(self, keys: Sequence[bytes], planned: dict[bytes, NewPage]) -> int:
        return bisect_left(keys, True, key=lambda key: key not in planned and not self._has(key))


@dataclass
class _Eviction:
    wanted: int
    keep: Collection[bytes]
    locations: list[int] = field(default_factory=list)


class IndexWriter(IndexView):
    """Changes to the index within one write transaction; call `save` before it commits."""

    def __init__(self, txn: Transaction[bytes], databases: Databases) -> None:
        super().__init__(txn, databases)
        self.current = self.state()
        self._family = txn.cursor(databases.children)

    def save(self) -> None:
        self.current.save(self.txn, self.databases)

    def take_numbers(self, count: int) -> range:
        """Ascending numbers that no other call gets."""
        first = self.current.clock
        self.current.clock += count
        return range(first, first + count)

    # ---- adding -------------------------------------------------------------------------------

    def insert(self, pages: Sequence[NewPage], locations: Sequence[int], checksums: Sequence[int]) -> None:
        """Add pages, each after its parent. Those without a child among `pages` become evictable."""
        stamps = self.take_numbers(len(pages))
        records, links, leaves = [], [], []
        own = {page.key for page in pages}
        parents = {page.parent for page in pages}
        for stamp, page, location, checksum in zip(stamps, pages, locations, checksums):
            records.append((page.key, PageRecord(location, checksum, stamp, page.parent).pack()))
            if page.parent is not None:
                links.append((page.parent + page.key, b""))
            if page.key not in parents:
                leaves.append((_STAMP.pack(stamp), page.key))
        self.txn.cursor(self.databases.pages).putmulti(records)
        self.txn.cursor(self.databases.children).putmulti(links)
        self.txn.cursor(self.databases.order).putmulti(leaves, append=True)
        for key in parents - own:
            if key is not None and (record := self.record(key)) is not None:
                self._leave_order(record.stamp)

    def touch(self, key: bytes) -> None:
        """Mark a page as the most recently used one; nothing if it is gone."""
        record = self.record(key)
        if record is None:
            return
        childless = self._leave_order(record.stamp)
        (stamp,) = self.take_numbers(1)
        self.txn.put(key, record._replace(stamp=stamp).pack(), db=self.databases.pages)
        if childless:
            self.txn.put(_STAMP.pack(stamp), key, append=True, db=self.databases.order)

    # ---- removing -----------------------------------------------------------------------------

    def evict(self, count: int, keep: Collection[bytes] = ()) -> list[int]:
        """Remove the `count` least recently used pages, children first; returns their locations.

        Pages in `keep`, and thereby their ancestors, stay: fewer go if nothing else is left.
        """
        eviction = _Eviction(count, keep)
        cursor = self.txn.cursor(self.databases.order)
        found = cursor.first()
        while found and len(eviction.locations) < count:
            stamp, key = cursor.key(), cursor.value()
            if key in keep:
                found = cursor.next()
                continue
            cursor.delete()
            self._evict_chain(eviction, key, _STAMP.unpack(stamp)[0])
            found = cursor.set_range(stamp)
        self.current.evicted += len(eviction.locations)
        return eviction.locations

    def remove(self, key: bytes) -> list[int]:
        """Remove a page and everything below it; returns the locations."""
        record = self.record(key)
        if record is None:
            return []
        if record.parent is not None:
            self._unlink(record.parent, key)
        removed = []
        doomed = [key]
        for each in doomed:
            below = list(self._children(each))
            for child in below:
                self._unlink(each, child)
            doomed.extend(below)
            removed.extend(self._pop(each))
        if record.parent is not None:
            self._child_left(record.parent, max(gone.stamp for gone in removed))
        return [gone.location for gone in removed]

    def clear(self) -> int:
        """Remove every page; returns how many. The generation moves on."""
        count = self.pages
        for database in self.databases[1:]:
            self.txn.drop(database, delete=False)
        self.current.generation += 1
        self.current.backed = 0
        return count

    def _evict_chain(self, eviction: _Eviction, key: bytes, stamp: int) -> None:
        """Evict a childless page that has left the order, then its ancestors as long as they are next in line."""
        record = self.record(key)
        while record is not None:
            self.txn.delete(key, db=self.databases.pages)
            eviction.locations.append(record.location)
            if record.parent is None:
                return
            self._unlink(record.parent, key)
            key = record.parent
            record = self.record(key)
            last = len(eviction.locations) >= eviction.wanted or key in eviction.keep
            if last or record is None or record.stamp > stamp or self._has_children(key):
                self._child_left(key, stamp)
                return

    def _pop(self, key: bytes) -> list[PageRecord]:
        record = self.record(key)
        if record is None:
            return []
        self.txn.delete(key, db=self.databases.pages)
        self._leave_order(record.stamp)
        return [record]

    def _unlink(self, parent: bytes, child: bytes) -> None:
        self.txn.delete(parent + child, db=self.databases.children)

    def _children(self, key: bytes) -> Iterator[bytes]:
        cursor = self.txn.cursor(self.databases.children)
        found = cursor.set_range(key)
        while found and cursor.key().startswith(key):
            yield cursor.key()[DIGEST_BYTES:]
            found = cursor.next()

    def _has_children(self, key: bytes) -> bool:
        return self._family.set_range(key) and self._family.key().startswith(key)

    def _child_left(self, key: bytes, stamp: int) -> None:
        """A page is as recently used as the child that left, and evictable if that was its last."""
        record = self.record(key)
        if record is None:
            return
        if stamp > record.stamp:
            record = record._replace(stamp=stamp)
            self.txn.put(key, record.pack(), db=self.databases.pages)
        if not self._has_children(key):
            self.txn.put(_STAMP.pack(record.stamp), key, db=self.databases.order)

    def _leave_order(self, stamp: int) -> bool:
        """True if the page with this stamp was in the order."""
        return self.txn.delete(_STAMP.pack(stamp), db=self.databases.order)
