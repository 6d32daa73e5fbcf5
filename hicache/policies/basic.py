"""Orders by the history of an entry alone: recency, rank, bucket, two segments."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic

from hicache.policies.base import E, EntryView, EvictionOrder

_PROMOTING_HITS = 1


class Recency(EvictionOrder[E]):
    """Least recently used first.

    Uses come in tick order, so an ordered dict sorts them for free. Entries that become evictable
    long after their last use (a parent whose children went) go to a heap beside it.
    """

    def __init__(self) -> None:
        self._recent: OrderedDict[E, int] = OrderedDict()
        self._late = LazyHeap[E]()
        self._newest = 0

    def add(self, entry: E) -> None:
        if entry.tick >= self._newest:
            self.append(entry)
        else:
            self._late.push(entry, entry.tick)

    def append(self, entry: E) -> None:
        """Track `entry` as the most recent of all, whatever its tick."""
        self._newest = max(self._newest, entry.tick)
        self._recent[entry] = self._newest

    def discard(self, entry: E) -> None:
        if self._recent.pop(entry, None) is None:
            self._late.remove(entry)

    def touch(self, entry: E) -> None:
        if entry in self._recent:
            self._newest = self._recent[entry] = max(self._newest, entry.tick)
            self._recent.move_to_end(entry)
        else:
            self._late.remove(entry)
            self.append(entry)

    def first(self) -> E | None:
        late = self._late.first()
        for entry, used in self._recent.items():
            return late[1] if late is not None and late[0] < used else entry
        return late[1] if late is not None else None

    def __contains__(self, entry: object) -> bool:
        return entry in self._recent or entry in self._late

    def __len__(self) -> int:
        return len(self._recent) + len(self._late)


class LazyHeap(Generic[E]):
    """A heap whose removed entries stay in it until they surface, or until they are the majority."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, E]] = []
        self._live: dict[E, int] = {}  # entry -> the serial number of its valid item
        self._serial = 0

    def push(self, entry: E, rank: float) -> None:
        self._serial += 1
        self._live[entry] = self._serial
        heapq.heappush(self._heap, (rank, self._serial, entry))
        self._compact()

    def remove(self, entry: E) -> None:
        del self._live[entry]
        self._compact()

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [item for item in self._heap if self._live.get(item[2]) == item[1]]
            heapq.heapify(self._heap)

    def first(self) -> tuple[float, E] | None:
        while self._heap:
            rank, serial, entry = self._heap[0]
            if self._live.get(entry) == serial:
                return rank, entry
            heapq.heappop(self._heap)
        return None

    def __contains__(self, entry: object) -> bool:
        return entry in self._live

    def __len__(self) -> int:
        return len(self._live)


class Ranked(EvictionOrder[E]):
    """Lowest rank first."""

    def __init__(self, rank: Callable[[EntryView], float]) -> None:
        self._rank = rank
        self._heap = LazyHeap[E]()

    def add(self, entry: E) -> None:
        self._heap.push(entry, self._rank(entry))

    def discard(self, entry: E) -> None:
        self._heap.remove(entry)

    def touch(self, entry: E) -> None:
        self._heap.push(entry, self._rank(entry))

    def first(self) -> E | None:
        item = self._heap.first()
        return item[1] if item is not None else None

    def __contains__(self, entry: object) -> bool:
        return entry in self._heap

    def __len__(self) -> int:
        return len(self._heap)


class Bucketed(EvictionOrder[E]):
    """Lowest bucket first, least recently used within it."""

    def __init__(self, bucket: Callable[[EntryView], int]) -> None:
        self._bucket = bucket
        self._queues: dict[int, Recency[E]] = {}
        self._numbers: list[int] = []  # heap of at least the buckets in _queues
        self._where: dict[E, int] = {}

    def add(self, entry: E) -> None:
        number = self._where[entry] = self._bucket(entry)
        queue = self._queues.get(number)
        if queue is None:
            queue = self._queues[number] = Recency()
            heapq.heappush(self._numbers, number)
        queue.add(entry)

    def discard(self, entry: E) -> None:
        number = self._where.pop(entry)
        queue = self._queues[number]
        queue.discard(entry)
        if not len(queue):
            del self._queues[number]
            if len(self._numbers) > 2 * len(self._queues) + 64:
                self._numbers = sorted(self._queues)  # a sorted list is a heap

    def touch(self, entry: E) -> None:
        self.discard(entry)
        self.add(entry)

    def first(self) -> E | None:
        while self._numbers:
            queue = self._queues.get(self._numbers[0])
            if queue is not None:
                return queue.first()
            heapq.heappop(self._numbers)
        return None

    def __contains__(self, entry: object) -> bool:
        return entry in self._where

    def __len__(self) -> int:
        return len(self._where)


class Segmented(EvictionOrder[E]):
    """Segmented LRU (Karedla et al., 1994): a hit promotes to the protected segment.

    After every addition the protected segment holds at most `protected_share` of the entries; what
    it overflows gets another round at the recent end of the probation segment.
    """

    def __init__(self, protected_share: float = 0.8) -> None:
        self._share = protected_share
        self._probation = Recency[E]()
        self._protected = Recency[E]()

    def add(self, entry: E) -> None:
        (self._protected if entry.hits >= _PROMOTING_HITS else self._probation).add(entry)
        self._balance()

    def discard(self, entry: E) -> None:
        (self._protected if entry in self._protected else self._probation).discard(entry)

    def touch(self, entry: E) -> None:
        self.discard(entry)
        self.add(entry)

    def first(self) -> E | None:
        return self._probation.first() or self._protected.first()

    def _balance(self) -> None:
        while len(self._protected) > self._share * len(self):
            oldest = self._protected.first()
            if oldest is None:
                return
            self._protected.discard(oldest)
            self._probation.append(oldest)

    def __contains__(self, entry: object) -> bool:
        return entry in self._probation or entry in self._protected

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)
