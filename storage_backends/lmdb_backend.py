"""The disk tier: an LMDB index with the pages in a slab beside it, within a hard budget of bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar, get_args

import lmdb

from hicache.errors import ConfigError, StorageError, StoreUnavailableError
from hicache.hashing import StoreIdentity
from hicache.storage_backends.base import PageRun, StorageBackend, StorageUsage, check_buffers
from hicache.storage_backends.budget import Budget, inline_budget, slab_budget
from hicache.storage_backends.checksums import page_checksum
from hicache.storage_backends.gate import CallGate
from hicache.storage_backends.lmdb_env import Durability, storage_errors
from hicache.storage_backends.lmdb_index import IndexWriter
from hicache.storage_backends.lmdb_open import StoreFolder, store_identity
from hicache.storage_backends.lmdb_values import InlineValues, SlabValues
from hicache.storage_backends.recency import RecentKeys

ValuesMode: TypeAlias = Literal["slab", "inline"]

MAX_SETBACKS = 8
"""How often the map of an open store is enlarged at the expense of its pages."""

READ_ATTEMPTS = 3
"""A read that met a page being replaced goes on from there, this often."""

log = logging.getLogger(__name__)

T = TypeVar("T")


class LmdbBackend(StorageBackend):
    """A store in the folder `path`, which is created. One instance per folder and process.

    `budget_bytes` bounds what index and slab take on disk, as the file system counts it, at all
    times; the least recently used pages go first, children before parents. Pages survive a killed
    process as soon as `write` has returned; `durability` says what a power loss may take.

    Raises ConfigError for a path or a budget that cannot be used and StoreIdentityError, with the
    store left as it is, if it holds pages of another identity. A damaged store is set aside as
    PATH.damaged-N and a new one begun.
    """

    def __init__(
        self,
        path: Path | str,
        identity: StoreIdentity,
        budget_bytes: int,
        values: ValuesMode = "slab",
        durability: Durability = "batch",
    ) -> None:
        _check_choice("values", values, get_args(ValuesMode))
        _check_choice("durability", durability, get_args(Durability))
        self._layout = identity.layout
        self._budget_bytes = budget_bytes
        self._inline = values == "inline"
        self._durability = durability
        self._setbacks = 0
        self._damaged_pages = 0
        self._recent = RecentKeys()
        self._name = f"store {path}"
        self._split(0)  # refuse a budget before anything is created
        self._folder = StoreFolder(Path(path))
        try:
            self._env, self._budget = self._folder.open_index(store_identity(identity, values), self._split, durability)
        except BaseException:
            self._folder.release()
            raise
        self._gate = CallGate(self._name)
        self._start()

    @property
    def damaged_pages(self) -> int:
        """Pages removed because their bytes did not match their checksum."""
        return self._damaged_pages

    @property
    def generation(self) -> int:
        """Number of times the store has been cleared."""
        with self._reading(), self._env.view() as view:
            return view.state().generation

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        with self._reading(), self._env.view() as view:
            count = view.leading(keys)
        self._recent.note(keys, count)
        return count

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        check_buffers(self._layout, keys, buffers)
        count = 0
        for _ in range(READ_ATTEMPTS):
            with self._reading():
                found, verified = self._values.read(self._env, keys[count:], buffers[count:])
            count += verified
            if verified == found or self._is_lost(keys[count]):
                break
        self._recent.note(keys, count)
        return count

    def write(self, runs: Sequence[PageRun]) -> list[int]:
        for run in runs:
            check_buffers(self._layout, run.keys, run.buffers)
        with self._writing():
            while True:
                budget = self._budget
                self._make_room(runs)
                added, counts = self._transact(lambda index: self._insert(index, runs))
                stuck = not added and budget is self._budget  # a budget that changed may have left no room
                if stuck or counts == [len(run.keys) for run in runs]:
                    return counts

    def delete(self, keys: Sequence[bytes]) -> int:
        with self._writing():
            return self._transact(lambda index: self._delete(index, keys))

    def clear(self) -> int:
        with self._writing():
            count = self._transact(self._clear)
            self._values.trim()
            return count

    def usage(self) -> StorageUsage:
        with self._reading(), self._env.view() as view:
            used = self._env.data_bytes + self._values.allocated_bytes
            return StorageUsage(view.pages, used, self._budget_bytes, view.state().evicted)

    def close(self) -> None:
        with self._gate.closing() as first:
            if first:
                self._finish()

    def flip_byte(self, key: bytes) -> bool:
        """Damage a stored page, for drills; False if it is not stored."""
        with self._writing(), self._env.writer() as index:
            record = index.record(key)
            if record is not None:
                self._values.flip_byte(index, record.location)
            return record is not None

    # ---- opening and closing ------------------------------------------------------------------

    def _start(self) -> None:
        try:
            with storage_errors(self._name):
                self._values = (
                    InlineValues(self._layout) if self._inline else SlabValues(self._folder.path, self._layout)
                )
                self._transact(self._values.recover)
                self._shrink()
        except BaseException:
            self._env.close()
            self._folder.release()
            raise

    def _finish(self) -> None:
        try:
            with storage_errors(self._name):
                self._transact(self._flush_touched)
                if self._durability != "none":
                    self._values.sync()
                    self._env.sync()
        except StorageError as error:
            log.warning("closing: %s", error)
        with self._gate.alone():
            self._env.close()
            self._values.close()
            self._folder.release()

    # ---- reading ------------------------------------------------------------------------------

    def _is_lost(self, key: bytes) -> bool:
        """False if the page that failed its checksum had only been moved by a writer; else it is removed."""
        with self._writing():
            return self._transact(lambda index: self._remove_damaged(index, key))

    def _remove_damaged(self, index: IndexWriter, key: bytes) -> bool:
        record = index.record(key)
        if record is None:
            return True
        if self._values.is_whole(index, key, record):
            return False
        removed = self._delete(index, [key])
        self._damaged_pages += 1
        log.warning("%s: page %s is damaged, removed with %d below it", self._name, key.hex(), removed - 1)
        return True

    # ---- writing ------------------------------------------------------------------------------

    def _make_room(self, runs: Sequence[PageRun]) -> None:
        """Evict in a transaction of its own: a slot is written to only when no entry refers to it any more."""
        with self._env.view() as view:
            new, counts = view.plan(runs, self._budget.chunk_pages)
            excess = view.pages + len(new) - self._budget.max_pages
        for run, count in zip(runs, counts):
            self._recent.note(run.keys, count)
        if excess > 0:
            # Nothing of this call makes room for the rest of it: that would go round in circles.
            keep = _keys_of(runs)
            self._transact(lambda index: self._evict(index, excess, keep))

    def _insert(self, index: IndexWriter, runs: Sequence[PageRun]) -> tuple[int, list[int]]:
        """How many pages were added, and how many leading pages of each run are stored now."""
        self._flush_touched(index)
        room = min(self._budget.chunk_pages, self._budget.max_pages - index.pages)
        pages, counts = index.plan(runs, max(0, room))
        if pages:
            size = self._layout.page_bytes
            checksums = [page_checksum(page.key, page.buffer[:size]) for page in pages]
            locations = self._values.store(index, [page.buffer for page in pages], self._budget.max_pages)
            if self._durability == "always":
                self._values.sync()
            index.insert(pages, locations, checksums)
            # Room for the next batch of this size, so that it needs no transaction of its own to make some.
            excess = index.pages + len(pages) - self._budget.max_pages
            self._values.free(index, index.evict(max(0, excess), _keys_of(runs)))
        return len(pages), counts

    def _delete(self, index: IndexWriter, keys: Sequence[bytes]) -> int:
        locations = [location for key in keys for location in index.remove(key)]
        self._values.free(index, locations)
        return len(locations)

    def _clear(self, index: IndexWriter) -> int:
        count = index.clear()
        self._values.clear(index)
        return count

    def _flush_touched(self, index: IndexWriter) -> None:
        for key in self._recent.take():
            index.touch(key)

    # ---- the budget ---------------------------------------------------------------------------

    def _split(self, used_bytes: int) -> Budget:
        if self._inline:
            return inline_budget(self._budget_bytes, self._layout, used_bytes, self._setbacks)
        return slab_budget(self._budget_bytes, self._layout, used_bytes)

    def _evict(self, index: IndexWriter, count: int, keep: Collection[bytes] = ()) -> None:
        self._flush_touched(index)
        self._values.free(index, index.evict(count, keep))

    def _shrink(self) -> None:
        """Hold no more than the budget allows now."""
        with self._env.view() as view:
            excess = view.pages - self._budget.max_pages
        batch = self._budget.chunk_pages
        for start in range(0, excess, batch):
            self._transact(partial(self._evict, count=min(batch, excess - start)))
        self._transact(lambda index: self._values.shrink(index, self._budget.max_pages))

    def _enlarge_map(self) -> None:
        """Give the map, which is full, some of the room of the pages."""
        self._setbacks += 1
        if self._setbacks > MAX_SETBACKS:
            raise StoreUnavailableError(f"{self._name}: its map of {self._env.map_bytes} bytes is full")
        try:
            self._budget = self._split(self._env.data_bytes if self._inline else self._env.map_bytes)
        except ConfigError as error:
            raise StoreUnavailableError(f"{self._name}: the index finds no room: {error}") from error
        with self._gate.alone():
            self._env.grow(self._budget.map_bytes)
        self._shrink()

    # ---- transactions -------------------------------------------------------------------------

    def _transact(self, action: Callable[[IndexWriter], T]) -> T:
        """Commit what `action` does. It is called again if the map was full: nothing of it had remained."""
        with suppress(lmdb.MapFullError):
            return self._commit(action)
        while True:
            try:
                with self._gate.alone():  # LMDB cannot reuse what a reader may see
                    self._commit(lambda index: None)
                    return self._commit(action)
            except lmdb.MapFullError:
                self._enlarge_map()

    def _commit(self, action: Callable[[IndexWriter], T]) -> T:
        with self._env.writer() as index:
            return action(index)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with storage_errors(self._name), self._gate.reading():
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with storage_errors(self._name), self._gate.writing():
            yield


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{field} is {value!r}, use one of {', '.join(choices)}")


def _keys_of(runs: Sequence[PageRun]) -> set[bytes]:
    """All pages of the runs, and those above them."""
    return {key for run in runs for key in (run.parent, *run.keys) if key is not None}
