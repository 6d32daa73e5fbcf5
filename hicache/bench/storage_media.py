"""What `hicache bench storage` measures with: a raw O_DIRECT file and stores, given the same batches of pages."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

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
class Job:
    """`batches` batches of `batch` pages; the pages of each batch are those in `buffers`."""

    layout: KVLayout
    batch: int
    batches: int
    buffers: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        return self.batch * self.batches * self.layout.page_bytes


@dataclass(frozen=True)
class Measured:
    """Speed in 1e9 bytes of pages per second, and CPU time of the process, user and system, per 2^30 bytes of pages."""

    gb_per_s: float
    cpu_s_per_gib: float


@dataclass(frozen=True)
class _Medium:
    """Two passes over the job's batches, by number, and what must happen in between for a cold read."""

    write: Callable[[int], None]
    read: Callable[[int], None]
    settle: Callable[[], None]


def opaque_layout(page_bytes: int) -> KVLayout:
    """A layout with pages of so many bytes, a multiple of 4."""
    return KVLayout(num_layers=1, num_kv_heads=1, head_dim=page_bytes // 4, page_size=1, dtype="float16")


def random_pages(layout: KVLayout, count: int) -> list[memoryview]:
    """Aligned pages of random bytes."""
    pages = blank_pages(layout, count)
    for number, page in enumerate(pages):
        np.frombuffer(page, np.uint8)[:] = np.random.default_rng(number).integers(0, 256, page.nbytes, np.uint8)
    return pages


def blank_pages(layout: KVLayout, count: int) -> list[memoryview]:
    """Aligned pages of zeros, touched once so that a measurement does not wait for memory."""
    view = memoryview(mmap.mmap(-1, count * layout.page_stride))
    np.frombuffer(view, np.uint8)[::4096] = 0
    return [view[start : start + layout.page_stride] for start in range(0, view.nbytes, layout.page_stride)]


def measure_raw(path: Path, job: Job, synced: bool = False) -> dict[str, Measured]:
    """A file of slots without an index, beneath which nothing is cheaper. `synced`: durable after each batch."""
    slab = SlabFile(path, job.layout.page_stride)

    def slots(batch: int) -> range:
        return range(batch * job.batch, (batch + 1) * job.batch)

    def write(batch: int) -> None:
        slab.write(slots(batch), job.buffers)
        if synced:
            slab.sync()

    try:
        slab.reserve(range(job.batches * job.batch))
        return _measure(
            job,
            _Medium(
                write=write,
                read=lambda batch: slab.read(slots(batch), job.buffers),
                settle=slab.sync,
            ),
        )
    finally:
        slab.close()
        path.unlink()


def measure_store(
    path: Path, job: Job, values: ValuesMode, durability: Durability = "batch", codec: str = "none"
) -> dict[str, Measured]:
    """A store in the folder `path`, which is removed. Raises IntegrityError if a page comes back with other bytes;
    that of a codec that is not exact must come back, only."""
    budget = 2 * job.nbytes + (256 << 20)  # nothing is evicted
    identity = StoreIdentity(job.layout, model="bench", codec=codec)
    places = blank_pages(job.layout, job.batch)

    def opened() -> LmdbBackend:
        return LmdbBackend(path, identity, budget, values, durability)

    store = opened()

    def write(batch: int) -> None:
        if store.write([PageRun(batch_keys(batch, job.batch), job.buffers, None)]) != [job.batch]:
            raise IntegrityError(f"{values}: batch {batch} was not stored")

    def read(batch: int) -> None:
        if store.read_into(batch_keys(batch, job.batch), places) != job.batch:
            raise IntegrityError(f"{values}: batch {batch} did not come back")

    def settle() -> None:
        nonlocal store
        store.close()  # what is mapped cannot be dropped from the page cache
        drop_page_cache(path / DATA_FILE)
        store = opened()

    try:
        figures = _measure(job, _Medium(write, read, settle))
        if codec in ("none", "zstd", "lz4") and places != job.buffers:
            raise IntegrityError(f"{values}, codec {codec}: a page came back with other bytes")
        return figures
    finally:
        store.close()
        shutil.rmtree(path)


def batch_keys(batch: int, pages: int) -> list[bytes]:
    return [sha256(f"{batch} {page}".encode()).digest() for page in range(pages)]


def drop_page_cache(path: Path) -> None:
    """Make the next read of a file come from the disk."""
    with open(path, "rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """A new folder in `path`, which is removed at the end. Raises ConfigError."""
    folder = path / f"hicache-bench-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"bench path {path}: {error.strerror}; give a folder that can be written") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _measure(job: Job, medium: _Medium) -> dict[str, Measured]:
    def write_all() -> None:
        for batch in range(job.batches):
            medium.write(batch)

    def read_all() -> None:
        for batch in range(job.batches):
            medium.read(batch)

    written = _timed(write_all, job.nbytes)
    medium.settle()
    return {"write": written, "read": _timed(read_all, job.nbytes)}


def _timed(work: Callable[[], None], nbytes: int) -> Measured:
    started, cpu = time.perf_counter(), time.process_time()
    work()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    return Measured(nbytes / seconds / 1e9, cpu_seconds / (nbytes / GIB))
