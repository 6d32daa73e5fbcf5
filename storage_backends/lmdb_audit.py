"""Do the records of a store agree? Every page, link, place in the order, slot and counter is counted again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice, pairwise

from hicache.errors import StoreCorruptError
from hicache.hashing import DIGEST_BYTES
from hicache.storage_backends.lmdb_index import IndexView
from hicache.storage_backends.lmdb_order import PROTECTED
from hicache.storage_backends.lmdb_schema import PageRecord, Space, slab_of, slot_of
from hicache.storage_backends.lmdb_slots import ALL_SLOTS, ExtentSet
from hicache.storage_backends.lmdb_store import Store
from hicache.storage_backends.lmdb_values import value_location

MAX_PROBLEMS = 100


def audit(store: Store) -> list[str]:
    """What does not agree, in words, up to MAX_PROBLEMS; nothing if all is well. Takes about 100 bytes per page."""
    return store.view(audit_view)


def audit_view(view: IndexView, locations: bool = True) -> list[str]:
    """As `audit`, of one snapshot; without `locations`, where the pages' bytes lie is left out."""
    return list(islice(_Audit(view, locations).problems(), MAX_PROBLEMS))


class _Audit:
    def __init__(self, view: IndexView, locations: bool) -> None:
        self._view = view
        self._locations = locations
        self._clock = view.state().clock
        self._spaces: defaultdict[int, Space] = defaultdict(Space)
        self._slots: defaultdict[int, list[int]] = defaultdict(list)
        self._values: dict[int, int] = {}
        self._links = 0

    def problems(self) -> Iterator[str]:
        try:
            for key, raw in self._view.txn.cursor(self._view.databases.pages):
                yield from self._page(key, PageRecord.unpack(key, raw))
            yield from self._children()
            yield from self._order()
            yield from self._counters()
            if self._locations:
                yield from self._inline_values()
                for slot_bytes in self._view.slabs().keys() | self._slots.keys():
                    yield from self._slab(slot_bytes)
        except StoreCorruptError as error:
            yield str(error)

    def _page(self, key: bytes, record: PageRecord) -> Iterator[str]:
        space, slot_bytes = self._spaces[record.space], slab_of(record.location)
        space.pages += 1
        space.live_bytes += record.cost
        if slot_bytes:
            self._slots[slot_bytes].append(slot_of(record.location))
        else:
            self._values[record.location] = record.length
        if record.length > record.slot_bytes:
            yield f"page {key.hex()} is longer than its slot"
        if record.stamp >= self._clock:
            yield f"page {key.hex()} was used in the future"
        if record.parent is not None:
            self._links += 1
            parent = self._view.record(record.parent)
            if parent is None or parent.space != record.space:
                yield f"page {key.hex()} has no parent in its namespace"
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
            if kept.quota and found.live_bytes > kept.quota:
                yield f"namespace {number}: {found.live_bytes} bytes are over its quota of {kept.quota}"
        for number, found in self._spaces.items():
            yield f"{found.pages} pages are of namespace {number}, which is not known"
        yield from self._totals()

    def _totals(self) -> Iterator[str]:
        state = self._view.state()
        live = sum(space.live_bytes for space in self._view.spaces().values())
        backed = sum(slot_bytes * slab.backed for slot_bytes, slab in self._view.slabs().items())
        for name, kept, counted in (("live", state.live_bytes, live), ("backed", state.backed_bytes, backed)):
            if kept != counted:
                yield f"{name} bytes are {kept}, {counted} were counted"
            if state.data_bytes and counted > state.data_bytes:
                yield f"{counted} {name} bytes are over the limit of {state.data_bytes}"

    def _inline_values(self) -> Iterator[str]:
        values = self._view.txn.cursor(self._view.databases.values)
        found = {value_location(key): len(value) for key, value in values}
        for location in sorted(found.keys() ^ self._values.keys()):
            yield f"value {location} is {'of no page' if location in found else 'missing'}"
        for location in found.keys() & self._values.keys():
            if found[location] != self._values[location]:
                yield f"value {location} has {found[location]} bytes, its page {self._values[location]}"

    def _slab(self, slot_bytes: int) -> Iterator[str]:
        """Used, free and holes are all the slots there are, each slot in one of them."""
        view, what = self._view, f"slab of {slot_bytes} bytes"
        used = self._slots[slot_bytes]
        if (twice := Counter(used).most_common(1)) and twice[0][1] > 1:
            yield f"{what}: slot {twice[0][0]} holds two pages"
        free = list(ExtentSet(view.txn, view.databases.free, slot_bytes))
        holes = list(ExtentSet(view.txn, view.databases.holes, slot_bytes))
        for extents in (free, holes):
            if any(first.stop >= second.start for first, second in pairwise(extents)):
                yield f"{what}: neighbours are not joined"
        owned = sorted([*(range(slot, slot + 1) for slot in set(used)), *free, *holes], key=lambda each: each.start)
        end = 0
        for extent in owned:
            if extent.start != end:
                gap = "in no set" if extent.start > end else "in two sets"
                yield f"{what}: slots {min(end, extent.start)} to {max(end, extent.start) - 1} are {gap}"
            end = extent.stop
        if owned and end != ALL_SLOTS.stop:
            yield f"{what}: slots from {end} on are in no set"
        slab, backed = view.slab(slot_bytes), len(used) + sum(map(len, free))
        if (slab.used, slab.backed) != (len(used), backed):
            yield f"{what}: {slab.used} used of {slab.backed}, {len(used)} of {backed} were counted"
