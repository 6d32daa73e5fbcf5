"""What an LMDB store's index claims, counted again from its records."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.lmdb_index import IndexView
from hicache.storage_backends.lmdb_order import PROTECTED, Entry, EvictionOrder
from hicache.storage_backends.lmdb_schema import PageRecord, SlabState, Space, slab_of, slot_location, slot_of
from hicache.storage_backends.lmdb_slots import ExtentSet
from hicache.storage_backends.lmdb_values import _LOCATION

_ALL_SLOTS = 1 << 40


def disk_bytes(path: Path) -> int:
    """Bytes that the files of a folder take on disk."""
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(path))


def audit(backend: LmdbBackend) -> None:
    """Raises AssertionError where counters, families, order and slots of a store are not what its pages say."""
    audit_values = _audit_values if backend._store.values_mode == "inline" else _audit_slots

    def audit_all(view: IndexView) -> None:
        audit_index(view)
        audit_values(view, dict(all_records(view)))

    backend._store.view(audit_all)


def audit_index(view: IndexView) -> None:
    """As `audit`, of an index alone, as one transaction sees it."""
    records = dict(all_records(view))
    _audit_families(view, records)
    _audit_order(view, records)
    _audit_counters(view, records)


def all_records(view: IndexView) -> list[tuple[bytes, PageRecord]]:
    cursor = view.txn.cursor(view.databases.pages)
    return [(bytes(key), PageRecord.unpack(bytes(key), raw)) for key, raw in cursor]


def _audit_families(view: IndexView, records: dict[bytes, PageRecord]) -> None:
    links = {bytes(key) for key in view.txn.cursor(view.databases.children).iternext(values=False)}
    expected = {record.parent + key for key, record in records.items() if record.parent is not None}
    assert links == expected, "the children are not those that name a parent"
    for record in records.values():
        if record.parent is not None:
            assert record.parent in records, "a page is stored without its parent"
            assert records[record.parent].space == record.space, "a page is below one of another namespace"


def _audit_order(view: IndexView, records: dict[bytes, PageRecord]) -> None:
    order = EvictionOrder(view.txn, view.databases.order)
    spaces = {record.space for record in records.values()} | view.spaces().keys()
    entries = [entry for number in spaces for entry in order.entries(number)]
    parents = {record.parent for record in records.values()}
    leaves = {Entry(r.space, r.segment, r.stamp, key) for key, r in records.items() if key not in parents}
    assert sorted(entries) == sorted(leaves), "the order does not hold the pages without children"
    assert view.txn.stat(view.databases.order)["entries"] == len(leaves), "the order holds pages of no namespace"
    stamps = [record.stamp for record in records.values()]
    assert all(stamp < view.state().clock for stamp in stamps), "a page was used in the future"
    assert len({entry.stamp for entry in entries}) == len(entries), "two pages have the same stamp"


def _audit_counters(view: IndexView, records: dict[bytes, PageRecord]) -> None:
    order = EvictionOrder(view.txn, view.databases.order)
    pages, live_bytes = Counter[int](), Counter[int]()
    for record in records.values():
        pages[record.space] += 1
        live_bytes[record.space] += record.cost
    spaces, state = view.spaces(), view.state()
    assert pages.keys() <= spaces.keys(), "pages of a namespace that there is not"
    for number, space in spaces.items():
        entries = list(order.entries(number))
        protected = sum(entry.segment == PROTECTED for entry in entries)
        expected = Space(pages[number], live_bytes[number], leaves=len(entries), protected=protected)
        for name in ("pages", "live_bytes", "leaves", "protected"):
            assert getattr(space, name) == getattr(expected, name), f"{name} of namespace {number}"
        assert not space.quota or space.live_bytes <= space.quota, f"namespace {number} is over its quota"
    assert state.live_bytes == sum(live_bytes.values()), "live_bytes"
    assert not state.data_bytes or state.live_bytes <= state.data_bytes, "more is stored than the budget allows"


def _audit_values(view: IndexView, records: dict[bytes, PageRecord]) -> None:
    stored = {_LOCATION.unpack(key)[0]: len(value) for key, value in view.txn.cursor(view.databases.values)}
    assert stored == {record.location: record.length for record in records.values()}, "values are not those of pages"


def _audit_slots(view: IndexView, records: dict[bytes, PageRecord]) -> None:
    used: defaultdict[int, list[int]] = defaultdict(list)
    for record in records.values():
        assert record.location == slot_location(slab_of(record.location), slot_of(record.location))
        assert record.length <= slab_of(record.location), "a page is longer than its slot"
        used[slab_of(record.location)].append(slot_of(record.location))
    slabs, state = view.slabs(), view.state()
    assert used.keys() <= slabs.keys(), "pages lie in a slab that there is not"
    for slot_bytes, slab in slabs.items():
        _audit_slab(view, slot_bytes, slab, used[slot_bytes])
    backed = sum(slab.backed * slot_bytes for slot_bytes, slab in slabs.items())
    assert state.backed_bytes == backed, "backed_bytes"
    assert not state.data_bytes or backed <= state.data_bytes, "more slots have blocks than the budget allows"


def _audit_slab(view: IndexView, slot_bytes: int, slab: SlabState, used: list[int]) -> None:
    """Slots with a page, free slots and holes are all slots, and none is two of these."""
    free = list(ExtentSet(view.txn, view.databases.free, slot_bytes))
    holes = list(ExtentSet(view.txn, view.databases.holes, slot_bytes))
    assert slab == SlabState(sum(map(len, free)) + len(used), len(used)), f"slots of {slot_bytes} bytes"
    owned = sorted([*free, *holes, *(range(slot, slot + 1) for slot in used)], key=lambda extent: extent.start)
    starts, stops = [extent.start for extent in owned], [extent.stop for extent in owned]
    assert starts == [0, *stops[:-1]], "slots are lost, or have two owners"
    assert stops[-1] == _ALL_SLOTS
    for extents in (free, holes):
        assert all(first.stop < second.start for first, second in pairwise(extents)), "neighbours are not joined"
