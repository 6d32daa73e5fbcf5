"""Reading every page of a store and checking it, in the order in which the pages lie on disk.

Works beside engines that use the store: the index is looked at in snapshots of a moment, so that LMDB can reuse what
they free, and a page that was moved or removed meanwhile is not damaged.
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from hicache.layout import round_up
from hicache.storage_backends.checksums import page_checksum
from hicache.storage_backends.lmdb_audit import audit
from hicache.storage_backends.lmdb_damage import walk_index
from hicache.storage_backends.lmdb_index import IndexView
from hicache.storage_backends.lmdb_open import StoreFolder
from hicache.storage_backends.lmdb_schema import BLOCK_BYTES, PageRecord
from hicache.storage_backends.lmdb_store import Store

READ_BYTES = 32 << 20
"""Bytes read at a time."""

SORTED_PAGES = 1 << 19
"""Pages whose places are sorted at a time, in 40 bytes of memory each: more pages take more passes over the index."""

SNAPSHOT_PAGES = 4096
"""Records looked at in one snapshot."""

PAGES_BESIDE_OTHERS = 20_000

ATTEMPTS = 5
"""A page that is moved again and again is looked at so often."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the pages and the bytes that have been dealt with. What it raises ends the work in good order."""

_PLACE = np.dtype([("location", "<u8"), ("key", "V32")])
_PACKED = struct.Struct("<Q32s")
_LOCATION_AT = 8  # in a record
_LOCATION = struct.Struct("<Q")

_Places = npt.NDArray[np.void]

Page = TypeVar("Page")


@dataclass
class PagesChecked:
    """`damaged`: pages by namespace. `removed`: damaged ones and those below them."""

    pages: int = 0
    nbytes: int = 0
    damaged: Counter[int] = field(default_factory=Counter)
    removed: int = 0


def check_structure(path: Path) -> bool:
    """Walk LMDB's own pages; False if that cannot be done now, because the store is open elsewhere.

    Nobody gets the store meanwhile. Raises StoreCorruptError if they do not hang together.
    """
    folder = StoreFolder(path)
    try:
        if not folder.try_alone():
            return False
        walk_index(path)
        return True
    finally:
        folder.release()


def check_records(store: Store) -> list[str] | None:
    """What does not agree in the index, in words; None if that cannot be looked at now.

    It takes one snapshot, some 15 µs a page long. LMDB cannot reuse what that may see, which would fill up the map of
    an engine that writes: beside others, only a store with few pages is looked at.
    """
    pages = sum(space.pages for space in store.view(lambda view: view.spaces()).values())
    return audit(store) if store.found_alone or pages <= PAGES_BESIDE_OTHERS else None


def check_pages(store: Store, progress: Progress = lambda pages, nbytes: None, remove: bool = False) -> PagesChecked:
    """Read every page and compare its checksum; `remove` takes damaged pages out with what is below them.

    Pages that are written meanwhile may be left out. Takes about 64 MiB of memory. Raises StoreCorruptError if a
    record of the index is damaged, StoreUnavailableError if the disk cannot be read.
    """
    reader, done = PageReader(), PagesChecked()
    for keys in _in_place_order(store):
        for batch in batches(_records(store, keys), lambda page: page[1].slot_bytes):
            _check(store, reader, batch, done, remove)
            progress(done.pages, done.nbytes)
    return done


class PageReader:
    """Reads pages into memory of its own, which the next read uses again."""

    def __init__(self) -> None:
        self._arena = memoryview(b"")

    def read(self, store: Store, records: Sequence[PageRecord]) -> list[memoryview]:
        """The bytes of pages as they lie at their places; nothing is verified."""
        places = self.places(records)
        store.read(records, places)
        return [place[: record.length] for record, place in zip(records, places)]

    def places(self, records: Sequence[PageRecord]) -> list[memoryview]:
        """Aligned memory for pages."""
        sizes = [round_up(record.slot_bytes, BLOCK_BYTES) for record in records]
        if self._arena.nbytes < sum(sizes):
            self._arena = memoryview(mmap.mmap(-1, max(READ_BYTES, sum(sizes))))
        places, start = [], 0
        for size, record in zip(sizes, records):
            places.append(self._arena[start : start + record.slot_bytes])
            start += size
        return places


