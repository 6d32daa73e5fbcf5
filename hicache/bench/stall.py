"""`hicache bench stall`: does the scheduler thread notice that the storage tier writes at full speed?

The scheduler thread matches long prefixes, with pauses in which a server would wait for its model, first with
idle storage, then with storage writing fresh pages without end. The pauses let the writers run, and
make every match begin while one of them may hold the interpreter lock.
"""

from __future__ import annotations

import gc
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache.bench.progress import Progress
from hicache.layout import KVLayout
from hicache.types import PrefixKey

if TYPE_CHECKING:
    from hicache.cache import HiCache
    from hicache.transfer.storage_engine import StorageEngine

TARGET_RATIO = 2.0
LAYOUT = KVLayout(num_layers=8, num_kv_heads=8, head_dim=128, page_size=64)
"""A page of 2 MiB."""

BATCH_PAGES = 16
QUEUED_BATCHES = 4
STORE_PAGES = 512
"""The store turns over while it is measured: writing includes eviction."""

PAUSE_SECONDS = 0.001


@dataclass(frozen=True)
class _Load:
    conversations: int = 200
    tokens: int = 12_288
    seconds: float = 6.0


_QUICK = _Load(10, 2_048, 0.3)


def run(
    folder: Path | None = None,
    backend: str = "lmdb",
    quick: bool = False,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Measure with a store in a new folder inside `folder` (default: the system's for temporary files).

    Returns {backend, idle, writing: {p50_us, p99_us, max_us, matches}, written_gb_per_s, ratio, target, met};
    `ratio` is that of the two p99. Raises ConfigError for an unknown backend or a folder that cannot be used.
    """
    load = _QUICK if quick else _Load()
    with ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=folder))
        cache, engine = _cache(backend, Path(place) / "store")
        stack.callback(engine.close)
        keys = _fill_tree(cache, load)
        writer = _Writer(engine)
        progress("idle")
        idle = _match_seconds(cache, keys, load.seconds, lambda: None)
        progress("writing")
        writer.refill()
        start = time.perf_counter()
        writing = _match_seconds(cache, keys, load.seconds, writer.refill)
        speed = writer.stored_bytes / (time.perf_counter() - start) / 1e9
    return _summary(backend, idle, writing, speed)


def _summary(backend: str, idle: Sequence[float], writing: Sequence[float], speed: float) -> dict[str, Any]:
    ratio = float(np.percentile(writing, 99) / np.percentile(idle, 99))
    return {
        "backend": backend,
        "page_bytes": LAYOUT.page_bytes,
        "idle": _percentiles(idle),
        "writing": _percentiles(writing),
        "written_gb_per_s": round(speed, 3),
        "ratio": round(ratio, 2),
        "target": TARGET_RATIO,
        "met": ratio <= TARGET_RATIO,
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, Any]:
    p50, p99, most = (round(float(value) * 1e6, 1) for value in np.percentile(seconds, (50, 99, 100)))
    return {"p50_us": p50, "p99_us": p99, "max_us": most, "matches": len(seconds)}


def _cache(backend: str, path: Path) -> tuple[HiCache, StorageEngine]:
    """A cache whose tree the matches go to and whose storage engine is written to directly."""
    from hicache.cache import HiCache
    from hicache.device_pool import DevicePool, TokenToKVPoolAllocator
    from hicache.hashing import StoreIdentity
    from hicache.storage_backends.registry import BackendSpec, create
    from hicache.tiers import StorageTier, Tiers
    from hicache.transfer.storage_engine import EngineLimits, StorageEngine
    from hicache.tree.radix_tree import RadixTree

    identity = StoreIdentity(LAYOUT, model="bench")
    store = create(backend, BackendSpec(identity, STORE_PAGES * LAYOUT.page_stride, path))
    limits = EngineLimits(QUEUED_BATCHES * BATCH_PAGES * LAYOUT.page_stride)
    engine = StorageEngine(store, LAYOUT.page_size, limits)
    pool, allocator = DevicePool(LAYOUT, 1), TokenToKVPoolAllocator(1, LAYOUT.page_size)
    tiers = Tiers(identity, RadixTree(LAYOUT.page_size), pool, allocator, storage=StorageTier(engine))
    return HiCache(tiers), engine


def _fill_tree(cache: HiCache, load: _Load) -> list[PrefixKey]:
    """Conversations in turns of 256 tokens. No byte of their pages is looked at, so they need none."""
    rng = np.random.default_rng(0)
    keys = [PrefixKey.of(rng.integers(0, 128_000, load.tokens, dtype=np.int32)) for _ in range(load.conversations)]
    pages = np.arange(load.tokens // LAYOUT.page_size, dtype=np.int32)
    for key in keys:
        for end in range(256, load.tokens + 1, 256):
            cache.tiers.tree.insert(key.head(end), pages[: end // LAYOUT.page_size])
    return keys


class _Writer:
    """Keeps the queue of a storage engine full of pages that it has not seen."""

    def __init__(self, engine: StorageEngine) -> None:
        self._engine = engine
        self._arena = mmap.mmap(-1, BATCH_PAGES * LAYOUT.page_stride)
        np.frombuffer(self._arena, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, len(self._arena), np.uint8)
        view, stride = memoryview(self._arena), LAYOUT.page_stride
        self._buffers = [view[start : start + stride] for start in range(0, len(view), stride)]
        self._queued: list[Any] = []
        self._batch_bytes = BATCH_PAGES * LAYOUT.page_bytes
        self.stored_bytes = 0

    def refill(self) -> None:
        from hicache.storage_backends.base import PageRun

        for ticket in [ticket for ticket in self._queued if ticket.done]:
            if ticket.error is not None:
                raise ticket.error
            self.stored_bytes += sum(ticket.counts) * LAYOUT.page_bytes
            self._queued.remove(ticket)
        while len(self._queued) < QUEUED_BATCHES:
            keys = [os.urandom(32) for _ in self._buffers]
            ticket = self._engine.write([PageRun(keys, self._buffers, None)], self._batch_bytes)
            if ticket is None:
                return
            self._queued.append(ticket)


def _match_seconds(
    cache: HiCache, keys: Sequence[PrefixKey], seconds: float, between: Callable[[], None]
) -> list[float]:
    taken: list[float] = []
    gc.collect()
    gc.freeze()
    until = time.perf_counter() + seconds
    while (start := time.perf_counter()) < until:
        cache.match_prefix(keys[len(taken) % len(keys)])
        taken.append(time.perf_counter() - start)
        between()
        time.sleep(PAUSE_SECONDS)
    gc.unfreeze()
    return taken
