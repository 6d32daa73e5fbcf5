"""Every backend that ships keeps the promises of a storage backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hicache.hashing import StoreIdentity
from hicache.layout import KVLayout
from hicache.storage_backends.base import StorageBackend
from hicache.storage_backends.budget import ValuesMode
from hicache.storage_backends.lmdb_backend import Eviction, LmdbBackend
from hicache.storage_backends.memory import MemoryBackend
from hicache.storage_backends.recovering import RecoveringBackend
from hicache.storage_backends.wrappers import FaultyBackend, SlowBackend
from hicache.testing.storage import IDENTITY, OpenBackend, StorageConformance

PADDED = StoreIdentity(KVLayout(num_layers=3, num_kv_heads=1, head_dim=64, page_size=4), model="padded")
"""Pages of 3 KiB in slots of 4 KiB."""

QUANTISED = StoreIdentity(KVLayout(2, 1, 128, 8), model="quantised", codec="fp8")
"""Pages of 8 KiB, which a host tier of this codec has as 16 bytes of scales and 4 KiB of codes."""

LMDB_BUDGET = 4 << 20
MEMORY_BUDGET = 3 << 20


class MemoryConformance(StorageConformance):
    @pytest.fixture
    def backend_factory(self) -> OpenBackend:
        return lambda: MemoryBackend(self.identity, MEMORY_BUDGET)

    def damage(self, backend: StorageBackend, key: bytes) -> None:
        assert isinstance(backend, MemoryBackend)
        assert backend.flip_byte(key)


class TestMemory(MemoryConformance):
    pass


class TestMemoryQuantisedHost(MemoryConformance):
    identity = QUANTISED
    encoded = True


class LmdbConformance(StorageConformance):
    persistent = True
    values: ValuesMode = "slab"
    eviction: Eviction = "lru"

    @pytest.fixture
    def backend_factory(self, tmp_path: Path) -> Iterator[OpenBackend]:
        opened: list[LmdbBackend] = []

        def factory() -> StorageBackend:
            path = tmp_path / "store"
            options = (self.values, "none", self.eviction)
            opened.append(LmdbBackend(path, self.identity, LMDB_BUDGET, *options, encoded=self.encoded))
            return opened[-1]

        yield factory
        for backend in opened:
            backend.close()

    def damage(self, backend: StorageBackend, key: bytes) -> None:
        assert isinstance(backend, LmdbBackend)
        assert backend.flip_byte(key)


class TestLmdbSlab(LmdbConformance):
    pass


class TestLmdbInline(LmdbConformance):
    values: ValuesMode = "inline"


class TestLmdbSlabPadded(LmdbConformance):
    identity = PADDED


class TestLmdbInlinePadded(LmdbConformance):
    identity = PADDED
    values: ValuesMode = "inline"


class TestLmdbSlabCompressed(LmdbConformance):
    identity = replace(IDENTITY, codec="zstd")


class TestLmdbInlineCompressed(LmdbConformance):
    identity = replace(IDENTITY, codec="zstd")
    values: ValuesMode = "inline"


class TestLmdbSlabQuantisedHost(LmdbConformance):
    identity = QUANTISED
    encoded = True


class TestLmdbInlineQuantisedHost(LmdbConformance):
    identity = QUANTISED
    values: ValuesMode = "inline"
    encoded = True


class TestLmdbSlabSlru(LmdbConformance):
    eviction: Eviction = "slru"


class TestFaultyWithoutFaults(MemoryConformance):
    @pytest.fixture
    def backend_factory(self) -> OpenBackend:
        return lambda: FaultyBackend(MemoryBackend(self.identity, MEMORY_BUDGET))

    def damage(self, backend: StorageBackend, key: bytes) -> None:
        assert isinstance(backend, FaultyBackend)
        super().damage(backend.inner, key)


class TestSlow(MemoryConformance):
    @pytest.fixture
    def backend_factory(self) -> OpenBackend:
        return lambda: SlowBackend(MemoryBackend(self.identity, MEMORY_BUDGET), per_call=1, sleep=lambda _: None)

    def damage(self, backend: StorageBackend, key: bytes) -> None:
        assert isinstance(backend, SlowBackend)
        super().damage(backend.inner, key)


class TestRecovering(MemoryConformance):
    @pytest.fixture
    def backend_factory(self) -> OpenBackend:
        def factory() -> StorageBackend:
            store = RecoveringBackend(self.make)
            store.open()
            return store

        return factory

    def make(self) -> StorageBackend:
        self.inner = MemoryBackend(self.identity, MEMORY_BUDGET)
        return self.inner

    def damage(self, backend: StorageBackend, key: bytes) -> None:
        super().damage(self.inner, key)
