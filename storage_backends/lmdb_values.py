"""Where the pages' bytes lie: in slab files beside the index, or in the index itself."""

from __future__ import annotations

import logging
import mmap
import struct
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, TypeAlias

from hicache.errors import StoreCorruptError
from hicache.storage_backends.checksums import page_checksum
from hicache.storage_backends.lmdb_env import IndexEnvironment
from hicache.storage_backends.lmdb_index import IndexView, IndexWriter
from hicache.storage_backends.lmdb_open import is_slab, slab_name
from hicache.storage_backends.lmdb_schema import Encoded, PageRecord, slab_of, slot_location, slot_of
from hicache.storage_backends.lmdb_slots import ALL_SLOTS, ExtentSet
from hicache.storage_backends.read_ahead import Piece, read_ahead
from hicache.storage_backends.slab import SlabFile

_LOCATION = struct.Struct(">Q")

GROWTH_BYTES = 64 << 20
"""A slab grows by this much at a time, so that its file has few extents."""

BESIDE_BYTES = 1 << 20
"""From so many bytes on, a write is worth a thread: meanwhile its checksums are computed."""

Find: TypeAlias = Callable[[IndexView], list[PageRecord]]

Place: TypeAlias = Callable[[Sequence[PageRecord]], Sequence[memoryview]]
"""Where the bytes of these pages are to be read to, each of at least its `length` bytes, best of its whole slot."""

Check: TypeAlias = Callable[[int, PageRecord, memoryview], bool]
"""Whether the page at this position, with its record, is whole: its bytes, if they could be read, are at its place."""


class Loaded(NamedTuple):
    """Leading pages that were found, and how many leading ones of them passed their check."""

    records: list[PageRecord]
    whole: int


log = logging.getLogger(__name__)


class PageValues(ABC):
    """Bytes of pages by location. Whatever takes an `index` is part of that transaction."""

    @abstractmethod
    def load(self, env: IndexEnvironment, find: Find, place: Place, check: Check) -> Loaded:
        """Read the pages that `find` finds to where `place` wants them, and `check` each in turn, perhaps while
        others are being read. The first that does not pass is the last that is looked at: behind it is garbage.
        """

    @abstractmethod
    def read(self, env: IndexEnvironment, records: Sequence[PageRecord], places: Sequence[memoryview]) -> None:
        """Read pages from where their records say, to `places`. Nothing is verified yet, and the place of a page that
        cannot be read whole keeps garbage."""

    @abstractmethod
    def load_one(self, index: IndexView, record: PageRecord) -> memoryview:
        """The bytes of one page. Nothing is verified yet."""

    @abstractmethod
    def storing(self, index: IndexWriter, pages: Sequence[Encoded]) -> AbstractContextManager[list[int]]:
        """Write pages, also while the caller does something else within the context, which gives their locations.

        At its end they are written. The caller has seen to it that there is room.
        """

    @abstractmethod
    def free(self, index: IndexWriter, records: Sequence[PageRecord]) -> None:
        """Forget pages; their room is for transactions after this one."""

    @abstractmethod
    def free_all(self, index: IndexWriter) -> None:
        """As `free` for all pages, which have been dropped."""

    @abstractmethod
    def recover(self, index: IndexWriter) -> None:
        """Take up what an earlier process left. To be called with the store alone."""

    @abstractmethod
    def shrink(self, index: IndexWriter) -> None:
        """Give back what is held on disk beyond the store's limit, after pages have been evicted."""

    @abstractmethod
    def release(self, index: IndexWriter) -> None:
        """Give all bytes back that hold no page, after pages have been removed and that has been committed."""

    @abstractmethod
    def flip_byte(self, index: IndexWriter, record: PageRecord) -> None:
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

    def is_whole(self, index: IndexView, key: bytes, record: PageRecord) -> bool:
        """Does a page match its checksum? Within a write transaction no writer can move it meanwhile."""
        data = self.load_one(index, record)
        return len(data) == record.length and page_checksum(key, data) == record.checksum


