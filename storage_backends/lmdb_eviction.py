"""Who goes when room is wanted, or time is up: the oldest pages first, children before parents."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from hicache.storage_backends.lmdb_index import IndexWriter
from hicache.storage_backends.lmdb_order import PROBATION, PROTECTED, Entry
from hicache.storage_backends.lmdb_schema import PageRecord


@dataclass
class Eviction:
    """What one call is to free: `nbytes` of slots, or what it gets by removing `most` pages.

    Pages in `keep`, and thereby their ancestors, stay: less is freed if nothing else is left.
    """

    nbytes: float
    most: int
    keep: Collection[bytes] = ()
    freed: int = 0
    records: list[PageRecord] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.freed >= self.nbytes or len(self.records) >= self.most


def evict(index: IndexWriter, eviction: Eviction, spaces: Iterable[int]) -> list[PageRecord]:
    """Remove the oldest pages of `spaces` until `eviction` is finished; returns the records of those that went."""
    kept: dict[int, dict[int, int]] = {number: {} for number in spaces}  # by segment: look beyond what has to stay
    heads = [entry for number in kept if (entry := index.order.next_victim(number, {})) is not None]
    queue = [(entry.stamp, entry.space, entry) for entry in heads]
    heapq.heapify(queue)
    while queue and not eviction.finished:
        _, number, entry = heapq.heappop(queue)
        if entry.key in eviction.keep:
            kept[number][entry.segment] = entry.stamp + 1
        else:
            _evict_chain(index, eviction, entry)
        following = index.order.next_victim(number, kept[number])
        if following is not None:
            heapq.heappush(queue, (following.stamp, number, following))
    for record in eviction.records:
        index.space(record.space).evicted += 1
    return eviction.records


def expire(index: IndexWriter, number: int, before: int, most: int) -> list[PageRecord]:
    """Remove up to `most` pages of a namespace that were last used before the stamp `before`."""
    expiry = Eviction(float("inf"), most)
    for segment in (PROBATION, PROTECTED):
        while not expiry.finished and (entry := index.order.first(number, segment)) is not None:
            if entry.stamp >= before:
                break
            _evict_chain(index, expiry, entry)
    index.space(number).expired += len(expiry.records)
    return expiry.records


def _evict_chain(index: IndexWriter, eviction: Eviction, entry: Entry) -> None:
    """Evict a childless page, then its ancestors as long as they are next in line."""
    key, record = entry.key, index.record(entry.key)
    index.order.leave(entry.space, entry.segment, entry.stamp)
    if record is None:
        return
    index.left_order(record)
    while True:
        parent = index.remove_leaf(key, record)
        eviction.freed += record.cost
        eviction.records.append(record)
        above = index.record(parent) if parent is not None else None
        if parent is None or above is None:
            return
        if not _next_in_line(index, eviction, parent, above, entry):
            index.child_left(parent, record._replace(stamp=entry.stamp, segment=entry.segment))
            return
        key, record = parent, above


def _next_in_line(index: IndexWriter, eviction: Eviction, key: bytes, record: PageRecord, entry: Entry) -> bool:
    if eviction.finished or key in eviction.keep:
        return False
    return record.segment <= entry.segment and record.stamp <= entry.stamp and not index.has_children(key)
