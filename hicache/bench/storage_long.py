"""The disk tier at its budget: a set of pages larger than memory is written over and over, then read cold.

Raw and slab take turns, an eighth of the set each: what else the machine does meets both. Each page carries its
number, so that a page with other bytes is found in a read that the store took for good.
"""

from __future__ import annotations

import os
import shutil
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hicache.bench.progress import Progress
from hicache.bench.storage_media import (
    GIB,
    batch_keys,
    blank_pages,
    drop_page_cache,
    opaque_layout,
    random_pages,
    scratch_folder,
)
from hicache.errors import ConfigError
from hicache.hashing import StoreIdentity
from hicache.layout import KVLayout
from hicache.storage_backends.base import PageRun
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.lmdb_env import DATA_FILE
from hicache.storage_backends.slab import SlabFile

SPARE_BYTES = 4 * GIB
"""Of the free disk that is left alone."""

BEYOND_MEMORY = 2 * GIB
SLICES = 8
SAMPLED_BATCHES = 32
"""One batch in so many is compared byte by byte."""

_WAYS = ("write", "read")
_PHASES = tuple(f"{name} {way}" for way in _WAYS for name in ("raw", "slab"))

_NUMBER = struct.Struct("<QQ")


@dataclass
class _Spent:
    """What one medium took for its share so far."""

    nbytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def run(self, work: Callable[[range], int], batches: range) -> None:
        started, cpu = time.perf_counter(), time.process_time()
        self.nbytes += work(batches)
        self.seconds += time.perf_counter() - started
        self.cpu_seconds += time.process_time() - cpu

    def figures(self) -> dict[str, float]:
        gib = max(self.nbytes, 1) / GIB
        return {
            "gb_per_s": self.nbytes / max(self.seconds, 1e-9) / 1e9,
            "cpu_s_per_gib": self.cpu_seconds / gib,
        }


def set_size(path: Path, memory_bytes: int | None = None) -> tuple[int, str]:
    """Bytes of the set to be written in `path`, and a note if that is less than it should be, for lack of disk."""
    wanted = (memory_bytes if memory_bytes is not None else _memory_bytes()) + BEYOND_MEMORY
    room = (shutil.disk_usage(path).free - SPARE_BYTES) // 2
    if room < GIB:
        raise ConfigError(f"bench path {path}: {room / GIB:.1f} GiB can be used, too little; give a folder with more")
    if room >= wanted:
        return wanted, ""
    return room, f"the disk has room for {room / GIB:.1f} GiB, less than memory: {wanted / GIB:.1f} GiB were wanted"


