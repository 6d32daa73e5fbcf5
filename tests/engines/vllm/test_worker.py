"""A rank's side alone: bytes of blocks, on the host and on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faulty import FaultyCopier

from hicache.errors import ConfigError
from hicache.integrations.vllm.jobs import BlockCopy, Load, Lookup, NamedPage, Persist, Read, StepPlan, Store
from hicache.integrations.vllm.settings import EngineFacts, load_settings
from hicache.integrations.vllm.worker import RankWorker, block_views

BLOCK, LAYERS, PLANE = 16, 3, 16 * 8
FACTS = EngineFacts("tiny", None, "w", "b", BLOCK, LAYERS, PLANE, num_blocks=8, device="cpu")
KEYS = [bytes([number]) * 32 for number in range(8)]


def copies(pages: dict[int, int]) -> list[BlockCopy]:
    """By block."""
    return [BlockCopy(block, page) for block, page in pages.items()]


def named(pages: dict[int, int]) -> list[NamedPage]:
    """By the number of the key."""
    return [NamedPage(KEYS[number], page) for number, page in pages.items()]


class Rank:
    def __init__(self, folder: Path, facts: EngineFacts = FACTS) -> None:
        file = folder / "tiers.yaml"
        disk = f"{{tier: storage, path: {folder / 'store'}, size: 64MiB}}"
        file.write_text(f"tiers:\n  - {{tier: host, size: 128 tokens}}\n  - {disk}\n")
        self.blocks = [torch.zeros(8, PLANE, dtype=torch.uint8) for _ in range(LAYERS)]
        self.worker: Any = RankWorker(load_settings(file, facts), self.blocks)
        self.ended: set[str] = set()

    def fill(self, block: int, value: int) -> None:
        for layer, plane in enumerate(self.blocks):
            plane[block] = value + layer

    def content(self, block: int) -> list[set[int]]:
        return [set(plane[block].tolist()) for plane in self.blocks]

    def step(self, **jobs: Any) -> dict[int, int]:
        """Results by job, once all have ended."""
        plan = StepPlan(**jobs)
        self.worker.begin(plan)
        self.worker.load(plan)
        self.worker.store(plan)
        wanted = {
            job.job for name in ("loads", "stores", "lookups", "reads", "persists") for job in getattr(plan, name)
        }
        results: dict[int, int] = {}
        end = time.monotonic() + 30
        while wanted - results.keys() and time.monotonic() < end:
            self.ended |= self.worker.finished_loads()
            report = self.worker.report()
            results |= {job: result for job, (_, result) in report.results.items()} if report is not None else {}
        assert wanted == results.keys()
        return results


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.worker.close()


def test_blocks_go_to_the_host_and_come_back_elsewhere(rank: Rank) -> None:
    rank.fill(2, 20)
    rank.fill(5, 50)
    assert rank.step(stores=[Store(1, "a", copies({2: 7, 5: 0}))]) == {1: 1}
    assert rank.step(loads=[Load(2, "b", copies({1: 0, 3: 7}))]) == {2: 1}
    assert rank.content(1) == [{50}, {51}, {52}] and rank.content(3) == [{20}, {21}, {22}]
    assert rank.ended == {"b"} and rank.worker.failed_blocks() == set()


def test_the_disk_keeps_pages_for_the_same_identity(rank: Rank, tmp_path: Path) -> None:
    rank.fill(2, 20)
    rank.fill(3, 30)
    stored = rank.step(stores=[Store(1, "a", copies({2: 0, 3: 1}))], persists=[Persist(2, named({0: 0, 1: 1}), None)])
    assert stored == {1: 1, 2: 2}
    assert rank.step(lookups=[Lookup(3, KEYS[:4])]) == {3: 2}
    rank.worker.close()
    again = Rank(tmp_path)
    assert again.step(reads=[Read(4, named({0: 6, 1: 5}))]) == {4: 2}
    again.step(loads=[Load(5, "b", copies({0: 6, 1: 5}))])
    assert again.content(0) == [{20}, {21}, {22}] and again.content(1) == [{30}, {31}, {32}]
    again.worker.close()
    other = Rank(tmp_path, EngineFacts(**{**vars(FACTS), "backend": "another instruction set"}))
    assert other.step(lookups=[Lookup(6, KEYS[:2])]) == {6: 0}
    other.worker.close()


def test_nothing_is_stored_on_top_of_a_load_that_failed(rank: Rank) -> None:
    """Neither what its request computed in the same step, nor a block that was to be loaded; nor on disk."""
    rank.step(stores=[Store(1, "a", copies({2: 0}))])
    rank.worker._copies.wrap_copier(lambda copier: FaultyCopier(copier, {"loads": 1}))
    plan = StepPlan(loads=[Load(2, "b", copies({4: 0}))])
    rank.worker.load(plan)
    while 2 in rank.worker._loads:
        rank.worker._look_at_loads()
    later = StepPlan(
        stores=[Store(3, "b", copies({5: 1})), Store(4, "c", copies({4: 2})), Store(5, "d", copies({6: 3}))],
        persists=[Persist(6, named({0: 1}), None)],
    )
    rank.worker.store(later)
    report = rank.worker.report()
    results = {job: result for job, (_, result) in report.results.items()}
    assert [results[job] for job in (2, 3, 4, 5, 6)] == [0, 0, 0, 1, 0]
    assert rank.worker.finished_loads() == {"b"} and rank.worker.failed_blocks() == {4}


def test_a_step_that_computes_nothing_rests_while_something_is_under_way(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    monkeypatch.setattr("hicache.integrations.vllm.worker.time.sleep", rests.append)
    rank.worker.rest(StepPlan(idle=True))
    assert rests == []
    rank.worker.begin(StepPlan(lookups=[Lookup(1, KEYS[:1])]))
    rank.worker.rest(StepPlan())
    assert rests == []
    rank.worker.rest(StepPlan(idle=True))
    assert len(rests) == 1


def test_kernel_blocks_and_layers_within_blocks_are_one_row() -> None:
    spec = SimpleNamespace(page_size_bytes=2 * 16 * 8 * 4)
    cache: Any = SimpleNamespace(num_blocks=4, kv_cache_groups=[SimpleNamespace(layer_names=["x"], kv_cache_spec=spec)])
    split = torch.arange(8 * 2 * 8 * 8, dtype=torch.float32).view(8, 2, 8, 8)
    (row,) = block_views(cache, {"x": split})
    assert row.shape == (4, 1024) and row[1].view(torch.float32).tolist() == list(range(256, 512))
    inside = torch.arange(4 * 3 * 2 * 16 * 8, dtype=torch.float32).view(4, 3, 2, 16, 8)[:, 1]
    (row,) = block_views(cache, {"x": inside})
    assert row.stride() == (3 * 1024, 1) and row[2].view(torch.float32)[0].item() == 2 * 768 + 256


def test_blocks_in_pieces_are_refused() -> None:
    spec = SimpleNamespace(page_size_bytes=2 * 16 * 8 * 4)
    cache: Any = SimpleNamespace(num_blocks=4, kv_cache_groups=[SimpleNamespace(layer_names=["x"], kv_cache_spec=spec)])
    heads_first = torch.zeros(2, 4, 16, 8).transpose(0, 1)
    with pytest.raises(ConfigError, match="not in one piece"):
        block_views(cache, {"x": heads_first})
