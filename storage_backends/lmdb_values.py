"""Where the pages' bytes lie: in a slab file beside the index, or in the index itself."""

from __future__ import annotations

import logging
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from hicache.errors import StoreUnavailableError
from hicache.layout import KVLayout
from hicache.storage_backends.checksums import page_checksum
from hicache.storage_backends.lmdb_env import IndexEnvironment
from hicache.storage_backends.lmdb_index import IndexWriter
from hicache.storage_backends.lmdb_schema import PageRecord, leading_records
from hicache.storage_backends.lmdb_slots import ExtentSet
from hicache.storage_backends.slab import SlabFile

SLAB_FILE = "slab"

_LOCATION = struct.Struct(">Q")

_ALL_SLOTS = range(1 << 48)

GROWTH_BYTES = 64 << 20
"""A slab grows by this much at a time, so that its file has few extents."""

log = logging.getLogger(__name__)


class PageValues(ABC):
    """Bytes of pages by location. Whatever takes an `index` is part of that transaction."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout

    def read(self, env: IndexEnvironment, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> tuple[int, int]:
        """How many leading pages are stored, and how many of those are in `buffers` now, verified."""
        records = self.load(env, keys, buffers)
        size = self._layout.page_bytes
        for number, (record, key, buffer) in enumerate(zip(records, keys, buffers)):
            if page_checksum(key, buffer[:size]) != record.checksum:
                return len(records), number
        return len(records), len(records)

    def is_whole(self, index: IndexWriter, key: bytes, record: PageRecord) -> bool:
        """Does a page match its checksum? No writer can move it meanwhile."""
        page = memoryview(bytearray(self._layout.page_stride))
        self.load_one(index, record, page)
        return page_checksum(key, page[: self._layout.page_bytes]) == record.checksum

    @abstractmethod
    def recover(self, index: IndexWriter) -> None:
        """Take up what an earlier process left; called once, at open."""

    @abstractmethod
    def load(self, env: IndexEnvironment, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[PageRecord]:
        """Fill buffers with the leading pages that are stored; returns their records. Nothing is verified yet."""

    @abstractmethod
    def load_one(self, index: IndexWriter, record: PageRecord, buffer: memoryview) -> None:
        """Fill a buffer while no other writer can move the page. Nothing is verified yet."""

    @abstractmethod
    def store(self, index: IndexWriter, buffers: Sequence[memoryview], max_pages: int) -> list[int]:
        """Write pages; returns their locations. The caller has seen to it that there is room."""

    @abstractmethod
    def free(self, index: IndexWriter, locations: Sequence[int]) -> None:
        """Forget pages; their room is for transactions after this one."""

    @abstractmethod
    def shrink(self, index: IndexWriter, max_pages: int) -> None:
        """Give back what is held on disk beyond `max_pages`, after pages have been evicted."""

    @abstractmethod
    def clear(self, index: IndexWriter) -> None:
        """Hold nothing; called after the index has been cleared."""

    @abstractmethod
    def trim(self) -> None:
        """Give all bytes back; called after `clear` has been committed."""

    @abstractmethod
    def flip_byte(self, index: IndexWriter, location: int) -> None:
        """Damage a page, for drills."""

    @property
    @abstractmethod
    def allocated_bytes(self) -> int:
        """Bytes on disk outside the index."""

    @abstractmethod
    def sync(self) -> None:
        """Make what `store` wrote survive a power loss."""

    @abstractmethod
    def close(self) -> None: ...


class SlabValues(PageValues):
    """Location = slot of the slab file.

    Slots freed by a transaction are written to after its commit only, so that a crash leaves slots
    without references, never references to other bytes. A reader may meet a slot that was freed and
    written meanwhile: its checksum tells.
    """

    def __init__(self, folder: Path, layout: KVLayout) -> None:
        super().__init__(layout)
        self._path = folder / SLAB_FILE
        self._slab = SlabFile(self._path, layout)
        self._growth = max(1, GROWTH_BYTES // layout.page_stride)

    def recover(self, index: IndexWriter) -> None:
        """Slots that a crash left without a reference are in the index's sets already; their blocks go back."""
        _, holes = _extents(index)
        tail = holes.last()
        if tail is None:
            tail = _ALL_SLOTS
            holes.add_extent(tail)
        if self._slab.slots < tail.start:
            lost = tail.start - self._slab.slots
            log.warning("%s lacks %d slots: pages in them will be found damaged and removed", self._path, lost)
        self._slab.resize(tail.start)
        for extent in holes:
            self._slab.release(extent)

    def load(self, env: IndexEnvironment, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[PageRecord]:
        with env.view() as view:
            records = leading_records(view.txn, view.databases, keys)
        # The transaction is over: LMDB need not keep old pages while the disk works.
        self._slab.read([record.location for record in records], buffers)
        return records

    def load_one(self, index: IndexWriter, record: PageRecord, buffer: memoryview) -> None:
        self._slab.read([record.location], [buffer])

    def store(self, index: IndexWriter, buffers: Sequence[memoryview], max_pages: int) -> list[int]:
        slots = self._allocate(index, len(buffers), max_pages)
        self._slab.write(slots, buffers)
        return slots

    def free(self, index: IndexWriter, locations: Sequence[int]) -> None:
        free, _ = _extents(index)
        free.add(locations)

    def shrink(self, index: IndexWriter, max_pages: int) -> None:
        free, holes = _extents(index)
        surplus = index.current.backed - max_pages
        for extent in free.take(max(0, surplus)):
            self._slab.release(extent)
            holes.add_extent(extent)
            index.current.backed -= len(extent)

    def clear(self, index: IndexWriter) -> None:
        _, holes = _extents(index)
        holes.add_extent(_ALL_SLOTS)

    def trim(self) -> None:
        self._slab.resize(0)

    def flip_byte(self, index: IndexWriter, location: int) -> None:
        page = memoryview(bytearray(self._layout.page_stride))
        self._slab.read([location], [page])
        page[self._layout.page_bytes // 2] ^= 0xFF
        self._slab.write([location], [page])

    @property
    def allocated_bytes(self) -> int:
        return self._slab.allocated_bytes

    def sync(self) -> None:
        self._slab.sync()

    def close(self) -> None:
        self._slab.close()

    def _allocate(self, index: IndexWriter, count: int, max_pages: int) -> list[int]:
        free, holes = _extents(index)
        short = count - (index.current.backed - index.pages)
        if short > 0:
            for extent in holes.take(min(max(short, self._growth), max_pages - index.current.backed)):
                self._slab.reserve(extent)
                free.add_extent(extent)
                index.current.backed += len(extent)
        slots = [slot for extent in free.take(count) for slot in extent]
        if len(slots) < count:
            raise StoreUnavailableError(f"{count} slots should be free and {len(slots)} are: the index is damaged")
        return slots


class InlineValues(PageValues):
    """Location = key in the `values` database. Simple, and slower than a slab: every page is copied by LMDB."""

    def recover(self, index: IndexWriter) -> None:
        """Nothing: values and index are one transaction."""

    def load(self, env: IndexEnvironment, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[PageRecord]:
        with env.buffers() as txn:
            records = leading_records(txn, env.databases, keys)
            for record, buffer in zip(records, buffers):
                value = txn.get(_LOCATION.pack(record.location), b"", db=env.databases.values)
                buffer[: len(value)] = value
        return records

    def load_one(self, index: IndexWriter, record: PageRecord, buffer: memoryview) -> None:
        value = index.txn.get(_LOCATION.pack(record.location), b"", db=index.databases.values)
        buffer[: len(value)] = value

    def store(self, index: IndexWriter, buffers: Sequence[memoryview], max_pages: int) -> list[int]:
        locations = index.take_numbers(len(buffers))
        for location, buffer in zip(locations, buffers):
            value = buffer[: self._layout.page_bytes]
            index.txn.put(_LOCATION.pack(location), value, append=True, db=index.databases.values)
        return list(locations)

    def free(self, index: IndexWriter, locations: Sequence[int]) -> None:
        for location in locations:
            index.txn.delete(_LOCATION.pack(location), db=index.databases.values)

    def shrink(self, index: IndexWriter, max_pages: int) -> None:
        """Nothing: LMDB keeps the room of deleted values for new ones, its file never shrinks."""

    def clear(self, index: IndexWriter) -> None:
        """Nothing: the values were cleared with the index."""

    def trim(self) -> None:
        """Nothing, as in `shrink`."""

    def flip_byte(self, index: IndexWriter, location: int) -> None:
        value = bytearray(index.txn.get(_LOCATION.pack(location), b"", db=index.databases.values))
        value[len(value) // 2] ^= 0xFF
        index.txn.put(_LOCATION.pack(location), value, db=index.databases.values)

    @property
    def allocated_bytes(self) -> int:
        return 0

    def sync(self) -> None:
        """Nothing: the commit does it."""

    def close(self) -> None:
        """Nothing is open."""


def _extents(index: IndexWriter) -> tuple[ExtentSet, ExtentSet]:
    """Slots with blocks and without a page, slots without blocks."""
    return ExtentSet(index.txn, index.databases.free), ExtentSet(index.txn, index.databases.holes)
