"""The LMDB tier without its bytes: the same index rules over dictionaries, page for page.

Who is stored, who is a child of whom, stamps, segments and the order of eviction are those of
`storage_backends.lmdb_index`, `lmdb_eviction` and `lmdb_store`, and are compared with them in the tests. Modelled as
simple:

- a slot is a page of `page_cost` bytes, the largest that the codec makes: a lossless codec stores more than this says;
- the store has the whole of the budget's share for pages from the start, and its map is never full;
- there is one namespace and one process, and a store that was left by an earlier run is not looked at.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Collection, Container, Sequence

from hicache.storage_backends.base import PageRun, StorageBackend, StorageUsage
from hicache.storage_backends.budget import MAX_CHUNK_PAGES, BudgetPlan
from hicache.storage_backends.lmdb_backend import NOTES_PER_TTL
from hicache.storage_backends.lmdb_index import PROTECTED_SHARE
from hicache.storage_backends.lmdb_order import PROBATION, PROTECTED
from hicache.storage_backends.managed import ManagedBackend
from hicache.storage_backends.recency import FLUSH_AT, RecentKeys


class _Page:
    __slots__ = ("children", "key", "parent", "segment", "stamp")

    def __init__(self, key: bytes, parent: _Page | None, stamp: int) -> None:
        self.key = key
        self.parent = parent
        self.children = 0
        self.segment = PROBATION
        self.stamp = stamp


class _Order:
    """Pages without children of one segment, by stamp; entries of pages that left stay until they surface."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, _Page]] = []
        self._members: dict[_Page, int] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._members)

    def enter(self, page: _Page) -> None:
        self._members[page] = page.stamp
        self._serial += 1
        heapq.heappush(self._heap, (page.stamp, self._serial, page))
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [item for item in self._heap if self._members.get(item[2]) == item[0]]
            heapq.heapify(self._heap)

    def leave(self, page: _Page) -> bool:
        return self._members.pop(page, None) is not None

    def first(self, keep: Collection[bytes] = ()) -> _Page | None:
        """The oldest page that is not in `keep`."""
        spared = []
        found = None
        while self._heap and found is None:
            item = self._heap[0]
            if self._members.get(item[2]) != item[0]:
                heapq.heappop(self._heap)
            elif item[2].key in keep:
                spared.append(heapq.heappop(self._heap))
            else:
                found = item[2]
        for item in spared:
            heapq.heappush(self._heap, item)
        return found


class UnbackedMemory(ManagedBackend):
    """The memory backend without its memory: all that it manages, and no bytes."""

    def put(self, key: bytes, data: memoryview) -> None:
        """Nothing is kept."""

    def get(self, key: bytes, buffer: memoryview) -> None:
        """Nothing is written."""

    def drop(self, key: bytes) -> None:
        """Nothing is kept."""

    def checksum(self, key: bytes, data: memoryview) -> int:
        """Of no bytes: always right."""
        return 0