def run_long(
    path: Path,
    set_bytes: int,
    turnovers: int = 5,
    page_bytes: int = 2 << 20,
    batch: int = 16,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Write `turnovers` times `set_bytes` bytes to a store with that budget and to a raw file, then read what is there.

    Returns {set_bytes, turnovers, page_bytes, batch, raw, slab: {write, read: {gb_per_s, cpu_s_per_gib}},
    ratio_to_raw: {write, read}, budget_bytes, allocated_bytes: the most that the store took on disk, evicted_pages,
    read_pages, wrong_pages, missing_pages}. Raises ConfigError if it cannot be measured in `path`.
    """
    with scratch_folder(path) as folder:
        return _Long(folder, set_bytes, turnovers, opaque_layout(page_bytes), batch, progress).run()


@dataclass
class _Long:
    folder: Path
    set_bytes: int
    turnovers: int
    layout: KVLayout
    batch: int
    progress: Progress
    allocated_bytes: int = 0
    wrong_pages: int = 0
    missing_pages: int = 0
    read_pages: int = 0
    spent: dict[str, _Spent] = field(default_factory=lambda: {name: _Spent() for name in _PHASES})

    def run(self) -> dict[str, Any]:
        self.pages = random_pages(self.layout, self.batch)
        self.places = blank_pages(self.layout, self.batch)
        self.samples = [page.tobytes() for page in self.pages]
        self.raw = SlabFile(self.folder / "raw", self.layout.page_stride)
        self.in_set = max(1, self.set_bytes // (self.batch * self.layout.page_stride))
        self.raw.reserve(range(self.in_set * self.batch))
        self.store = self._open()
        try:
            self._write_all()
            evicted = self.store.usage().evicted_pages
            self._settle()
            self._read_all()
        finally:
            self.store.close()
            self.raw.close()
        return self._report(evicted)

    def _open(self) -> LmdbBackend:
        identity = StoreIdentity(self.layout, model="bench")
        return LmdbBackend(self.folder / "slab", identity, self.set_bytes)

    def _write_all(self) -> None:
        total = self.in_set * self.turnovers
        step = max(1, self.in_set // SLICES)
        for start in range(0, total, step):
            batches = range(start, min(start + step, total))
            self._tell("write", start, total)
            self.spent["raw write"].run(self._write_raw, batches)
            self.spent["slab write"].run(self._write_slab, batches)
            self.allocated_bytes = max(self.allocated_bytes, self.store.usage().used_bytes)

    def _read_all(self) -> None:
        """What the store can still have: the last set, without what its index takes."""
        total = self.in_set * self.turnovers
        present = [number for number in range(total - self.in_set, total) if self._is_present(number)]
        if not present:
            return
        step = max(1, len(present) // SLICES)
        for start in range(present[0], total, step):
            batches = range(start, min(start + step, total))
            self._tell("read", start - present[0], total - present[0])
            self.spent["raw read"].run(self._read_raw, batches)
            self.spent["slab read"].run(self._read_slab, batches)

    def _tell(self, what: str, done: int, total: int) -> None:
        size = self.batch * self.layout.page_bytes / GIB
        speeds = ", ".join(
            f"{name.split()[0]} {spent.figures()['gb_per_s']:.2f} GB/s"
            for name, spent in self.spent.items()
            if name.endswith(what)
        )
        self.progress(f"long {what}: {done * size:.1f} of {total * size:.1f} GiB, {speeds}")

    # ---- one share of one medium --------------------------------------------------------------

    def _write_raw(self, batches: range) -> int:
        for number in batches:
            self._stamp(number)
            self.raw.write(self._slots(number), self.pages)
        return self._bytes_of(batches)

    def _write_slab(self, batches: range) -> int:
        for number in batches:
            self._stamp(number)
            (count,) = self.store.write([PageRun(batch_keys(number, self.batch), self.pages, None)])
            self.missing_pages += self.batch - count
        return self._bytes_of(batches)

    def _read_raw(self, batches: range) -> int:
        for number in batches:
            self.raw.read(self._slots(number), self.places)
        return self._bytes_of(batches)

    def _read_slab(self, batches: range) -> int:
        for number in batches:
            count = self.store.read_into(batch_keys(number, self.batch), self.places)
            self.read_pages += count
            self.missing_pages += self.batch - count
            self._check(number, count)
        return self._bytes_of(batches)

    def _stamp(self, number: int) -> None:
        for index, page in enumerate(self.pages):
            _NUMBER.pack_into(page, 0, number, index)

    def _check(self, number: int, count: int) -> None:
        for index, place in enumerate(self.places[:count]):
            good = _NUMBER.unpack_from(place) == (number, index)
            if good and number % SAMPLED_BATCHES == 0:
                good = place[_NUMBER.size :] == self.samples[index][_NUMBER.size :]
            self.wrong_pages += not good

    def _is_present(self, number: int) -> bool:
        return self.store.contains_prefix(batch_keys(number, self.batch)) == self.batch

    def _slots(self, number: int) -> Sequence[int]:
        first = number % self.in_set * self.batch
        return range(first, first + self.batch)

    def _bytes_of(self, batches: range) -> int:
        return len(batches) * self.batch * self.layout.page_bytes

    def _settle(self) -> None:
        """What is mapped cannot be dropped from the page cache."""
        self.store.close()
        self.raw.sync()
        drop_page_cache(self.folder / "slab" / DATA_FILE)
        self.store = self._open()

    def _report(self, evicted: int) -> dict[str, Any]:
        figures = {name: {way: self.spent[f"{name} {way}"].figures() for way in _WAYS} for name in ("raw", "slab")}
        ratios = {way: figures["slab"][way]["gb_per_s"] / max(figures["raw"][way]["gb_per_s"], 1e-9) for way in _WAYS}
        return {
            "set_bytes": self.set_bytes,
            "turnovers": self.turnovers,
            "page_bytes": self.layout.page_bytes,
            "batch": self.batch,
            **figures,
            "ratio_to_raw": ratios,
            "budget_bytes": self.set_bytes,
            "allocated_bytes": self.allocated_bytes,
            "evicted_pages": evicted,
            "read_pages": self.read_pages,
            "wrong_pages": self.wrong_pages,
            "missing_pages": self.missing_pages,
        }


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
