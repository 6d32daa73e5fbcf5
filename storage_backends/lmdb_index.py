"""The transactional index: which pages are stored, where, who their children are, and who goes next.

    pages      key (32 bytes)                   → namespace, segment, length, location, checksum, stamp, parent
    children   parent key + child key           → nothing
    order      namespace, segment, stamp        → key, for pages without children only: the eviction order
    spaces     namespace                        → Space: its counters and rules
    slabs      slot size                        → SlabState                              (slab only)
    free       slot size, first slot            → count: slots with blocks and no page   (slab only)
    holes      slot size, first slot            → count: slots without blocks            (slab only)
    values     location                         → bytes                                  (inline only)
    meta       "state" → IndexState, "store" → JSON, "space N" → the namespace's identity as JSON

Three rules keep every call cheap. A page's parent is always stored, so presence along a chain is
monotone and found by bisection. Only the deepest page of an access is stamped; a page inherits the
stamp of a child that leaves, because whoever used the child used the parent. Stamps are unique and
grow: microseconds of the wall clock, or one more than the last where that has not moved on.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, cast

from lmdb import Transaction

from hicache.errors import StoreCorruptError
from hicache.hashing import DIGEST_BYTES, Field
from hicache.storage_backends.base import PageRun
from hicache.storage_backends.lmdb_order import PROBATION, PROTECTED, EvictionOrder
from hicache.storage_backends.lmdb_schema import (
    Databases,
    Encoded,
    IndexState,
    NewPage,
    PageRecord,
    SlabState,
    Space,
    read_label,
    seal,
    slab_sizes,
    space_key,
    space_number,
    unseal,
)

POLICIES: Final = ("lru", "slru", "fifo")
"""Eviction policies, by their number in `Space.policy`."""

_LRU, _SLRU, _FIFO = range(3)

PROTECTED_SHARE = 0.8
"""Most of the evictable pages that slru protects; use beyond that has the oldest of them wait on probation."""


class IndexView:
    """The index as one transaction sees it."""

    def __init__(self, txn: Transaction[bytes], databases: Databases) -> None:
        self.txn = txn
        self.databases = databases
        self.order = EvictionOrder(txn, databases.order)

    def state(self) -> IndexState:
        return IndexState.load(self.txn, self.databases)

    def space(self, number: int) -> Space:
        return Space.load(self.txn, self.databases, number)

    def spaces(self) -> dict[int, Space]:
        keys = self.txn.cursor(self.databases.spaces).iternext(values=False)
        return {number: self.space(number) for number in map(space_number, keys)}

    def labels(self) -> dict[int, dict[str, Field]]:
        """The identity of each namespace."""
        found = {}
        for number in self.spaces():
            key = _label_key(number)
            raw = unseal(key, self.txn.get(key, b"", db=self.databases.meta))
            found[number] = cast("dict[str, Field]", read_label(raw, f"label of namespace {number}"))
        return found

    def slab(self, slot_bytes: int) -> SlabState:
        return SlabState.load(self.txn, self.databases, slot_bytes)

    def slabs(self) -> dict[int, SlabState]:
        return {size: self.slab(size) for size in slab_sizes(self.txn, self.databases)}

    def record(self, key: bytes) -> PageRecord | None:
        raw = self.txn.get(key, db=self.databases.pages)
        return None if raw is None else PageRecord.unpack(key, raw)

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many leading keys of a chain are stored."""
        return bisect_left(keys, True, key=lambda key: not self.has(key))

    def leading_records(self, number: int, keys: Sequence[bytes]) -> list[PageRecord]:
        """Records of the leading keys of a chain of a namespace that are stored."""
        records: list[PageRecord] = []
        if self.space(number).clearing:
            return records
        for key in keys:
            record = self.record(key)
            if record is None or record.space != number:
                break
            records.append(record)
        return records

    def has(self, key: bytes) -> bool:
        return self.txn.get(key, db=self.databases.pages) is not None

    def children(self, key: bytes) -> Iterator[bytes]:
        cursor = self.txn.cursor(self.databases.children)
        found = cursor.set_range(key)
        while found and cursor.key().startswith(key):
            yield cursor.key()[DIGEST_BYTES:]
            found = cursor.next()

    def oldest(self, space: int) -> int | None:
        """Stamp of the page of a namespace that has not been used for longest; None if there is none."""
        stamps = [entry.stamp for entry in self.order.heads(space)]
        return min(stamps, default=None)

    def check_counts(self) -> None:
        """Raises StoreCorruptError if there are not as many records as were counted: a database may have been lost.
        Likewise if it cannot be told whose pages these are."""
        self.labels()
        spaces = self.spaces().values()
        counted = {"pages": sum(space.pages for space in spaces), "order": sum(space.leaves for space in spaces)}
        for name, count in counted.items():
            found = self.txn.stat(getattr(self.databases, name))["entries"]
            if found != count:
                raise StoreCorruptError(f"the index has {found} records of {name} and counted {count}")

    def plan(self, runs: Sequence[PageRun], space: Space, most: int) -> tuple[list[NewPage], list[int]]:
        """Pages to be written, at most `most`, and how many leading pages of each run are stored then.

        Nothing of a run that `space`, their namespace, does not accept, or whose parent is not stored.
        """
        planned: dict[bytes, NewPage] = {}
        counts = []
        for run in runs:
            if not space.accepts(run.generation) or (
                run.parent is not None and run.parent not in planned and not self.has(run.parent)
            ):
                counts.append(0)
                continue
            start = bisect_left(run.keys, True, key=lambda key: key not in planned and not self.has(key))
            stop = min(len(run.keys), start + most - len(planned))
            parents = [run.parent, *run.keys]
            for key, parent, buffer in zip(run.keys[start:stop], parents[start:stop], run.buffers[start:stop]):
                planned[key] = NewPage(key, parent, buffer)
            counts.append(stop)
        return list(planned.values()), counts


