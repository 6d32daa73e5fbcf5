"""Writing the pages of a store to a file, beside engines that use it. The file: `lmdb_exchange`."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from hicache.storage_backends.checksums import page_checksum
from hicache.storage_backends.lmdb_exchange import EXCHANGE_VERSION, End, FrameWriter, Header, Page, SpaceInfo
from hicache.storage_backends.lmdb_index import IndexView
from hicache.storage_backends.lmdb_order import PROBATION, PROTECTED, Entry
from hicache.storage_backends.lmdb_schema import PageRecord, slab_of
from hicache.storage_backends.lmdb_store import Store
from hicache.storage_backends.lmdb_verify import PageReader, Progress, batches, read_settled

_NEVER = 1 << 63

ROUNDS = 2
"""Pages that were used while the first round was under way come in the second, those used during that do not."""


@dataclass
class Exported:
    """Pages and bytes in the file. `damaged`: pages that could not be read, they and what is below them are missing."""

    pages: int = 0
    nbytes: int = 0
    damaged: int = 0


class _Link(NamedTuple):
    """A page of a chain, and how many children it has."""

    key: bytes
    record: PageRecord
    children: int


def export_pages(
    store: Store, file: BinaryIO, spaces: Sequence[int], progress: Progress = lambda pages, nbytes: None
) -> Exported:
    """Write the pages of `spaces` to `file`. Memory: 32 MiB, and 200 bytes for each page with several children.

    A page that is used meanwhile may come twice. Raises OSError, StoreCorruptError if the index is damaged,
    StoreUnavailableError.
    """
    writer = FrameWriter(file)
    writer.put(store.view(lambda view: _header(store, view, spaces)))
    export = _Export(store, writer, progress)
    since = 0
    for _ in range(ROUNDS):
        until = store.view(lambda view: view.state().clock)
        export.run(_Leaves(spaces, since, until))
        since = until
    writer.put(End(export.done.pages, export.done.nbytes))
    return export.done


def _header(store: Store, view: IndexView, spaces: Sequence[int]) -> Header:
    labels, counters = view.labels(), {number: view.space(number) for number in spaces}
    infos = [
        SpaceInfo(number, labels[number], space.policy, space.quota, space.ttl_us) for number, space in counters.items()
    ]
    pages, nbytes = (sum(getattr(space, name) for space in counters.values()) for name in ("pages", "live_bytes"))
    return Header(EXCHANGE_VERSION, store.values_mode, infos, pages, nbytes)


class _Leaves:
    """Pages without children that were last used from the stamp `since` on and before `until`, next victims first."""

    def __init__(self, spaces: Sequence[int], since: int, until: int) -> None:
        self._until = until
        self._starts = {number: {PROBATION: since, PROTECTED: since} for number in spaces}
        self._queue: list[tuple[int, int, Entry]] | None = None

    def next(self, view: IndexView) -> Entry | None:
        if self._queue is None:
            self._queue = []
            for number in self._starts:
                self._push(self._queue, view, number)
        if not self._queue:
            return None
        _, number, entry = heapq.heappop(self._queue)
        self._push(self._queue, view, number)
        return entry

    def _push(self, queue: list[tuple[int, int, Entry]], view: IndexView, number: int) -> None:
        starts = self._starts[number]
        while (entry := view.order.next_victim(number, starts)) is not None:
            starts[entry.segment] = entry.stamp + 1 if entry.stamp < self._until else _NEVER
            if entry.stamp < self._until:
                heapq.heappush(queue, (entry.stamp, number, entry))
                return


class _Export:
    def __init__(self, store: Store, writer: FrameWriter, progress: Progress) -> None:
        self.done = Exported()
        self._store = store
        self._writer = writer
        self._progress = progress
        self._reader = PageReader()
        self._forks: dict[bytes, int] = {}  # pages in the file of which so many children are still to come

    def run(self, leaves: _Leaves) -> None:
        def next_chain(view: IndexView) -> tuple[int, list[_Link]] | None:
            entry = leaves.next(view)
            return None if entry is None else (entry.space, self._chain(view, entry.key))

        while (found := self._store.view(next_chain)) is not None:
            self._put_chain(*found)

    def _chain(self, view: IndexView, key: bytes | None) -> list[_Link]:
        """From below a page that is in the file already, or from the start of the chain, to the page `key`."""
        chain: list[_Link] = []
        while key is not None and key not in self._forks:
            record = view.record(key)
            if record is None:
                return []  # the leaf has gone meanwhile
            chain.append(_Link(key, record, sum(1 for _ in view.children(key))))
            key = record.parent
        return chain[::-1]

    def _put_chain(self, number: int, chain: Sequence[_Link]) -> None:
        if chain and (fork := chain[0].record.parent) is not None:
            self._child_is_out(fork)
        for batch in batches(chain, lambda link: link.record.slot_bytes):
            put = self._put_batch(number, batch)
            for link in put:
                if link.children > 1:
                    self._forks[link.key] = link.children - 1  # one of them follows now
            if len(put) < len(batch):
                break
            self._progress(self.done.pages, self.done.nbytes)

    def _child_is_out(self, fork: bytes) -> None:
        self._forks[fork] -= 1
        if not self._forks[fork]:
            del self._forks[fork]

    def _put_batch(self, number: int, batch: Sequence[_Link]) -> Sequence[_Link]:
        """The leading pages that are in the file now: all, unless one is damaged or has gone."""
        keys = [link.key for link in batch]
        places: list[memoryview] = []

        def place(records: Sequence[PageRecord]) -> Sequence[memoryview]:
            places[:] = self._reader.places(records)
            return places

        def is_whole(position: int, record: PageRecord, data: memoryview) -> bool:
            return page_checksum(keys[position], data[: record.length]) == record.checksum

        records, whole = self._store.load(number, keys, place, is_whole)
        for link, record, data in zip(batch[:whole], records, places):
            self._put(link, record, data[: record.length])
        if whole < len(records):
            return [*batch[:whole], *self._put_singly(batch[whole:])]
        return batch[:whole]

    def _put_singly(self, batch: Sequence[_Link]) -> Sequence[_Link]:
        for count, link in enumerate(batch):
            found = read_settled(self._store, self._reader, link.key)
            if found is None or found[1] is None:
                self.done.damaged += found is not None
                return batch[:count]
            self._put(link, found[0], found[1])
        return batch

    def _put(self, link: _Link, record: PageRecord, data: memoryview) -> None:
        slot_bytes, children = slab_of(record.location), link.children
        page = Page(
            record.space, link.key, record.parent, record.length, slot_bytes, record.checksum, record.stamp, children
        )
        self._writer.put(page, data)
        self.done.pages += 1
        self.done.nbytes += record.length
