"""All that a storage backend promises but the bytes: for those that can put, get and drop a page and no more."""

from __future__ import annotations

import heapq
import threading
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from hicache.errors import ConfigError, StoreUnavailableError
from hicache.hashing import StoreIdentity
from hicache.storage_backends.base import PageRun, StorageBackend, StorageUsage, check_buffers, kept_format
from hicache.storage_backends.checksums import page_checksum


@dataclass
class _Page:
    checksum: int
    parent: bytes | None
    stamp: int
    children: set[bytes] = field(default_factory=set)


class ManagedBackend(StorageBackend):
    """Knows which pages are stored, whose children they are and who goes next; a subclass keeps their bytes.

    Least recently used pages without children go first, so that a page never outlives its parent. Every page
    has a checksum, so that a subclass may return whatever it finds. What is known is lost with the process:
    a subclass begins with no pages. One call at a time reaches the subclass.
    """

    def __init__(self, identity: StoreIdentity, budget_bytes: int) -> None:
        """Raises ConfigError if `budget_bytes` hold no page."""
        self.identity = identity
        self._form = kept_format(identity)
        self._budget_bytes = budget_bytes
        self._max_pages = budget_bytes // self._form.page_bytes
        if self._max_pages < 1:
            raise ConfigError(f"a budget of {budget_bytes} bytes holds no page of {self._form.page_bytes} bytes")
        self._pages: dict[bytes, _Page] = {}
        self._leaves: list[tuple[int, bytes]] = []  # heap of (stamp, key); an entry whose stamp is old is void
        self._clock = 0
        self._evicted = 0
        self._generation = 0
        self._closed = False
        self._lock = threading.Lock()

    # ---- what a subclass does -----------------------------------------------------------------

    @abstractmethod
    def put(self, key: bytes, data: memoryview) -> None:
        """Keep a copy of `data`, `page_bytes` bytes, under a new key. An exception leaves the page absent."""

    @abstractmethod
    def get(self, key: bytes, buffer: memoryview) -> None:
        """Fill `buffer`, `page_bytes` bytes, with what was put under `key`. Less than all is found out."""

    @abstractmethod
    def drop(self, key: bytes) -> None:
        """Forget the bytes of a page."""

    def checksum(self, key: bytes, data: memoryview) -> int:
        """What tells a page's bytes from all others."""
        return page_checksum(key, data)

    # ---- the contract -------------------------------------------------------------------------

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            self._check_open()
            return self._leading(keys)

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        check_buffers(self._form, keys, buffers)
        with self._lock:
            self._check_open()
            count = 0
            for key, buffer in zip(keys, buffers):
                if key not in self._pages or not self._read(key, buffer[: self._form.page_bytes]):
                    break
                count += 1
            if count:
                self._touch(keys[count - 1])
            return count

    def write(self, runs: Sequence[PageRun]) -> list[int]:
        for run in runs:
            check_buffers(self._form, run.keys, run.buffers)
        with self._lock:
            self._check_open()
            kept: set[bytes] = set()  # the deepest page of each run: its ancestors have a child and stay as well
            return [self._write(run, kept) for run in runs]

    def delete(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            self._check_open()
            return sum(self._remove(key) for key in keys)

    def clear(self) -> int:
        with self._lock:
            self._check_open()
            self._generation += 1
            return self._forget_all()

    def generation(self) -> int:
        with self._lock:
            self._check_open()
            return self._generation

    def usage(self) -> StorageUsage:
        with self._lock:
            self._check_open()
            pages = len(self._pages)
            return StorageUsage(pages, pages * self._form.page_bytes, self._budget_bytes, self._evicted)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._forget_all()

    # ---- pages --------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError("the store is closed", "closed")

    def _leading(self, keys: Sequence[bytes]) -> int:
        # Stored pages are closed under "parent of", so presence along a chain is monotone.
        return bisect_left(keys, True, key=lambda key: key not in self._pages)

    def _read(self, key: bytes, buffer: memoryview) -> bool:
        self.get(key, buffer)
        if self.checksum(key, buffer) != self._pages[key].checksum:
            self._remove(key)
            return False
        return True

    def _write(self, run: PageRun, kept: set[bytes]) -> int:
        late = run.generation is not None and run.generation != self._generation
        if late or (run.parent is not None and run.parent not in self._pages):
            return 0
        count = self._leading(run.keys)
        parent = run.keys[count - 1] if count else run.parent
        for key, buffer in zip(run.keys[count:], run.buffers[count:]):
            if len(self._pages) >= self._max_pages and not self._evict_one({*kept, parent}):
                break
            self._insert(key, parent, buffer[: self._form.page_bytes])
            parent = key
            count += 1
        if count:
            self._touch(run.keys[count - 1])
            kept.add(run.keys[count - 1])
        return count

    def _insert(self, key: bytes, parent: bytes | None, data: memoryview) -> None:
        self.put(key, data)
        self._pages[key] = _Page(self.checksum(key, data), parent, 0)
        if parent is not None:
            self._pages[parent].children.add(key)

    def _touch(self, key: bytes) -> None:
        """Only the deepest page of an access is stamped: parents inherit the stamps of evicted children."""
        self._clock += 1
        self._stamp(key, self._clock)

    def _stamp(self, key: bytes, stamp: int) -> None:
        page = self._pages[key]
        page.stamp = stamp
        if not page.children:
            heapq.heappush(self._leaves, (stamp, key))

    def _evict_one(self, keep: set[bytes | None]) -> bool:
        spared = []
        victim = None
        while self._leaves and victim is None:
            stamp, key = heapq.heappop(self._leaves)
            page = self._pages.get(key)
            if page is None or page.stamp != stamp or page.children:
                continue
            if key in keep:
                spared.append((stamp, key))
            else:
                victim = key
        for entry in spared:
            heapq.heappush(self._leaves, entry)
        if victim is None:
            return False
        self._remove(victim)
        self._evicted += 1
        return True

    def _remove(self, key: bytes) -> int:
        """Remove a page and everything below it; returns how many pages that was."""
        if key not in self._pages:
            return 0
        page = self._pages[key]
        parent = self._pages.get(page.parent) if page.parent is not None else None
        if parent is not None and page.parent is not None:
            parent.children.discard(key)
            if not parent.children:
                self._stamp(page.parent, max(parent.stamp, page.stamp))
        doomed = [key]
        for each in doomed:
            doomed.extend(self._pages.pop(each).children)
            self.drop(each)
        return len(doomed)

    def _forget_all(self) -> int:
        count = len(self._pages)
        for key in self._pages:
            self.drop(key)
        self._pages.clear()
        self._leaves.clear()
        return count