class IndexWriter(IndexView):
    """Changes to the index within one write transaction; call `save` before it commits."""

    def __init__(self, txn: Transaction[bytes], databases: Databases, now_us: int) -> None:
        super().__init__(txn, databases)
        self.current = self.state()
        self._now_us = now_us
        self._spaces: dict[int, Space] = {}
        self._slabs: dict[int, SlabState] = {}
        self._family = txn.cursor(databases.children)

    def space(self, number: int) -> Space:
        """The namespace's counters; what is changed in them is saved."""
        if number not in self._spaces:
            self._spaces[number] = super().space(number)
        return self._spaces[number]

    def slab(self, slot_bytes: int) -> SlabState:
        """The slab's counters; what is changed in them is saved."""
        if slot_bytes not in self._slabs:
            self._slabs[slot_bytes] = super().slab(slot_bytes)
        return self._slabs[slot_bytes]

    def save(self) -> None:
        self.current.save(self.txn, self.databases)
        for number, space in self._spaces.items():
            space.save(self.txn, self.databases, number)
        for slot_bytes, slab in self._slabs.items():
            slab.save(self.txn, self.databases, slot_bytes)

    def take_stamps(self, count: int) -> range:
        """Ascending numbers that no other call gets, from the present time on."""
        first = max(self.current.clock, self._now_us)
        self.current.clock = first + count
        return range(first, first + count)

    def name_space(self, number: int, label: Mapping[str, Field]) -> None:
        """Begin a namespace for an identity."""
        key = _label_key(number)
        self.txn.put(key, seal(key, json.dumps(label).encode()), db=self.databases.meta)
        self.space(number)

    def forget_space(self, number: int) -> None:
        """End a namespace that has no pages."""
        self.txn.delete(_label_key(number), db=self.databases.meta)
        self.txn.delete(space_key(number), db=self.databases.spaces)
        self._spaces.pop(number, None)

    # ---- adding -------------------------------------------------------------------------------

    def insert(self, number: int, pages: Sequence[NewPage], forms: Sequence[Encoded], locations: Sequence[int]) -> None:
        """Add pages, each after its parent. Those without a child among `pages` become evictable."""
        space = self.space(number)
        records: dict[bytes, PageRecord] = {}
        for stamp, page, form, location in zip(self.take_stamps(len(pages)), pages, forms, locations):
            assert form.checksum is not None
            records[page.key] = PageRecord(number, PROBATION, form.length, location, form.checksum, stamp, page.parent)
        packed = [(key, record.pack(key)) for key, record in records.items()]
        self.txn.cursor(self.databases.pages).putmulti(packed)
        links = [(page.parent + page.key, b"") for page in pages if page.parent is not None]
        self.txn.cursor(self.databases.children).putmulti(links)
        parents = {page.parent for page in pages if page.parent is not None}
        for key in parents - records.keys():
            if (record := self.record(key)) is not None:
                self.leave_order(record)
        for key in records.keys() - parents:
            self._enter_order(key, records[key])
        cost = sum(record.cost for record in records.values())
        space.pages += len(pages)
        space.live_bytes += cost
        self.current.live_bytes += cost

    def touch(self, key: bytes) -> None:
        """A page was used; nothing if it is gone, or if use does not count with its namespace's policy."""
        record = self.record(key)
        if record is None or (policy := self.space(record.space).policy) == _FIFO:
            return
        leaf = self.leave_order(record)
        (stamp,) = self.take_stamps(1)
        used = record._replace(stamp=stamp, segment=PROTECTED if policy == _SLRU else PROBATION)
        self._put(key, used)
        if leaf:
            self._enter_order(key, used)
            space = self.space(record.space)
            if space.protected > space.leaves * PROTECTED_SHARE:
                self._unprotect_one(record.space)

    # ---- removing -----------------------------------------------------------------------------

    def remove(self, key: bytes) -> list[PageRecord]:
        """Remove a page and everything below it; returns the records."""
        record = self.record(key)
        if record is None:
            return []
        if record.parent is not None:
            self._unlink(record.parent, key)
        removed: list[PageRecord] = []
        doomed = [key]
        for each in doomed:
            below = list(self.children(each))
            for child in below:
                self._unlink(each, child)
            doomed.extend(below)
            if (gone := self.record(each)) is not None:
                self.leave_order(gone)
                self._delete(each, gone)
                removed.append(gone)
        if record.parent is not None:
            self.child_left(record.parent, max(removed, key=lambda gone: gone.stamp))
        return removed

    def remove_leaf(self, key: bytes, record: PageRecord) -> bytes | None:
        """Remove a page without children that has left the order; returns the key of its parent."""
        self._delete(key, record)
        if record.parent is not None:
            self._unlink(record.parent, key)
        return record.parent

    def drop_all(self) -> None:
        """Remove every page of every namespace at once; their slots are not accounted for any more."""
        for name in ("pages", "children", "order", "values"):
            self.txn.drop(getattr(self.databases, name), delete=False)
        for number in self.spaces():
            space = self.space(number)
            space.pages = space.live_bytes = space.leaves = space.protected = 0
        self.current.live_bytes = 0

    # ---- families -----------------------------------------------------------------------------

    def has_children(self, key: bytes) -> bool:
        return self._family.set_range(key) and self._family.key().startswith(key)

    def _unlink(self, parent: bytes, child: bytes) -> None:
        self.txn.delete(parent + child, db=self.databases.children)

    def child_left(self, key: bytes, child: PageRecord) -> None:
        """A page is as recently used as the child that left, and evictable if that was its last."""
        record = self.record(key)
        if record is None:
            return
        if self.space(record.space).policy != _FIFO and child.stamp > record.stamp:
            record = record._replace(stamp=child.stamp, segment=max(child.segment, record.segment))
            self._put(key, record)
        if not self.has_children(key):
            self._enter_order(key, record)

    # ---- the order ----------------------------------------------------------------------------

    def _enter_order(self, key: bytes, record: PageRecord) -> None:
        space = self.space(record.space)
        self.order.enter(record.space, record.segment, record.stamp, key)
        space.leaves += 1
        space.protected += record.segment == PROTECTED

    def leave_order(self, record: PageRecord) -> bool:
        """True if the page was in the order: it had no children."""
        left = self.order.leave(record.space, record.segment, record.stamp)
        if left:
            self.left_order(record)
        return left

    def left_order(self, record: PageRecord) -> None:
        """Count a page that has left the order."""
        space = self.space(record.space)
        space.leaves -= 1
        space.protected -= record.segment == PROTECTED

    def _unprotect_one(self, number: int) -> None:
        """The protected page that was not used for longest goes back to probation, as if used now: a second chance."""
        entry = self.order.first(number, PROTECTED)
        record = self.record(entry.key) if entry is not None else None
        if entry is None or record is None:
            return
        self.leave_order(record)
        (stamp,) = self.take_stamps(1)
        record = record._replace(segment=PROBATION, stamp=stamp)
        self._put(entry.key, record)
        self._enter_order(entry.key, record)

    # ---- records ------------------------------------------------------------------------------

    def _put(self, key: bytes, record: PageRecord) -> None:
        self.txn.put(key, record.pack(key), db=self.databases.pages)

    def _delete(self, key: bytes, record: PageRecord) -> None:
        self.txn.delete(key, db=self.databases.pages)
        space = self.space(record.space)
        space.pages -= 1
        space.live_bytes -= record.cost
        self.current.live_bytes -= record.cost


def _label_key(number: int) -> bytes:
    return f"space {number}".encode()
