"""Pages in a dictionary: the simplest backend that keeps every promise, and the oracle for the others."""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from hicache.errors import ConfigError, StoreUnavailableError
from hicache.hashing import StoreIdentity
from hicache.storage_backends.base import PageRun, StorageBackend, StorageUsage, check_buffers
from hicache.storage_backends.checksums import page_checksum


@dataclass
class _Page:
    data: bytearray
    checksum: int
    parent: bytes | None
    stamp: int
    children: set[bytes] = field(default_factory=set)


class MemoryBackend(StorageBackend):
    """Least recently used pages without children go first, so that a page never outlives its parent."""

    def __init__(self, identity: StoreIdentity, budget_bytes: int) -> None:
        self._layout = identity.layout
        self._budget_bytes = budget_bytes
        self._max_pages = budget_bytes // self._layout.page_bytes
        if self._max_pages < 1:
            raise ConfigError(f"a budget of {budget_bytes} bytes holds no page of {self._layout.page_bytes} bytes")
        self._pages: dict[bytes, _Page] = {}
        self._leaves: list[tuple[int, bytes]] = []  # heap of (stamp, key); an entry whose stamp is old is void
        self._clock = 0
        self._evicted = 0
        self._generation = 0
        self._closed = False
        self._lock = threading.Lock()

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            self._check_open()
            return self._leading(keys)

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        check_buffers(self._layout, keys, buffers)
        with self._lock:
            self._check_open()
            count = 0
            for key, buffer in zip(keys, buffers):
                if key not in self._pages or not self._read(key, buffer):
                    break
                count += 1
            if count:
                self._touch(keys[count - 1])
            return count

    def write(self, runs: Sequence[PageRun]) -> list[int]:
        for run in runs:
            check_buffers(self._layout, run.keys, run.buffers)
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
            count = len(self._pages)
            self._pages.clear()
            self._leaves.clear()
            self._generation += 1
            return count

    def generation(self) -> int:
        with self._lock:
            self._check_open()
            return self._generation

    def usage(self) -> StorageUsage:
        with self._lock:
            self._check_open()
            pages = len(self._pages)
            return StorageUsage(pages, pages * self._layout.page_bytes, self._budget_bytes, self._evicted)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._pages.clear()
            self._leaves.clear()

    def flip_byte(self, key: bytes) -> bool:
        """Damage a stored page, for drills; False if it is not stored."""
        with self._lock:
            page = self._pages.get(key)
            if page is None:
                return False
            page.data[len(page.data) // 2] ^= 0xFF
            return True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError("the memory store is closed")

    def _leading(self, keys: Sequence[bytes]) -> int:
        # Stored pages are closed under "parent of", so presence along a chain is monotone.
        return bisect_left(keys, True, key=lambda key: key not in self._pages)

    def _read(self, key: bytes, buffer: memoryview) -> bool:
        page = self._pages[key]
        if page_checksum(key, memoryview(page.data)) != page.checksum:
            self._remove(key)
            return False
        buffer[: len(page.data)] = page.data
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
            self._insert(key, parent, buffer)
            parent = key
            count += 1
        if count:
            self._touch(run.keys[count - 1])
            kept.add(run.keys[count - 1])
        return count

    def _insert(self, key: bytes, parent: bytes | None, buffer: memoryview) -> None:
        data = bytearray(buffer[: self._layout.page_bytes])
        self._pages[key] = _Page(data, page_checksum(key, memoryview(data)), parent, 0)
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
        return self._drop_subtree(key)

    def _drop_subtree(self, key: bytes) -> int:
        doomed = [key]
        for each in doomed:
            doomed.extend(self._pages.pop(each).children)
        return len(doomed)