class StoreModel(StorageBackend):
    """A storage backend that knows what an LMDB store would hold, and holds no bytes.

    `eviction`, `ttl` (seconds, 0: never) and `quota_bytes` (0: none) as for the LMDB tier; `clock` gives seconds.
    """

    def __init__(
        self,
        plan: BudgetPlan,
        eviction: str = "lru",
        ttl: float = 0.0,
        quota_bytes: int = 0,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        budget = plan.split()
        self._budget_bytes = plan.budget_bytes
        self._cost = plan.page_cost
        quota = quota_bytes if quota_bytes else budget.data_bytes
        self._max_pages = min(budget.data_bytes, quota) // plan.page_cost
        self._chunk = budget.chunk_pages(plan.page_cost)
        self._policy = eviction
        self._ttl = ttl
        self._clock = clock
        self._stamp = 0
        self._pages: dict[bytes, _Page] = {}
        self._orders = (_Order(), _Order())
        self._recent = RecentKeys()
        self._evicted = 0
        self._generation = 0

    # ---- the contract -------------------------------------------------------------------------

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """See StorageBackend."""
        self._expire()
        count = self._leading(keys)
        self._note(keys, count)
        return count

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        """How many leading pages are stored; nothing is written to `buffers`."""
        return self.contains_prefix(keys)

    def write(self, runs: Sequence[PageRun]) -> list[int]:
        """See StorageBackend; the steps are those of `Store.write`."""
        self._expire()
        touched = self._take_notes()
        counts = self._stored(runs)
        touched += [run.keys[count - 1] for run, count in zip(runs, counts) if count]
        keep = {key for run in runs for key in (run.parent, *run.keys) if key is not None}
        wanted = [len(run.keys) for run in runs]
        while True:
            planned = self._plan(runs)
            room = self._make_room(len(planned), keep)
            added = self._insert(planned, touched, keep)
            counts = self._stored(runs)
            if counts == wanted or not planned or not (added or room):
                return counts

    def delete(self, keys: Sequence[bytes]) -> int:
        """See StorageBackend."""
        return sum(self._remove_tree(self._pages[key]) for key in keys if key in self._pages)

    def clear(self) -> int:
        """See StorageBackend."""
        count = len(self._pages)
        self._generation += 1
        self._pages.clear()
        self._orders = (_Order(), _Order())
        return count

    def generation(self) -> int:
        """See StorageBackend."""
        return self._generation

    def usage(self) -> StorageUsage:
        """Bytes are those of the slots in use."""
        return StorageUsage(len(self._pages), len(self._pages) * self._cost, self._budget_bytes, self._evicted)

    def close(self) -> None:
        """Nothing to release."""

    # ---- reading ------------------------------------------------------------------------------

    def _leading(self, keys: Sequence[bytes]) -> int:
        return bisect_left(keys, True, key=lambda key: key not in self._pages)

    def _note(self, keys: Sequence[bytes], count: int) -> None:
        self._recent.note(keys, count, self._clock())
        if len(self._recent) >= FLUSH_AT:
            self._touch(self._take_notes())

    def _take_notes(self) -> list[bytes]:
        return self._recent.take(self._clock() - 2 * self._ttl / NOTES_PER_TTL if self._ttl else 0.0)

    # ---- writing ------------------------------------------------------------------------------

    def _stored(self, runs: Sequence[PageRun]) -> list[int]:
        """How many leading pages of each run are stored."""
        return [self._leading(run.keys) if self._continues(run, ()) else 0 for run in runs]

    def _continues(self, run: PageRun, planned: Container[bytes]) -> bool:
        """Is it of this generation, and what it continues stored or planned?"""
        late = run.generation is not None and run.generation != self._generation
        return not late and (run.parent is None or run.parent in planned or run.parent in self._pages)

    def _plan(self, runs: Sequence[PageRun]) -> dict[bytes, bytes | None]:
        """Keys to be written next, at most a chunk, with their parents'."""
        planned: dict[bytes, bytes | None] = {}
        pages = self._pages
        for run in runs:
            if len(planned) == self._chunk:
                break
            if not self._continues(run, planned):
                continue
            start = bisect_left(run.keys, True, key=lambda key: key not in planned and key not in pages)
            parent = run.keys[start - 1] if start else run.parent
            for key in run.keys[start : start + self._chunk - len(planned)]:
                planned[key] = parent
                parent = key
        return planned

    def _make_room(self, count: int, keep: Collection[bytes]) -> bool:
        while (excess := len(self._pages) + count - self._max_pages) > 0:
            if not self._evict(excess, keep):
                return False
        return True

    def _insert(self, planned: dict[bytes, bytes | None], touched: list[bytes], keep: Collection[bytes]) -> int:
        """How many of the planned pages were added: those for which there is room. Then room for as many more."""
        self._touch(touched)
        room = max(self._max_pages - len(self._pages), 0)
        fresh = []
        stamps = self._take_stamps(min(room, len(planned))) if planned else range(0)
        for stamp, (key, parent_key) in zip(stamps, planned.items()):
            parent = self._pages[parent_key] if parent_key is not None else None
            page = self._pages[key] = _Page(key, parent, stamp)
            if parent is not None:
                parent.children += 1
                self._leave(parent)
            fresh.append(page)
        for page in fresh:
            if not page.children:
                self._enter(page)
        if fresh:
            excess = len(self._pages) + len(fresh) - self._max_pages
            if excess > 0:
                self._evict(excess, keep)
        return len(fresh)

    def _touch(self, keys: Sequence[bytes]) -> None:
        if self._policy == "fifo":
            return
        for key in keys:
            page = self._pages.get(key)
            if page is not None:
                self._use(page)

    def _use(self, page: _Page) -> None:
        leaf = self._leave(page)
        page.stamp = self._take_stamps(1)[0]
        page.segment = PROTECTED if self._policy == "slru" else PROBATION
        if leaf:
            self._enter(page)
            probation, protected = self._orders
            if len(protected) > (len(probation) + len(protected)) * PROTECTED_SHARE:
                self._unprotect_one()

    def _unprotect_one(self) -> None:
        page = self._orders[PROTECTED].first()
        if page is not None:
            self._leave(page)
            page.segment, page.stamp = PROBATION, self._take_stamps(1)[0]
            self._enter(page)

    def _take_stamps(self, count: int) -> range:
        """Numbers that grow: microseconds where the clock has moved on."""
        first = max(self._stamp, int(self._clock() * 1e6))
        self._stamp = first + count
        return range(first, first + count)

    # ---- removing -----------------------------------------------------------------------------

    def _evict(self, count: int, keep: Collection[bytes]) -> int:
        """Let up to `count` pages go, at most a chunk; those of `keep` and what is above them stay."""
        most, before = min(count, MAX_CHUNK_PAGES), len(self._pages)
        while before - len(self._pages) < most:
            page = self._orders[PROBATION].first(keep) or self._orders[PROTECTED].first(keep)
            if page is None:
                break
            self._evict_chain(page, before - most, keep)
        gone = before - len(self._pages)
        self._evicted += gone
        return gone

    def _evict_chain(self, page: _Page, least: int, keep: Collection[bytes]) -> None:
        """A page without children, then those above it while they are next in line."""
        stamp, segment = page.stamp, page.segment
        self._leave(page)
        while True:
            parent = self._drop(page)
            if parent is None:
                return
            finished = len(self._pages) <= least
            older = parent.segment <= segment and parent.stamp <= stamp
            if finished or parent.key in keep or not older or parent.children:
                self._child_left(parent, stamp, segment)
                return
            page = parent

    def _drop(self, page: _Page) -> _Page | None:
        """Remove a page that is in no order; returns its parent."""
        del self._pages[page.key]
        if page.parent is not None:
            page.parent.children -= 1
        return page.parent

    def _child_left(self, page: _Page, stamp: int, segment: int) -> None:
        if self._policy != "fifo" and stamp > page.stamp:
            page.stamp, page.segment = stamp, max(segment, page.segment)
        if not page.children:
            self._enter(page)

    def _remove_tree(self, top: _Page) -> int:
        """Remove a page and everything below it."""
        below = [page for page in self._pages.values() if _is_below(page, top)]
        newest = max(below, key=lambda page: page.stamp)
        for page in below:
            self._leave(page)
            del self._pages[page.key]
        if top.parent is not None:
            top.parent.children -= 1
            self._child_left(top.parent, newest.stamp, newest.segment)
        return len(below)

    def _expire(self) -> None:
        """Remove what has not been used for too long; first write down what has been used, if that is due."""
        if not self._ttl:
            return
        if self._recent.older_than(self._clock() - self._ttl / NOTES_PER_TTL):
            self._touch(self._take_notes())
        before = int((self._clock() - self._ttl) * 1e6)
        for order in self._orders:
            while (page := order.first()) is not None and page.stamp < before:
                held = len(self._pages)
                self._evict_chain(page, -1, ())
                self._evicted += held - len(self._pages)

    def _enter(self, page: _Page) -> None:
        self._orders[page.segment].enter(page)

    def _leave(self, page: _Page) -> bool:
        return self._orders[page.segment].leave(page)


def _is_below(page: _Page | None, top: _Page) -> bool:
    while page is not None:
        if page is top:
            return True
        page = page.parent
    return False
