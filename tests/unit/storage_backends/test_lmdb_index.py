"""The index against a plain dictionary in which each use of a page stamps the page and all above it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hicache.storage_backends import budget, lmdb_env
from hicache.storage_backends.base import PageRun
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.lmdb_env import IndexEnvironment
from hicache.storage_backends.lmdb_index import IndexWriter
from hicache.storage_backends.lmdb_values import SLAB_FILE
from hicache.storage_backends.slab import SlabFile
from hicache.testing.storage import IDENTITY, chain, read_checked, run_of

LAYOUT = IDENTITY.layout
NO_PAGE = memoryview(b"")


@dataclass
class Page:
    parent: bytes | None
    used: int
    location: int


class Model:
    """What the index should hold. A page is evictable if no page has it as parent."""

    def __init__(self) -> None:
        self.pages: dict[bytes, Page] = {}
        self.clock = 0

    def add(self, key: bytes, parent: bytes | None, location: int) -> None:
        self.pages[key] = Page(parent, 0, location)

    def use(self, key: bytes) -> None:
        self.clock += 1
        above: bytes | None = key
        while above is not None:
            self.pages[above].used = self.clock
            above = self.pages[above].parent

    def evict(self, count: int, keep: set[bytes]) -> list[int]:
        gone = []
        for _ in range(count):
            parents = {page.parent for page in self.pages.values()}
            victims = [key for key in self.pages if key not in parents and key not in keep]
            if not victims:
                break
            victim = min(victims, key=lambda key: self.pages[key].used)
            gone.append(self.pages.pop(victim).location)
        return gone

    def remove(self, key: bytes) -> list[int]:
        below = [child for child, page in self.pages.items() if page.parent == key]
        gone = [location for child in below for location in self.remove(child)]
        return [*gone, self.pages.pop(key).location]


@pytest.fixture
def env(tmp_path: Path) -> Iterator[IndexEnvironment]:
    (tmp_path / "index").mkdir()
    env = IndexEnvironment(tmp_path / "index", 16 << 20, "none")
    env.open_databases({})
    yield env
    env.close()


def insert(index: IndexWriter, model: Model, keys: list[bytes], parent: bytes | None) -> None:
    pages, counts = index.plan([PageRun(keys, [NO_PAGE] * len(keys), parent)], room=1000)
    assert counts == [len(keys)]
    locations = list(index.take_numbers(len(pages)))
    index.insert(pages, locations, [0] * len(pages))
    for page, location in zip(pages, locations):
        model.add(page.key, page.parent, location)
    model.use(keys[-1])


def step(index: IndexWriter, model: Model, rng: random.Random, name: str) -> None:
    stored = list(model.pages)
    action = rng.choice(["insert", "insert", "touch", "touch", "evict", "remove"]) if stored else "insert"
    if action == "insert":
        parent = rng.choice([None, *stored])
        insert(index, model, chain(name, rng.randint(1, 6)), parent)
    elif action == "touch":
        key = rng.choice(stored)
        index.touch(key)
        model.use(key)
    elif action == "evict":
        count, keep = rng.randint(1, 5), set(rng.sample(stored, min(3, len(stored))))
        assert index.evict(count, keep) == model.evict(count, keep)
    else:
        key = rng.choice(stored)
        assert sorted(index.remove(key)) == sorted(model.remove(key))
        assert index.remove(key) == []


def check(index: IndexWriter, model: Model) -> None:
    assert index.pages == len(model.pages)
    for key, page in model.pages.items():
        record = index.record(key)
        assert record is not None
        assert (record.location, record.parent) == (page.location, page.parent)
    parents = {page.parent for page in model.pages.values()}
    with index.txn.cursor(index.databases.order) as order:
        assert sorted(order.iternext(keys=False)) == sorted(key for key in model.pages if key not in parents)
    linked = sum(page.parent is not None for page in model.pages.values())
    assert index.txn.stat(index.databases.children)["entries"] == linked


@pytest.mark.parametrize("seed", range(10))
def test_it_evicts_and_removes_as_the_model_does(env: IndexEnvironment, seed: int) -> None:
    rng, model = random.Random(seed), Model()
    for number in range(150):
        with env.writer() as index:
            step(index, model, rng, f"{number}")
            check(index, model)
    with env.writer() as index:
        assert index.evict(10_000) == model.evict(10_000, set())
        assert index.pages == 0


def test_a_transaction_that_fails_leaves_nothing(env: IndexEnvironment) -> None:
    model = Model()
    with env.writer() as index:
        insert(index, model, chain("a", 3), None)
    with pytest.raises(ZeroDivisionError), env.writer() as index:
        insert(index, Model(), chain("b", 3), None)
        index.evict(2)
        raise ZeroDivisionError
    with env.writer() as index:
        check(index, model)


def test_a_killed_reader_gives_its_slot_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All slots of the reader table belong to a process that is gone."""
    monkeypatch.setattr(lmdb_env, "MAX_READERS", 1)
    (tmp_path / "index").mkdir()
    env = IndexEnvironment(tmp_path / "index", 1 << 20, "none")
    env.open_databases({})
    script = f"import lmdb, os; txn = lmdb.open({str(tmp_path / 'index')!r}).begin(); os._exit(7)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 7
    with env.view() as view:
        assert view.pages == 0
    env.close()


def test_a_full_map_takes_room_from_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The map is made far too small: it grows, the slab gives way, and what was stored stays readable."""
    monkeypatch.setattr(budget, "INDEX_BYTES_PER_PAGE", 16)
    monkeypatch.setattr(budget, "_working_bytes", lambda budget_bytes: 128 << 10)
    store = LmdbBackend(tmp_path / "s", IDENTITY, 4 << 20, durability="none")
    for number in range(60):
        keys = chain(f"{number}", 30)
        assert store.write([run_of(LAYOUT, keys)]) == [30]
        assert read_checked(store, LAYOUT, keys) == 30
        assert store.usage().used_bytes <= 4 << 20
    assert store._env.map_bytes > (128 << 10) + (4 << 20) // 4096 * 16, "the map was never full"
    assert store._setbacks > 0
    store.close()


def test_blocks_without_a_page_are_given_back_at_open(tmp_path: Path) -> None:
    """As after a kill between the growth of the slab and the commit that says so."""
    store = LmdbBackend(tmp_path / "s", IDENTITY, 8 << 20, durability="none")
    keys = chain("a", 20)
    store.write([run_of(LAYOUT, keys)])
    before = store.usage().used_bytes
    store.close()
    slab = SlabFile(tmp_path / "s" / SLAB_FILE, LAYOUT)
    slab.reserve(range(slab.slots, slab.slots + 500))
    slab.close()
    store = LmdbBackend(tmp_path / "s", IDENTITY, 8 << 20, durability="none")
    assert store.usage().used_bytes <= before
    assert read_checked(store, LAYOUT, keys) == 20
    store.close()
