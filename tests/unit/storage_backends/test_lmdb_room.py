"""A hard budget: what index and slabs take on disk, whatever is written; a map that fills up; room that is reused."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest

from hicache.errors import StoreUnavailableError
from hicache.storage_backends import budget, lmdb_transactions
from hicache.storage_backends.budget import BudgetPlan, ValuesMode
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.lmdb_damage import used_data_bytes
from hicache.storage_backends.lmdb_env import DATA_FILE
from hicache.storage_backends.lmdb_index import IndexWriter
from hicache.storage_backends.slab import SlabFile
from hicache.testing.audit import audit, disk_bytes
from hicache.testing.processes import forked
from hicache.testing.storage import IDENTITY, chain, read_checked, run_of

LAYOUT = IDENTITY.layout
OTHER = replace(IDENTITY, model="other")
BUDGET = 4 << 20
MODES: list[ValuesMode] = ["slab", "inline"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


def open_store(path: Path, values: ValuesMode = "slab", budget_bytes: int = BUDGET, **options: Any) -> LmdbBackend:
    identity = options.pop("identity", IDENTITY)
    return LmdbBackend(path, identity, budget_bytes, values, **{"durability": "none", **options})


def write(store: LmdbBackend, name: str, length: int = 32) -> None:
    assert store.write([run_of(LAYOUT, chain(name, length))]) == [length]


def read(store: LmdbBackend, name: str, length: int = 32) -> int:
    return read_checked(store, LAYOUT, chain(name, length))


# ---- blocks on disk -------------------------------------------------------------------------------


@pytest.fixture
def peak(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The most bytes that the files took, within transactions too."""
    most = [0]

    def sampled(real: Any) -> Any:
        def call(*args: Any) -> Any:
            result = real(*args)
            most[0] = max(most[0], disk_bytes(path))
            return result

        return call

    for owner, name in ((SlabFile, "write"), (SlabFile, "reserve"), (LmdbBackend, "write")):
        monkeypatch.setattr(owner, name, sampled(getattr(owner, name)))
    return most


@pytest.mark.parametrize("values", MODES)
@pytest.mark.parametrize("identities", [[IDENTITY], [IDENTITY, OTHER]], ids=["one", "two"])
def test_sixteen_budgets_go_through_one(path: Path, values: ValuesMode, identities: list[Any], peak: list[int]) -> None:
    """In batches of several sizes, with pages being used and removed meanwhile."""
    rng = random.Random(0)
    stores = [open_store(path, values, identity=identity) for identity in identities]
    written = number = 0
    while written < 16 * BUDGET:
        store, length = stores[number % len(stores)], rng.choice([1, 8, 32, 100])
        write(store, f"{number}", length)
        written += length * LAYOUT.page_stride
        if number % 7 == 0:
            read(store, f"{rng.randrange(number + 1)}", 1)
        if number % 11 == 0:
            store.delete(chain(f"{number - 2 * rng.randrange(5)}", 8)[4:])
        number += 1
    assert BUDGET // 4 < peak[0] <= BUDGET
    for store in stores:
        assert store.usage().used_bytes <= BUDGET
        audit(store)
        store.close()
    assert disk_bytes(path) <= BUDGET


def test_a_lower_budget_shrinks_the_store_before_anything_is_written(path: Path) -> None:
    store = open_store(path, budget_bytes=4 * BUDGET)
    for number in range(100):
        write(store, f"{number}")
    store.close()
    assert disk_bytes(path) > 2 * BUDGET
    for budget_bytes in (2 * BUDGET, BUDGET):
        store = open_store(path, budget_bytes=budget_bytes, shrink=True)
        assert disk_bytes(path) <= budget_bytes
        assert store.usage().budget_bytes == budget_bytes
        assert read(store, "99") == 32, "the oldest went first"
        assert read(store, "0") == 0
        audit(store)
        store.close()


def test_a_higher_budget_is_used(path: Path) -> None:
    for budget_bytes in (BUDGET, 4 * BUDGET):
        store = open_store(path, budget_bytes=budget_bytes)
        for number in range(130):
            write(store, f"{budget_bytes} {number}")
        audit(store)
        store.close()
        assert budget_bytes // 2 < disk_bytes(path) <= budget_bytes


@pytest.mark.parametrize("values", MODES)
def test_a_writer_killed_half_way_leaves_no_more_than_the_budget(path: Path, values: ValuesMode) -> None:
    def write_on(pipe: Any) -> None:
        store, number = open_store(path, values), 0
        while True:
            write(store, f"{number}")
            pipe.send(number)
            number += 1

    with forked(write_on) as process:
        while process.receive() < 60:
            assert disk_bytes(path) <= BUDGET
        process.kill()
    assert disk_bytes(path) <= BUDGET
    store = open_store(path, values)
    assert disk_bytes(path) <= BUDGET
    assert sum(read(store, f"{number}") for number in range(1000)) == store.usage().pages > 100
    audit(store)
    store.close()


