"""Do the records of a store agree? Every page, link, place in the order, slot and counter is counted again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from hicache.errors import StoreCorruptError
from hicache.hashing import DIGEST_BYTES
from hicache.storage_backends.lmdb_index import IndexView
from hicache.storage_backends.lmdb_order import PROTECTED
from hicache.storage_backends.lmdb_schema import PageRecord, Space, slab_of, slot_of
from hicache.storage_backends.lmdb_slots import ALL_SLOTS, ExtentSet, extents_of
from hicache.storage_backends.lmdb_store import Store

MAX_PROBLEMS = 100


def audit(store: Store) -> list[str]:
    """What does not agree, in words; nothing if all is well. Takes about 100 bytes of memory per page."""
    return store.view(audit_view)


def audit_view(view: IndexView) -> list[str]:
    """As `audit`, of one snapshot."""
    problems: list[str] = []
    for problem in _Audit(view).problems():
        problems.append(problem)
        if len(problems) == MAX_PROBLEMS:
            break
    return problems


class _Audit:
    def __init__(self, view: IndexView) -> None:
        self._view = view
        self._spaces: defaultdict[int, Space] = defaultdict(Space)
        self._slots: defaultdict[int, list[int]] = defaultdict(list)
        self._links = 0

    def problems(self) -> Iterator[str]:
        try:
            yield from self._pages()
            yield from self._children()
            yield from self._order()
            yield from self._counters()
            for slot_bytes in self._view.slabs().keys() | self._slots.keys():
                yield from self._slab(slot_bytes)
        except StoreCorruptError as error:
            yield str(error)

    def _pages(self) -> Iterator[str]:
        for key, raw in self._view.txn.cursor(self._view.databases.pages):
            record = PageRecord.unpack(key, raw)
            space = self._spaces[record.space]
            space.pages += 1
            space.live_bytes += record.cost
            if slab_of(record.location):
                self._slots[slab_of(record.location)].append(slot_of(record.location))
            if record.parent is not None:
                self._links += 1
                if not self._view.has(record.parent):
                    yield f"page {key.hex()} outlived its parent"
            yield from self._standing(key, record)

    def _standing(self, key: bytes, record: PageRecord) -> Iterator[str]:
        """A page is in the order exactly if it has no children."""
        childless = next(self._view.children(key), None) is None
        entry = self._view.order.at(record.space, record.segment, record.stamp)
        if childless != (entry == key):
            yield f"page {key.hex()} is {'not in' if childless else 'in'} the eviction order"
        if childless:
            self._spaces[record.space].leaves += 1
            self._spaces[record.space].protected += record.segment == PROTECTED

    def _children(self) -> Iterator[str]:
        count = 0
        for link in self._view.txn.cursor(self._view.databases.children).iternext(values=False):
            count += 1
            parent, child = link[:DIGEST_BYTES], link[DIGEST_BYTES:]
            record = self._view.record(child)
            if record is None or record.parent != parent:
                yield f"a link leads from {parent.hex()} to {child.hex()}, which is not its child"
        if count != self._links:
            yield f"{self._links} pages have a parent, there are {count} links"

    def _order(self) -> Iterator[str]:
        entries = int(self._view.txn.stat(self._view.databases.order)["entries"])
        leaves = sum(space.leaves for space in self._spaces.values())
        if entries != leaves:
            yield f"{leaves} pages have no children, the eviction order has {entries} entries"

    def _counters(self) -> Iterator[str]:
        for number, kept in self._view.spaces().items():
            found = self._spaces.pop(number, Space())
            for name in ("pages", "live_bytes", "leaves", "protected"):
                if getattr(found, name) != getattr(kept, name):
                    yield f"namespace {number}: {name} is {getattr(kept, name)}, {getattr(found, name)} were counted"
        for number, found in self._spaces.items():
            yield f"{found.pages} pages are of namespace {number}, which is not known"
        state = self._view.state()
        live = sum(space.live_bytes for space in self._view.spaces().values())
        backed = sum(slot_bytes * slab.backed for slot_bytes, slab in self._view.slabs().items())
        for name, kept_bytes, counted in (
            ("live", state.live_bytes, live),
            ("backed", state.backed_bytes, backed),
        ):
            if kept_bytes != counted:
                yield f"{name} bytes are {kept_bytes}, {counted} were counted"

    def _slab(self, slot_bytes: int) -> Iterator[str]:
        """Used, free and holes are all the slots there are, each slot in one of them."""
        view, what = self._view, f"slab of {slot_bytes} bytes"
        used = self._slots[slot_bytes]
        owners = Counter(used)
        if len(owners) != len(used):
            yield f"{what}: slot {owners.most_common(1)[0][0]} holds two pages"
        free = list(ExtentSet(view.txn, view.databases.free, slot_bytes))
        holes = list(ExtentSet(view.txn, view.databases.holes, slot_bytes))
        extents = sorted([*extents_of(list(owners)), *free, *holes], key=lambda extent: extent.start)
        end = 0
        for extent in extents:
            if extent.start != end:
                yield f"{what}: slots {min(end, extent.start)} to {max(end, extent.start) - 1} are " + (
                    "in no set" if extent.start > end else "in two sets"
                )
            end = extent.stop
        if extents and end != ALL_SLOTS.stop:
            yield f"{what}: slots from {end} on are in no set"
        slab = view.slab(slot_bytes)
        if (slab.used, slab.backed) != (len(used), len(used) + sum(map(len, free))):
            yield f"{what}: {slab.used} used of {slab.backed}, {len(used)} of {len(used) + sum(map(len, free))} counted"
