"""Making the files of a store as small as what they hold. Nobody may have the store open meanwhile.

Pages at the end of a slab are copied to holes before it. A page's record leads to its copy in the same transaction
that frees the old slot, whose blocks are given back in the next one: whenever the process ends, each record leads to
a slot that holds its page. Then the index is written anew beside the old one, which it replaces as a whole.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hicache.errors import StoreCorruptError, StoreUnavailableError
from hicache.storage_backends.budget import Budget
from hicache.storage_backends.lmdb_env import DATA_FILE, storage_errors
from hicache.storage_backends.lmdb_index import IndexView, IndexWriter
from hicache.storage_backends.lmdb_open import StoreFolder, is_slab, slab_name
from hicache.storage_backends.lmdb_opening import begin_store, require_store, with_own_budget
from hicache.storage_backends.lmdb_rewrite import rewrite_index
from hicache.storage_backends.lmdb_schema import PageRecord, slab_of, slot_location, slot_of
from hicache.storage_backends.lmdb_slots import ExtentSet
from hicache.storage_backends.lmdb_store import Store
from hicache.storage_backends.slab import SlabFile

COPY_BYTES = 32 << 20
"""Bytes copied in one transaction. So much is on disk twice meanwhile."""

NOTED_PAGES = 1 << 18
"""Pages that are looked up at a time, in about 100 bytes of memory each."""


@dataclass(frozen=True)
class FileSizes:
    """Bytes that a file takes on disk."""

    before: int
    after: int


@dataclass(frozen=True)
class Compacted:
    """`moved`: pages that were copied to another slot."""

    moved: int
    files: dict[str, FileSizes]


def compact(path: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Compacted:
    """Compact the store in `path`. `progress` gets the pages that were moved and those to be moved.

    What `progress` raises ends it between two steps. Raises ConfigError if there is no store, StoreUnavailableError
    if it is open elsewhere (`busy`) or the disk is full, StoreCorruptError, with nothing changed, if it is damaged.
    """
    with _alone(path, "compacted") as folder, storage_errors(f"store {folder.path}"):
        before = _sizes(folder.path)
        folder.check()
        map_bytes, moved = _gather(folder, progress)
        rewrite_index(folder.path)
        os.truncate(folder.path / DATA_FILE, map_bytes)
        folder.end_session()
        after = _sizes(folder.path)
    files = {name: FileSizes(before.get(name, 0), after.get(name, 0)) for name in sorted(before.keys() | after.keys())}
    return Compacted(moved, files)


@dataclass(frozen=True)
class Shrunk:
    """Pages before and after, and the budget that the store has now."""

    before: int
    after: int
    budget_bytes: int


def shrink(path: Path, budget_bytes: int) -> Shrunk:
    """Give the store in `path` another budget and evict what has no room in it, as `compact` alone and with its errors.

    Raises ConfigError, with nothing changed, if the budget is too small for a store.
    """
    with _alone(path, "shrunk") as folder, storage_errors(f"store {folder.path}"):
        folder.check()
        store = with_own_budget(folder, "batch")
        before, plan = _pages(store), replace(store.plan, budget_bytes=budget_bytes)
        _close(store)
        plan.split()
        store = begin_store(folder, plan, "batch", time.time, shrink=True)
        try:
            after = _pages(store)
            store.values.sync()
            store.env.sync()
        finally:
            _close(store)
        folder.end_session()
    return Shrunk(before, after, budget_bytes)


def _pages(store: Store) -> int:
    return store.view(lambda view: sum(space.pages for space in view.spaces().values()))


def _close(store: Store) -> None:
    store.values.close()
    store.env.close()


@contextmanager
def _alone(path: Path, what: str) -> Iterator[StoreFolder]:
    require_store(path)
    folder = StoreFolder(path)
    try:
        if not folder.try_alone():
            raise StoreUnavailableError(
                f"the store in {path} is open in another process: end that first, a store is {what} alone", "busy"
            )
        yield folder
    finally:
        folder.release()


def _sizes(path: Path) -> dict[str, int]:
    files = [entry for entry in os.scandir(path) if entry.name == DATA_FILE or is_slab(entry.name)]
    return {entry.name: entry.stat().st_blocks * 512 for entry in files}


def _gather(folder: StoreFolder, progress: Callable[[int, int], None]) -> tuple[int, int]:
    """Move the pages of each slab to its beginning; returns the size of the map and the number of moved pages."""
    store = with_own_budget(folder, "always")
    try:
        state = store.view(lambda view: view.state())
        store.take_up(Budget(state.map_bytes, state.data_bytes))
        store.change(store.values.release)
        moved = _move_all(store, progress)
        store.values.sync()
        return store.env.map_bytes, moved
    finally:
        _close(store)


def _move_all(store: Store, progress: Callable[[int, int], None]) -> int:
    slabs = store.view(lambda view: view.slabs())
    total = sum(store.view(_Slab(store, size).count_movers) for size in slabs)
    moved = 0
    for slot_bytes in slabs:
        slab = _Slab(store, slot_bytes)
        try:
            for count in slab.move():
                moved += count
                progress(moved, total)
        finally:
            slab.file.close()
    return moved


class _Slab:
    """One slab in which every slot that has blocks holds a page, being made so that these slots come first."""

    def __init__(self, store: Store, slot_bytes: int) -> None:
        self.file = SlabFile(store.folder.path / slab_name(slot_bytes), slot_bytes)
        self._store = store
        self._slot_bytes = slot_bytes
        self._batch = max(1, COPY_BYTES // slot_bytes)
        self._arena = memoryview(mmap.mmap(-1, self._batch * slot_bytes))
        self._end = store.view(lambda view: view.slab(slot_bytes).used)

    def move(self) -> Iterator[int]:
        """Yields how many pages each step moved."""
        while keys := self._store.view(self._movers):
            for start in range(0, len(keys), self._batch):
                batch = keys[start : start + self._batch]
                self._store.change(lambda index: self._copy(index, batch))  # noqa: B023 - called at once
                self._store.change(self._store.values.release)
                yield len(batch)

    def count_movers(self, view: IndexView) -> int:
        return sum(1 for _ in self._beyond(view))

    def _movers(self, view: IndexView) -> list[bytes]:
        """Keys of some pages that lie beyond the end to be, in the order of their slots."""
        found = []
        for slot, key in self._beyond(view):
            found.append((slot, key))
            if len(found) == NOTED_PAGES:
                break
        return [key for _, key in sorted(found)]

    def _beyond(self, view: IndexView) -> Iterator[tuple[int, bytes]]:
        first = slot_location(self._slot_bytes, self._end)
        for key, raw in view.txn.cursor(view.databases.pages):
            location = PageRecord.unpack(key, raw).location
            if location >= first and slab_of(location) == self._slot_bytes:
                yield slot_of(location), key

    def _copy(self, index: IndexWriter, keys: Sequence[bytes]) -> None:
        holes = ExtentSet(index.txn, index.databases.holes, self._slot_bytes)
        free = ExtentSet(index.txn, index.databases.free, self._slot_bytes)
        records = {key: record for key in keys if (record := index.record(key)) is not None}
        targets = self._take_holes(index, holes, len(records))
        places = [self._arena[at : at + self._slot_bytes] for at in range(0, self._arena.nbytes, self._slot_bytes)]
        old = [slot_of(record.location) for record in records.values()]
        self.file.read(old, places[: len(old)])
        self.file.write(targets, places[: len(old)])
        self.file.sync()
        for (key, record), slot in zip(records.items(), targets):
            moved = record._replace(location=slot_location(self._slot_bytes, slot))
            index.txn.put(key, moved.pack(key), db=index.databases.pages)
        free.add(old)

    def _take_holes(self, index: IndexWriter, holes: ExtentSet, count: int) -> list[int]:
        """Give blocks to the first slots that have none."""
        slots: list[int] = []
        while len(slots) < count:
            extent = next(iter(holes))[: count - len(slots)]
            holes.discard(extent)
            self.file.reserve(extent)
            slots += extent
        if slots and slots[-1] >= self._end:
            raise StoreCorruptError(f"the slab of {self._slot_bytes} bytes has fewer holes than pages beyond its end")
        slab = index.slab(self._slot_bytes)
        slab.backed += count
        index.current.backed_bytes += count * self._slot_bytes
        return slots