# ---- a map that fills up --------------------------------------------------------------------------


@pytest.fixture
def small_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """The map is made far too small for the pages that there is room for."""
    monkeypatch.setattr(budget, "INDEX_BYTES_PER_PAGE", 16)
    monkeypatch.setattr(BudgetPlan, "_working_bytes", property(lambda self: 128 << 10))


@pytest.mark.usefixtures("small_map")
def test_a_full_map_takes_room_from_the_pages(path: Path, peak: list[int]) -> None:
    """It grows, the slab gives way, and what was stored stays readable."""
    store = open_store(path)
    before = store._store.env.map_bytes
    for number in range(60):
        write(store, f"{number}", 30)
        assert read(store, f"{number}", 30) == 30
        audit(store)
    state = store._store.view(lambda view: view.state())
    assert state.map_bytes == store._store.env.map_bytes > before, "the map was never full"
    assert state.setbacks > 0
    assert peak[0] <= BUDGET
    store.close()
    store = open_store(path)
    assert read(store, "59", 30) == 30
    assert disk_bytes(path) <= BUDGET
    store.close()


@pytest.mark.parametrize("values", MODES)
def test_a_batch_that_does_not_fit_into_the_map_leaves_nothing(
    path: Path, values: ValuesMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MapFull in the middle of it, and no way to enlarge the map: what is there stays. Later it is written."""
    store = open_store(path, values)
    write(store, "a")
    with monkeypatch.context() as patch:
        patch.setattr(lmdb_transactions, "MAX_SETBACKS", 0)
        patch.setattr(IndexWriter, "insert", full_after(IndexWriter.insert, times=1000))
        with pytest.raises(StoreUnavailableError, match="map is full") as raised:
            write(store, "b")
        assert raised.value.reason == "map_full"
        audit(store)
        assert store.contains_prefix(chain("b", 32)) == 0
        assert read(store, "a") == 32
    write(store, "b")
    assert read(store, "b") == 32
    audit(store)
    store.close()


def full_after(real: Any, times: int) -> Any:
    """Raises so many times, with everything done already."""
    left = [times]

    def call(*args: Any) -> None:
        real(*args)
        left[0] -= 1
        if left[0] >= 0:
            raise lmdb.MapFullError("MDB_MAP_FULL")

    return call


def test_a_batch_that_met_a_full_map_once_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first try is undone, with the slots that it had taken."""
    store = open_store(path)
    monkeypatch.setattr(IndexWriter, "insert", full_after(IndexWriter.insert, times=1))
    write(store, "a")
    assert read(store, "a") == 32
    assert store._store.view(lambda view: view.state()).setbacks == 0, "a second try was enough"
    audit(store)
    store.close()


# ---- room that is reused --------------------------------------------------------------------------


@pytest.mark.parametrize("values", MODES)
def test_twenty_turnovers_at_a_constant_live_set(path: Path, values: ValuesMode) -> None:
    """Files stop growing, and a put changes as few pages of the index in the end as in the beginning."""
    store = open_store(path, values)
    live = 20
    used, changed = [], []
    for turn in range(20):
        for number in range(live):
            if turn:
                assert store.delete(chain(f"{turn - 1}/{number}", 8)) == 8
            before = index_pages(path) if number == live // 2 else []
            write(store, f"{turn}/{number}", 8)
            if before:
                changed.append(sum(one != other for one, other in zip(before, index_pages(path))))
        used.append((used_data_bytes(path), disk_bytes(path)))
    assert store.usage().pages == live * 8
    assert store.usage().evicted_pages == 0
    for first, last in zip(used[4], used[-1]):
        assert last <= 1.1 * first
    values_of_a_put = 8 * 2 if values == "inline" else 0
    assert 0 < max(changed) <= 32 + values_of_a_put
    audit(store)
    store.close()


def index_pages(path: Path) -> list[bytes]:
    with open(path / DATA_FILE, "rb") as file:
        raw = file.read(used_data_bytes(path) + (1 << 20))
    return [raw[start : start + 4096] for start in range(0, len(raw), 4096)]


def test_an_index_takes_no_more_than_it_is_taken_to(path: Path) -> None:
    """With pages without a common ancestor as with long chains."""
    store = open_store(path, budget_bytes=2 * BUDGET)
    number = 0
    while not store.usage().evicted_pages:
        write(store, f"{number}", 1 + number % 64)
        number += 1
    pages, info = store.usage().pages, store._store.env
    assert info.used_bytes <= budget.MIB + pages * budget.INDEX_BYTES_PER_PAGE
    assert os.stat(path / DATA_FILE).st_size >= info.map_bytes
    store.close()
