"""Faults for the stress run: a disk tier that fails, lies and dawdles, and copies that break off."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hicache.cache import HiCache
from hicache.host_pool.pool import HostPool
from hicache.kernels.dispatch import CopyKernels, select_kernels
from hicache.kernels.reference import Bytes2D
from hicache.storage_backends import registry
from hicache.storage_backends.base import StorageBackend
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.registry import BackendSpec
from hicache.storage_backends.wrappers import FaultyBackend, SlowBackend
from hicache.streams import create_stream
from hicache.transfer.copy_engine import CopyEngine
from hicache.types import PageIndices

FAULTY_DISK = "faulty-lmdb"
"""Name of a storage backend with the options `rate`, `seed`, and `delay` in seconds per call."""


def register_faulty_disk() -> None:
    """Make FAULTY_DISK known to configurations. Any number of times."""
    if FAULTY_DISK not in registry.names():
        registry.register(FAULTY_DISK, _create)


def _create(spec: BackendSpec) -> StorageBackend:
    spec.check_options(FAULTY_DISK, "rate", "seed", "delay")
    assert spec.path is not None
    disk = LmdbBackend(spec.path, spec.identity, spec.budget_bytes, durability="none")
    slow = SlowBackend(disk, per_call=float(spec.options.get("delay", 0.0)))
    return FaultyBackend(slow, float(spec.options.get("rate", 0.0)), int(spec.options.get("seed", 0)), disk)


class FaultyKernels:
    """Copies that break off at random, with probability `rate` a call: half before, half after they were made.

    Each direction has a stream, hence a thread, and dice of its own.
    """

    def __init__(self, inner: CopyKernels, rate: float, seed: int) -> None:
        self.injected = 0
        self._inner = inner
        self._rate = rate
        self._down, self._up = random.Random(f"{seed} down"), random.Random(f"{seed} up")

    def gather(
        self, planes: Sequence[Bytes2D], device_pages: PageIndices, host: Bytes2D, host_pages: PageIndices
    ) -> None:
        """See CopyKernels."""
        fails = self._down.random() < self._rate
        if not fails or self._down.random() < 0.5:
            self._inner.gather(planes, device_pages, host, host_pages)
        self._break_off(fails)

    def scatter(
        self,
        planes: Sequence[Bytes2D],
        device_pages: PageIndices,
        host: Bytes2D,
        host_pages: PageIndices,
        first_plane: int,
    ) -> None:
        """See CopyKernels."""
        fails = self._up.random() < self._rate
        if not fails or self._up.random() < 0.5:
            self._inner.scatter(planes, device_pages, host, host_pages, first_plane)
        self._break_off(fails)

    def _break_off(self, fails: bool) -> None:
        if fails:
            self.injected += 1
            raise OSError("injected failure of a copy")


def break_copies(cache: HiCache, rate: float, seed: int) -> FaultyKernels:
    """Let copies between device and host of a new cache fail. It needs a host tier."""
    host, pool = cache.tiers.host, cache.tiers.device_pool
    assert host is not None and isinstance(host.pool, HostPool)
    kernels = FaultyKernels(select_kernels(pool.device), rate, seed)
    host.copies.close()
    d2h, h2d = (create_stream(pool.device, name) for name in ("d2h", "h2d"))
    host.copies = CopyEngine(pool, host.pool, d2h, h2d, kernels)
    return kernels
