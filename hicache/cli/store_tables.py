"""What `hicache store` prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from hicache.config.units import format_bytes, format_duration
from hicache.hashing import Field

if TYPE_CHECKING:
    from hicache.storage_backends.lmdb_aside import SetAside
    from hicache.storage_backends.lmdb_compact import Compacted
    from hicache.storage_backends.lmdb_stat import SlabReport, SpaceReport, StoreReport

WIDE = 200
"""Columns where the output is no terminal: nothing is cut off in a file."""

_PLAIN = {"codec": "none", "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "first_layer": 0}
"""Values that go without saying."""

_SESSIONS = {
    "clean": "closed in order",
    "open": "open in another process",
    "unclean": "not closed in order: the process was killed, or the power went",
}


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)


def print_report(report: StoreReport) -> None:
    console().print(*_tables(report), sep="\n")


def print_aside(stores: Sequence[SetAside]) -> None:
    """The stores that were set aside, a line each."""
    if not stores:
        console().print("no store is set aside")
        return
    table = Table("number", "on disk", "where", "why", title="Set aside", title_justify="left")
    for store in stores:
        why = store.reason or "of another format: comes back with the version that reads it"
        table.add_row(str(store.number), format_bytes(store.disk_bytes), str(store.path), why)
    console().print(table)


def _tables(report: StoreReport) -> Iterator[Table]:
    yield _store_table(report)
    if report.spaces:
        yield _identity_table(report)
        yield _pages_table(report)
    if report.slabs:
        yield _slab_table(report)


def _store_table(report: StoreReport) -> Table:
    table = Table(title=f"Store {report.path}", title_justify="left", show_header=False, box=None)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    durability = f", durability {report.durability}" if report.durability else ""
    slabs = report.disk_bytes - report.index_disk_bytes
    readers = f"the oldest is {report.lag:,} transactions behind" if report.readers else ""
    share = f"{report.index_bytes / max(report.map_bytes, 1):.0%} of it in use"
    for name, figure, note in (
        ("values", report.values, f"format {report.format}"),
        ("session", "", _SESSIONS[report.session] + durability),
        ("budget", format_bytes(report.budget_bytes), f"{format_bytes(report.data_bytes)} of it for pages"),
        ("on disk", format_bytes(report.disk_bytes), f"index {format_bytes(report.index_disk_bytes)}, "
                                                     f"slabs {format_bytes(slabs)}"),
        ("live", format_bytes(report.live_bytes), "taken by pages"),
        ("free", format_bytes(report.free_bytes), "on disk, without a page"),
        ("map", format_bytes(report.map_bytes), f"reserved for the index, {share}"),
        ("readers", str(report.readers), readers),
    ):  # fmt: skip
        table.add_row(name, figure, note)
    return table


def _identity_table(report: StoreReport) -> Table:
    table = Table("namespace", "model", "page", "dtype", "codec", "also", title="Namespaces", title_justify="left")
    table.columns[0].justify = table.columns[2].justify = "right"
    for space in report.spaces:
        label = space.label
        also = ", ".join(f"{name} {value}" for name, value in _distinction(label))
        page = f"{label.get('layout.page_size')} tokens"
        row = (str(label.get("model")), page, str(label.get("layout.dtype")), str(label.get("codec")), also)
        table.add_row(str(space.number), *row)
    return table


def _distinction(label: dict[str, Field]) -> Iterator[tuple[str, Field]]:
    """What else tells a namespace from others."""
    shown = ("model", "codec", "layout.page_size", "layout.dtype", "format_version", "layout.kind")
    for name, value in label.items():
        if name not in shown and value is not None and value != _PLAIN.get(name):
            yield name.removeprefix("layout."), value


def _pages_table(report: StoreReport) -> Table:
    names = ("namespace", "pages", "chains", "live", "evicted", "expired", "quota", "policy", "ttl", "generation")
    table = Table(title="Pages", title_justify="left")
    for name in (*names, "oldest use", "newest use"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for space in report.spaces:
        table.add_row(*_pages_row(space))
    return table


def _pages_row(space: SpaceReport) -> Iterator[str]:
    yield str(space.number)
    yield f"{space.pages:,}"
    yield f"{space.chains:,}"
    yield format_bytes(space.live_bytes)
    yield f"{space.evicted:,}"
    yield f"{space.expired:,}"
    yield "–" if space.quota_bytes is None else format_bytes(space.quota_bytes)
    yield space.policy + (f", {space.protected:,} protected" if space.policy == "slru" else "")
    yield "–" if space.ttl_s is None else format_duration(space.ttl_s)
    yield f"{space.generation}" + (", being cleared" if space.clearing else "")
    yield format_age(space.oldest_age_s)
    yield format_age(space.newest_age_s)


def _slab_table(report: StoreReport) -> Table:
    table = Table(title="Slabs", title_justify="left")
    for name in ("slot", "used", "free", "in extents", "holes", "on disk"):
        table.add_column(name, justify="right")
    for slab in report.slabs:
        table.add_row(*_slab_row(slab))
    return table


def _slab_row(slab: SlabReport) -> Iterator[str]:
    yield format_bytes(slab.slot_bytes)
    yield f"{slab.used:,}"
    yield f"{slab.backed - slab.used:,}"
    yield f"{slab.free_extents:,}"
    yield f"{slab.holes:,}"
    yield format_bytes(slab.disk_bytes)


def print_compacted(done: Compacted) -> None:
    table = Table("file", box=None, pad_edge=False, header_style="bold")
    for name in ("before", "after"):
        table.add_column(name, justify="right")
    for name, sizes in done.files.items():
        table.add_row(name, format_bytes(sizes.before), format_bytes(sizes.after))
    before, after = (sum(getattr(sizes, way) for sizes in done.files.values()) for way in ("before", "after"))
    table.add_row("all", format_bytes(before), format_bytes(after))
    console().print(table, f"{done.moved:,} pages were moved", sep="\n")


def format_age(seconds: float | None) -> str:
    """An age for people: 7500 -> "2.1 h"."""
    if seconds is None:
        return "–"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
