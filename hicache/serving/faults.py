"""Faults for the stress run: a disk tier that fails, lies and dawdles, and copies that break off."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hicache.cache import HiCache
from hicache.kernels.base import PageCopier, PageCopy
from hicache.storage_backends import registry
from hicache.storage_backends.base import StorageBackend
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.registry import BackendSpec
from hicache.storage_backends.wrappers import FaultyBackend, SlowBackend
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


class FaultyCopier:
    """Copies that break off at random, with probability `rate` a call: half before, half after they were made.

    Each direction has a stream, which may have a thread, and dice of its own.
    """

    def __init__(self, inner: PageCopier, rate: float, seed: int) -> None:
        self.injected = 0
        self._inner = inner
        self._rate = rate
        self._down, self._up = random.Random(f"{seed} down"), random.Random(f"{seed} up")

    def copy(self, device_pages: PageIndices, host_pages: PageIndices) -> PageCopy:
        """See PageCopier."""
        return _FaultyCopy(self, self._inner.copy(device_pages, host_pages))

    def gather(self, copy: PageCopy) -> None:
        """Work of one of its copies."""
        self._attempt(self._down, copy.gather)

    def scatter(self, copy: PageCopy, first_plane: int, count: int) -> None:
        """Work of one of its copies."""
        self._attempt(self._up, partial(copy.scatter, first_plane, count))

    def _attempt(self, dice: random.Random, work: Callable[[], None]) -> None:
        fails = dice.random() < self._rate
        if not fails or dice.random() < 0.5:
            work()
        if fails:
            self.injected += 1
            raise OSError("injected failure of a copy")


@dataclass(frozen=True)
class _FaultyCopy:
    owner: FaultyCopier
    inner: PageCopy

    def gather(self) -> None:
        """See PageCopy."""
        self.owner.gather(self.inner)

    def scatter(self, first_plane: int, count: int) -> None:
        """See PageCopy."""
        self.owner.scatter(self.inner, first_plane, count)


def break_copies(cache: HiCache, rate: float, seed: int) -> FaultyCopier:
    """Let copies between device and host of a new cache fail. It needs a host tier."""
    host = cache.tiers.host
    assert host is not None
    return host.copies.wrap_copier(lambda copier: FaultyCopier(copier, rate, seed))
