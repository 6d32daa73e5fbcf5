"""The model of the LMDB tier against the tier itself: the same calls, the same answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hicache.hashing import StoreIdentity
from hicache.layout import KVLayout
from hicache.sim.store_model import StoreModel, UnbackedMemory
from hicache.storage_backends.base import PageRun, StorageBackend
from hicache.storage_backends.budget import BudgetPlan
from hicache.storage_backends.lmdb_backend import Eviction, LmdbBackend
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.storage import blank_pages, chain

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=64, page_size=8)
IDENTITY = StoreIdentity(LAYOUT, "model")


class Pair:
    """Two backends that are asked the same, and must answer the same."""

    def __init__(self, real: StorageBackend, model: StorageBackend, seed: int) -> None:
        self.real, self.model = real, model
        self.random = np.random.default_rng(seed)
        self.buffers = blank_pages(LAYOUT, 64)
        self.chains: list[list[bytes]] = []
        self.written = 0

    def step(self) -> None:
        kind = self.random.integers(10)
        if kind < 4 or not self.chains:
            self.write()
        else:
            keys = self.chains[self.random.integers(len(self.chains))]
            keys = keys[: self.random.integers(1, len(keys) + 1)]
            if kind < 7:
                self.same(self.real.contains_prefix(keys), self.model.contains_prefix(keys))
            else:
                some = self.buffers[: len(keys)]
                self.same(self.real.read_into(keys, some), self.model.read_into(keys, some))
        self.same(self.real.usage().pages, self.model.usage().pages)
        self.same(self.real.usage().evicted_pages, self.model.usage().evicted_pages)

    def write(self) -> None:
        """A new chain, or a branch of an old one, and now and then another run in the same call."""
        runs = [self.run() for _ in range(self.random.integers(1, 3))]
        self.same(self.real.write(runs), self.model.write(runs))

    def run(self) -> PageRun:
        self.written += 1
        fresh = chain(f"chain {self.written}", int(self.random.integers(1, 40)))
        stem: list[bytes] = []
        if self.chains and self.random.random() < 0.6:
            stem = self.chains[self.random.integers(len(self.chains))]
            stem = stem[: self.random.integers(len(stem) + 1)][:24]
        keys = [*stem, *fresh]
        self.chains = [*self.chains[-30:], keys]
        cut = int(self.random.integers(len(stem) + 1)) if stem else 0
        return PageRun(keys[cut:], self.buffers[: len(keys) - cut], keys[cut - 1] if cut else None)

    def same(self, real: object, model: object) -> None:
        assert real == model


@pytest.mark.parametrize("eviction", ["lru", "slru", "fifo"])
@pytest.mark.parametrize("ttl", [0.0, 20.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_model_answers_as_the_lmdb_tier_does(tmp_path: Path, eviction: Eviction, ttl: float, seed: int) -> None:
    now = [1000.0]
    plan = BudgetPlan.for_pages("slab", 150, LAYOUT.page_stride)
    real = LmdbBackend(
        tmp_path / "store", IDENTITY, plan.budget_bytes, eviction=eviction, ttl=ttl, clock=lambda: now[0]
    )
    pair = Pair(real, StoreModel(plan, eviction, ttl, clock=lambda: now[0]), seed)
    try:
        for _ in range(150):
            now[0] += float(pair.random.exponential(0.5))
            pair.step()
        assert real.usage().evicted_pages > 100
    finally:
        real.close()


def test_a_quota_and_a_clear(tmp_path: Path) -> None:
    plan = BudgetPlan.for_pages("slab", 400, LAYOUT.page_stride)
    quota = 100 * LAYOUT.page_stride
    real = LmdbBackend(tmp_path / "store", IDENTITY, plan.budget_bytes, quota_bytes=quota)
    pair = Pair(real, StoreModel(plan, quota_bytes=quota), 5)
    try:
        for number in range(80):
            pair.step()
            if number == 50:
                pair.same(real.clear(), pair.model.clear())
                pair.same(real.generation(), pair.model.generation())
        assert 0 < real.usage().pages <= 100
    finally:
        real.close()


def test_delete_takes_what_is_below(tmp_path: Path) -> None:
    plan = BudgetPlan.for_pages("slab", 150, LAYOUT.page_stride)
    real = LmdbBackend(tmp_path / "store", IDENTITY, plan.budget_bytes)
    pair = Pair(real, StoreModel(plan), 7)
    try:
        for number in range(60):
            pair.step()
            if number % 10 == 9:
                keys = pair.chains[-1][2:4]
                pair.same(real.delete(keys), pair.model.delete(keys))
    finally:
        real.close()


def test_memory_without_its_memory() -> None:
    budget = 120 * LAYOUT.page_bytes
    pair = Pair(MemoryBackend(IDENTITY, budget), UnbackedMemory(IDENTITY, budget), 3)
    for _ in range(200):
        pair.step()
    assert pair.real.usage().evicted_pages > 100
