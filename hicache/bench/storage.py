"""`hicache bench storage`: the disk tier beside a raw O_DIRECT file, in one run on the same pages.

Every medium gets the same batches: write all, then read all cold. Raw writes are made durable once
at the end, the store's after each batch if `durability` says so.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from hicache.errors import ConfigError, IntegrityError
from hicache.hashing import StoreIdentity
from hicache.layout import KVLayout
from hicache.storage_backends.base import PageRun
from hicache.storage_backends.budget import ValuesMode
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.lmdb_env import DATA_FILE, Durability
from hicache.storage_backends.slab import SlabFile

GIB = 1 << 30


@dataclass(frozen=True)
class _Job:
    layout: KVLayout
    batch: int
    batches: int
    buffers: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        return self.batch * self.batches * self.layout.page_bytes


@dataclass(frozen=True)
class _Measured:
    gb_per_s: float
    cpu_s_per_gib: float


@dataclass(frozen=True)
class _Medium:
    """Two passes over the job's batches, by number, and what must happen in between for a cold read."""

    write: Callable[[int], None]
    read: Callable[[int], None]
    settle: Callable[[], None]


def run(
    path: Path,
    page_bytes: int = 2 << 20,
    batch: int = 16,
    total_bytes: int = GIB,
    durability: Durability = "batch",
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure in a new folder inside `path`, which is removed at the end.

    Returns {page_bytes, batch, total_bytes, media: {raw, slab, inline: {write, read: {gb_per_s,
    cpu_s_per_gib}}}, ratio_to_raw: {slab, inline: {write, read}}}. Raises ConfigError for sizes
    that cannot be measured, IntegrityError if a page comes back with other bytes.
    """
    job = _job(page_bytes, batch, total_bytes)
    media: dict[str, dict[str, _Measured]] = {}
    with _scratch(Path(path)) as folder:
        progress("raw")
        media["raw"] = _measure_raw(folder / "raw", job)
        values: ValuesMode
        for values in ("slab", "inline"):
            progress(values)
            media[values] = _measure_store(folder / values, job, values, durability)
    ratios = {
        name: {way: media[name][way].gb_per_s / media["raw"][way].gb_per_s for way in ("write", "read")}
        for name in ("slab", "inline")
    }
    return {
        "page_bytes": page_bytes,
        "batch": batch,
        "total_bytes": job.nbytes,
        "durability": durability,
        "media": {name: {way: asdict(figure) for way, figure in ways.items()} for name, ways in media.items()},
        "ratio_to_raw": ratios,
    }


def _job(page_bytes: int, batch: int, total_bytes: int) -> _Job:
    if page_bytes < 4 or page_bytes % 4 or batch < 1 or total_bytes < page_bytes * batch:
        raise ConfigError(
            f"page_bytes {page_bytes}, batch {batch}, total_bytes {total_bytes}: "
            "a page is a multiple of 4 bytes, and the total is at least one batch"
        )
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=page_bytes // 4, page_size=1, dtype="float16")
    return _Job(layout, batch, total_bytes // (page_bytes * batch), _pages(layout, batch))


def _pages(layout: KVLayout, count: int) -> list[memoryview]:
    """Aligned pages of random bytes."""
    arena = mmap.mmap(-1, count * layout.page_stride)
    np.frombuffer(arena, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, len(arena), np.uint8)
    view = memoryview(arena)
    return [view[start : start + layout.page_stride] for start in range(0, len(arena), layout.page_stride)]


def _measure_raw(path: Path, job: _Job) -> dict[str, _Measured]:
    slab = SlabFile(path, job.layout.page_stride)

    def slots(batch: int) -> range:
        return range(batch * job.batch, (batch + 1) * job.batch)

    try:
        slab.reserve(range(job.batches * job.batch))
        return _measure(
            job,
            _Medium(
                write=lambda batch: slab.write(slots(batch), job.buffers),
                read=lambda batch: slab.read(slots(batch), job.buffers),
                settle=slab.sync,
            ),
        )
    finally:
        slab.close()
        path.unlink()


def _measure_store(path: Path, job: _Job, values: ValuesMode, durability: Durability) -> dict[str, _Measured]:
    budget = 2 * job.nbytes + (256 << 20)  # nothing is evicted
    first_page = job.buffers[0].tobytes()

    def opened() -> LmdbBackend:
        return LmdbBackend(path, StoreIdentity(job.layout, model="bench"), budget, values, durability)

    store = opened()

    def write(batch: int) -> None:
        if store.write([PageRun(_keys(batch, job.batch), job.buffers, None)]) != [job.batch]:
            raise IntegrityError(f"{values}: batch {batch} was not stored")

    def read(batch: int) -> None:
        if store.read_into(_keys(batch, job.batch), job.buffers) != job.batch:
            raise IntegrityError(f"{values}: batch {batch} did not come back")

    def settle() -> None:
        nonlocal store
        store.close()  # what is mapped cannot be dropped from the page cache
        _drop_page_cache(path / DATA_FILE)
        store = opened()

    try:
        figures = _measure(job, _Medium(write, read, settle))
        if job.buffers[0] != first_page:
            raise IntegrityError(f"{values}: a page came back with other bytes")
        return figures
    finally:
        store.close()
        shutil.rmtree(path)


def _measure(job: _Job, medium: _Medium) -> dict[str, _Measured]:
    def write_all() -> None:
        for batch in range(job.batches):
            medium.write(batch)

    def read_all() -> None:
        for batch in range(job.batches):
            medium.read(batch)

    written = _timed(write_all, job.nbytes)
    medium.settle()
    return {"write": written, "read": _timed(read_all, job.nbytes)}


def _timed(work: Callable[[], None], nbytes: int) -> _Measured:
    started, cpu = time.perf_counter(), time.process_time()
    work()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    return _Measured(nbytes / seconds / 1e9, cpu_seconds / (nbytes / GIB))


def _keys(batch: int, pages: int) -> list[bytes]:
    return [sha256(f"{batch} {page}".encode()).digest() for page in range(pages)]


def _drop_page_cache(path: Path) -> None:
    """Make the next read of a file come from the disk."""
    with open(path, "rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    folder = path / f"hicache-bench-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"bench path {path}: {error.strerror}; give a folder that can be written") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