def read_settled(store: Store, reader: PageReader, key: bytes) -> tuple[PageRecord, memoryview | None] | None:
    """The record of a page and its bytes, None in place of those if they are damaged; None for a page that is gone.

    For pages whose first read failed: the read counts only if the record has stayed the same meanwhile.
    """
    record = store.view(lambda view: view.record(key))
    for _ in range(ATTEMPTS):
        if record is None:
            return None
        (data,) = reader.read(store, [record])
        if page_checksum(key, data) == record.checksum:
            return record, data
        before, record = record, store.view(lambda view: view.record(key))
        if record == before:
            return before, None
    return None


# ---- the order of the disk ----------------------------------------------------------------------


def _in_place_order(store: Store) -> Iterator[Sequence[bytes]]:
    """All keys, those of pages that lie beside each other together."""
    pages = sum(space.pages for space in store.view(lambda view: view.spaces()).values())
    bounds = _bounds(store, pages) if pages > SORTED_PAGES else []
    for first, end in zip([0, *bounds], [*bounds, 1 << 64]):
        places = _places(store, lambda location: first <= location < end)  # noqa: B023 - called at once
        keys = places["key"][np.argsort(places["location"], kind="stable")]
        for start in range(0, len(keys), SNAPSHOT_PAGES):
            yield [bytes(key) for key in keys[start : start + SNAPSHOT_PAGES]]


def _bounds(store: Store, pages: int) -> list[int]:
    """Locations that part the pages into parts of about SORTED_PAGES, by a sample of them."""
    parts = -(-pages // SORTED_PAGES) + 1
    locations = np.sort(_places(store, lambda location: True, step=max(1, pages // (1024 * parts)))["location"])
    return [int(locations[len(locations) * part // parts]) for part in range(1, parts)] if len(locations) else []


def _places(store: Store, wanted: Callable[[int], bool], step: int = 1) -> _Places:
    """Where the pages lie, in the order of their keys: of those `step` apart, the wanted ones."""
    found, after, number = bytearray(), b"", 0
    while part := store.view(lambda view: _part(view, after)):  # noqa: B023 - called at once
        for key, location in part:
            if not number % step and wanted(location):
                found += _PACKED.pack(location, key)
            number += 1
        after = part[-1][0] + b"\0"
    return np.frombuffer(found, _PLACE)


def _part(view: IndexView, after: bytes) -> list[tuple[bytes, int]]:
    """Some keys from `after` on, and their locations."""
    cursor = view.txn.cursor(view.databases.pages)
    if not cursor.set_range(after):
        return []
    found = []
    for key, raw in cursor:
        found.append((bytes(key), _LOCATION.unpack_from(raw, _LOCATION_AT)[0]))
        if len(found) == SNAPSHOT_PAGES:
            break
    return found


# ---- checking -----------------------------------------------------------------------------------


def _records(store: Store, keys: Sequence[bytes]) -> list[tuple[bytes, PageRecord]]:
    """Records of those pages that are still there, in the order of the disk."""

    def find(view: IndexView) -> list[tuple[bytes, PageRecord]]:
        return [(key, record) for key in keys if (record := view.record(key)) is not None]

    return sorted(store.view(find), key=lambda page: page[1].location)


def batches(pages: Sequence[Page], size: Callable[[Page], int]) -> Iterator[Sequence[Page]]:
    """Consecutive pages of at most READ_BYTES bytes, or one page, in each; `size` tells the bytes of one."""
    start = total = 0
    for number, page in enumerate(pages):
        if number > start and total + size(page) > READ_BYTES:
            yield pages[start:number]
            start, total = number, 0
        total += size(page)
    if start < len(pages):
        yield pages[start:]


def _check(
    store: Store, reader: PageReader, batch: Sequence[tuple[bytes, PageRecord]], done: PagesChecked, remove: bool
) -> None:
    records = [record for _, record in batch]
    pages = zip(batch, reader.read(store, records))
    suspects = [key for (key, record), data in pages if page_checksum(key, data) != record.checksum]
    for key in suspects:
        found = read_settled(store, reader, key)
        if found is not None and found[1] is None:
            done.damaged[found[0].space] += 1
            done.removed += store.remove_damaged(key) if remove else 0
    done.pages += len(batch)
    done.nbytes += sum(record.length for record in records)