class SlabValues(PageValues):
    """Location = slab and slot. There is a slab for each slot size.

    Slots freed by a transaction are written to after its commit only, so that a crash leaves slots
    without references, never references to other bytes. A reader may meet a slot that was freed and
    written meanwhile: its checksum tells.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._slabs: dict[int, SlabFile] = {}
        self._opening = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "slab-writer")  # begins its thread with the first large write

    def load(self, env: IndexEnvironment, find: Find, place: Place, check: Check) -> Loaded:
        with env.view() as view:
            records = find(view)
        # The transaction is over: LMDB need not keep old pages while the disk works.
        places = place(records)

        def read(piece: Piece) -> None:
            self.read(env, records[piece], places[piece])

        whole = 0
        with closing(read_ahead([slab_of(record.location) for record in records], read)) as pieces:
            for piece in pieces:
                whole += _whole(records[piece], places[piece], check, piece.start)
                if whole < piece.stop:
                    break
        return Loaded(records, whole)

    def read(self, env: IndexEnvironment, records: Sequence[PageRecord], places: Sequence[memoryview]) -> None:
        for slot_bytes, numbers in _by_slab([record.location for record in records]):
            if slot_bytes not in self._slabs and not self.path_of(slot_bytes).exists():
                continue  # opening it would create it
            slots = [slot_of(records[number].location) for number in numbers]
            self._slab(slot_bytes).read(slots, [places[number] for number in numbers])

    def path_of(self, slot_bytes: int) -> Path:
        """File of the slab with slots of that size."""
        return self._folder / slab_name(slot_bytes)

    def load_one(self, index: IndexView, record: PageRecord) -> memoryview:
        slot_bytes = slab_of(record.location)
        page = memoryview(mmap.mmap(-1, slot_bytes))
        self._slab(slot_bytes).read([slot_of(record.location)], [page])
        return page[: record.length]

    @contextmanager
    def storing(self, index: IndexWriter, pages: Sequence[Encoded]) -> Iterator[list[int]]:
        locations = [0] * len(pages)
        by_size: defaultdict[int, list[int]] = defaultdict(list)
        for number, page in enumerate(pages):
            by_size[page.slot_bytes].append(number)
        writes = []
        for slot_bytes, numbers in by_size.items():
            slots = self._allocate(index, slot_bytes, len(numbers))
            buffers = [pages[number].buffer for number in numbers]
            writes.append(partial(self._slab(slot_bytes).write, slots, buffers))
            for number, slot in zip(numbers, slots):
                locations[number] = slot_location(slot_bytes, slot)
        with self._beside(writes, sum(page.slot_bytes for page in pages)):
            yield locations

    @contextmanager
    def _beside(self, writes: Sequence[Callable[[], None]], nbytes: int) -> Iterator[None]:
        """Make writes in a thread of their own, if they are large enough to be worth it."""
        if nbytes < BESIDE_BYTES:
            for write in writes:
                write()
            yield
            return
        futures = [self._writer.submit(write) for write in writes]
        try:
            yield
        finally:
            wait(futures)
        for future in futures:
            future.result()

    def free(self, index: IndexWriter, records: Sequence[PageRecord]) -> None:
        by_size: defaultdict[int, list[int]] = defaultdict(list)
        for record in records:
            by_size[slab_of(record.location)].append(slot_of(record.location))
        for slot_bytes, slots in by_size.items():
            ExtentSet(index.txn, index.databases.free, slot_bytes).add(slots)
            index.slab(slot_bytes).used -= len(slots)

    def free_all(self, index: IndexWriter) -> None:
        index.txn.drop(index.databases.free, delete=False)
        for slot_bytes in index.slabs():
            free, holes = _extents(index, slot_bytes)
            start = 0
            for hole in holes:
                if start < hole.start:
                    free.add_extent(range(start, hole.start))
                start = hole.stop
            index.slab(slot_bytes).used = 0

    def recover(self, index: IndexWriter) -> None:
        """Slots that a crash left without a reference are in the index's sets already; their blocks go back."""
        known = index.slabs()
        for path in self._slab_files():
            if path.name not in {slab_name(slot_bytes) for slot_bytes in known}:
                path.unlink()  # of a transaction that was not committed
        for slot_bytes in known:
            self._recover_slab(index, slot_bytes)

    def shrink(self, index: IndexWriter) -> None:
        self._release_free(index, index.current.backed_bytes - index.current.data_bytes)

    def release(self, index: IndexWriter) -> None:
        self._release_free(index, index.current.backed_bytes)
        for slot_bytes in index.slabs():
            tail = _extents(index, slot_bytes)[1].last()
            if tail is not None:
                self._slab(slot_bytes).resize(tail.start)

    def flip_byte(self, index: IndexWriter, record: PageRecord) -> None:
        slot_bytes, slot = slab_of(record.location), slot_of(record.location)
        page = memoryview(mmap.mmap(-1, slot_bytes))
        self._slab(slot_bytes).read([slot], [page])
        page[record.length // 2] ^= 0xFF
        self._slab(slot_bytes).write([slot], [page])

    @property
    def allocated_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self._slab_files())

    def sync(self) -> None:
        for slab in list(self._slabs.values()):
            slab.sync()

    def close(self) -> None:
        self._writer.shutdown()
        for slab in self._slabs.values():
            slab.close()
        self._slabs.clear()

    def _slab_files(self) -> list[Path]:
        return [path for path in self._folder.iterdir() if is_slab(path.name)]

    # ---- slots --------------------------------------------------------------------------------

    def _slab(self, slot_bytes: int) -> SlabFile:
        with self._opening:
            if slot_bytes not in self._slabs:
                self._slabs[slot_bytes] = SlabFile(self.path_of(slot_bytes), slot_bytes)
            slab = self._slabs[slot_bytes]
        slab.check_in_place()
        return slab

    def _allocate(self, index: IndexWriter, slot_bytes: int, count: int) -> list[int]:
        free, _ = _extents(index, slot_bytes)
        slab = index.slab(slot_bytes)
        short = count - (slab.backed - slab.used)
        if short > 0:
            self._grow(index, slot_bytes, short)
        slots = [slot for extent in free.take(count) for slot in extent]
        if len(slots) < count:
            raise StoreCorruptError(f"{count} slots of {slot_bytes} bytes should be free and {len(slots)} are")
        slab.used += count
        return slots

    def _grow(self, index: IndexWriter, slot_bytes: int, short: int) -> None:
        """Back `short` slots or more with blocks, at the expense of free slots of other slabs where need be."""
        state, slab = index.current, index.slab(slot_bytes)
        free, holes = _extents(index, slot_bytes)
        if not slab.backed and holes.last() is None:
            holes.add_extent(ALL_SLOTS)
        room = (state.data_bytes - state.backed_bytes) // slot_bytes
        if room < short:
            self._release_free(index, short * slot_bytes - (state.data_bytes - state.backed_bytes), spare=slot_bytes)
            room = short
        for extent in holes.take(min(max(short, GROWTH_BYTES // slot_bytes), room)):
            self._slab(slot_bytes).reserve(extent)
            free.add_extent(extent)
            slab.backed += len(extent)
            state.backed_bytes += len(extent) * slot_bytes

    def _release_free(self, index: IndexWriter, nbytes: int, spare: int = 0) -> None:
        """Give blocks of free slots back, `nbytes` bytes of them if there are so many, but none of the slab `spare`."""
        for slot_bytes in reversed(index.slabs()):
            if nbytes <= 0:
                return
            if slot_bytes == spare:
                continue
            free, holes = _extents(index, slot_bytes)
            for extent in free.take(-(-nbytes // slot_bytes)):
                self._slab(slot_bytes).release(extent)
                holes.add_extent(extent)
                index.slab(slot_bytes).backed -= len(extent)
                index.current.backed_bytes -= len(extent) * slot_bytes
                nbytes -= len(extent) * slot_bytes

    def _recover_slab(self, index: IndexWriter, slot_bytes: int) -> None:
        _, holes = _extents(index, slot_bytes)
        tail = holes.last()
        if tail is None or tail.stop != ALL_SLOTS.stop:
            raise StoreCorruptError(f"the slots of {slot_bytes} bytes have no end")
        slab = self._slab(slot_bytes)
        if slab.slots < tail.start:
            lost = tail.start - slab.slots
            log.warning("%s was %d slots longer: pages in these, if any, will be found damaged", slab.path, lost)
        slab.resize(tail.start)
        for extent in holes:
            slab.release(extent)


class InlineValues(PageValues):
    """Location = key in the `values` database. Simple, and slower than a slab: every page is copied by LMDB."""

    def load(self, env: IndexEnvironment, find: Find, place: Place, check: Check) -> Loaded:
        with env.view(buffers=True) as view:
            records = find(view)
            places = place(records)
            _copy_values(view, records, places)
        return Loaded(records, _whole(records, places, check, 0))

    def read(self, env: IndexEnvironment, records: Sequence[PageRecord], places: Sequence[memoryview]) -> None:
        with env.view(buffers=True) as view:
            _copy_values(view, records, places)

    def load_one(self, index: IndexView, record: PageRecord) -> memoryview:
        return memoryview(index.txn.get(_LOCATION.pack(record.location), b"", db=index.databases.values))

    @contextmanager
    def storing(self, index: IndexWriter, pages: Sequence[Encoded]) -> Iterator[list[int]]:
        first = index.current.values
        index.current.values += len(pages)
        for location, page in enumerate(pages, first):
            value = page.buffer[: page.length]
            index.txn.put(_LOCATION.pack(location), value, append=True, db=index.databases.values)
        yield list(range(first, first + len(pages)))

    def free(self, index: IndexWriter, records: Sequence[PageRecord]) -> None:
        for record in records:
            index.txn.delete(_LOCATION.pack(record.location), db=index.databases.values)

    def free_all(self, index: IndexWriter) -> None:
        """Nothing: the values were dropped with the pages."""

    def recover(self, index: IndexWriter) -> None:
        """Nothing: values and index are one transaction."""

    def shrink(self, index: IndexWriter) -> None:
        """Nothing: LMDB keeps the room of deleted values for new ones, its file never shrinks."""

    def release(self, index: IndexWriter) -> None:
        """Nothing, as in `shrink`."""

    def flip_byte(self, index: IndexWriter, record: PageRecord) -> None:
        value = bytearray(self.load_one(index, record))
        value[len(value) // 2] ^= 0xFF
        index.txn.put(_LOCATION.pack(record.location), value, db=index.databases.values)

    @property
    def allocated_bytes(self) -> int:
        return 0

    def sync(self) -> None:
        """Nothing: the commit does it."""

    def close(self) -> None:
        """Nothing is open."""


def value_location(key: bytes) -> int:
    """Location of the page whose bytes lie under this key of `values`."""
    return int(_LOCATION.unpack(key)[0])


def _whole(records: Sequence[PageRecord], places: Sequence[memoryview], check: Check, first: int) -> int:
    """How many leading pages, which begin at position `first`, pass their check."""
    pages = enumerate(zip(records, places), first)
    return sum(1 for _ in takewhile(lambda page: check(page[0], *page[1]), pages))


def _copy_values(view: IndexView, records: Sequence[PageRecord], places: Sequence[memoryview]) -> None:
    for record, target in zip(records, places):
        value = view.txn.get(_LOCATION.pack(record.location), b"", db=view.databases.values)
        if len(value) == record.length:
            target[: len(value)] = value


def _extents(index: IndexView, slot_bytes: int) -> tuple[ExtentSet, ExtentSet]:
    """Slots with blocks and without a page, slots without blocks."""
    databases = index.databases
    return ExtentSet(index.txn, databases.free, slot_bytes), ExtentSet(index.txn, databases.holes, slot_bytes)


def _by_slab(locations: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Positions in `locations` by the slot size of their slab."""
    by_size: defaultdict[int, list[int]] = defaultdict(list)
    for number, location in enumerate(locations):
        by_size[slab_of(location)].append(number)
    yield from by_size.items()
