"""Who goes, and when: policies, quotas, time limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.testing.audit import audit
from hicache.testing.storage import IDENTITY, chain, read_checked, run_of

LAYOUT = IDENTITY.layout
OTHER = replace(IDENTITY, model="other")
BUDGET = 4 << 20


@dataclass
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


def open_store(path: Path, identity: Any = IDENTITY, **options: Any) -> LmdbBackend:
    return LmdbBackend(path, identity, BUDGET, **{"durability": "none", **options})


def write(store: LmdbBackend, name: str, length: int = 5) -> None:
    assert store.write([run_of(LAYOUT, chain(name, length))]) == [length]


def read(store: LmdbBackend, name: str, length: int = 5) -> int:
    return read_checked(store, LAYOUT, chain(name, length))


def stored(store: LmdbBackend, names: Sequence[str]) -> list[str]:
    """Chains of which at least the root is there. Looked up behind the store's back: this is no use of them."""
    return store._store.view(lambda view: [name for name in names if view.has(chain(name, 1)[0])])


# ---- policies -------------------------------------------------------------------------------------


def fill(store: LmdbBackend, pages: int) -> None:
    for number in range(pages // 10):
        write(store, f"scan {number}", 10)


def capacity(store: LmdbBackend) -> int:
    return store._store.view(lambda view: view.state().data_bytes) // LAYOUT.page_stride


@pytest.mark.parametrize(("eviction", "left"), [("lru", ["used"]), ("slru", ["used"]), ("fifo", [])])
def test_what_is_used_stays_unless_use_does_not_count(path: Path, eviction: str, left: list[str]) -> None:
    store = open_store(path, eviction=eviction)
    write(store, "used")
    write(store, "unused")
    fill(store, capacity(store) - 100)
    assert read(store, "used") == 5
    fill_more = capacity(store) // 20
    for number in range(fill_more):
        write(store, f"more {number}", 10)
    assert stored(store, ["used", "unused"]) == left
    audit(store)
    store.close()


@pytest.mark.parametrize(("eviction", "left"), [("lru", []), ("slru", ["hot"])])
def test_only_slru_keeps_used_pages_through_a_scan(path: Path, eviction: str, left: list[str]) -> None:
    """Pages that are written once and never used push out what is used now and then, but not what is protected."""
    store = open_store(path, eviction=eviction)
    write(store, "hot")
    write(store, "cold")
    assert read(store, "hot") == 5
    fill(store, 2 * capacity(store))
    assert stored(store, ["hot", "cold"]) == left
    audit(store)
    store.close()


def test_slru_protects_four_fifths_at_most(path: Path) -> None:
    store = open_store(path, eviction="slru")
    names = [f"{number}" for number in range(20)]
    for name in names:
        write(store, name, 2)
    for name in names:
        assert read(store, name, 2) == 2
    store._store.touch(store._recent.take())
    space = store._store.view(lambda view: view.space(store._number))
    assert (space.leaves, space.protected) == (20, 16)
    audit(store)
    store.close()


def test_another_policy_holds_from_the_next_start_on(path: Path) -> None:
    store = open_store(path, eviction="slru")
    write(store, "a")
    write(store, "b")
    assert read(store, "a") == 5
    store.close()
    store = open_store(path, eviction="lru")
    assert read(store, "b") == 5
    assert read(store, "a") == 5
    store._store.touch(store._recent.take())
    space = store._store.view(lambda view: view.space(store._number))
    assert (space.leaves, space.protected) == (2, 0)
    audit(store)
    store.close()


# ---- quotas, namespaces ---------------------------------------------------------------------------


def test_a_quota_bounds_a_namespace_and_leaves_the_others_alone(path: Path) -> None:
    quota = 40 * LAYOUT.page_stride
    store, beside = open_store(path, quota_bytes=quota), open_store(path, OTHER)
    write(beside, "theirs", 50)
    for number in range(30):
        write(store, f"{number}", 10)
        space = store._store.view(lambda view: view.space(store._number))
        assert space.live_bytes <= quota
        audit(store)
    assert read(store, "29", 10) == 10
    assert store.usage().pages > 20
    assert read(beside, "theirs", 50) == 50
    assert beside.usage().evicted_pages == 0
    beside.close()
    store.close()


def test_a_run_larger_than_its_quota_is_stored_in_part(path: Path) -> None:
    store = open_store(path, quota_bytes=20 * LAYOUT.page_stride)
    keys = chain("long", 50)
    assert store.write([run_of(LAYOUT, keys)]) == [20]
    assert store.contains_prefix(keys) == 20
    audit(store)
    store.close()


def test_a_quota_that_was_lowered_holds_from_the_next_write_on(path: Path) -> None:
    store = open_store(path)
    write(store, "a", 100)
    store.close()
    store = open_store(path, quota_bytes=20 * LAYOUT.page_stride, shrink=True)
    write(store, "b", 5)
    assert store.usage().pages <= 20
    audit(store)
    store.close()


def test_the_oldest_of_all_namespaces_go_first(path: Path) -> None:
    """The budget is one: who writes more gets more of it."""
    store, other = open_store(path), open_store(path, OTHER)
    for number in range(4):
        write(store, f"ours {number}", 10)
        write(other, f"theirs {number}", 10)
    written = 0
    while other.usage().evicted_pages < 15:
        write(store, f"more {written}", 5)
        written += 1
    ours, theirs = [f"ours {n}" for n in range(4)], [f"theirs {n}" for n in range(4)]
    assert stored(store, ours)[0] in ("ours 1", "ours 2")
    assert stored(store, theirs)[0] in ("theirs 1", "theirs 2")
    assert abs(store.usage().evicted_pages - other.usage().evicted_pages) <= 10
    assert read(store, f"more {written - 1}", 5) == 5
    audit(store)
    other.close()
    store.close()


# ---- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", ["lru", "slru"])
def test_pages_that_are_not_used_in_time_are_gone(path: Path, eviction: str) -> None:
    clock = Clock()
    store = open_store(path, eviction=eviction, ttl=60, clock=clock)
    write(store, "used")
    write(store, "unused")
    clock.now += 40
    assert read(store, "used") == 5
    clock.now += 10
    assert read(store, "used") == 5, "and its use is written down, although nothing else is"
    clock.now += 30
    assert store.contains_prefix(chain("unused", 5)) == read(store, "unused") == 0
    assert read(store, "used") == 5, "with all of its chain, of which only the end was stamped"
    assert (store.usage().pages, store.usage().evicted_pages) == (5, 5)
    clock.now += 61
    assert read(store, "used") == store.usage().pages == 0
    audit(store)
    store.close()


def test_with_fifo_time_counts_from_writing(path: Path) -> None:
    clock = Clock()
    store = open_store(path, eviction="fifo", ttl=60, clock=clock)
    write(store, "a")
    for _ in range(2):
        clock.now += 25
        assert read(store, "a") == 5
        write(store, "a")
    clock.now += 25
    assert read(store, "a") == 0
    audit(store)
    store.close()


def test_a_page_lives_as_long_as_what_is_below_it(path: Path) -> None:
    clock = Clock()
    store = open_store(path, eviction="fifo", ttl=60, clock=clock)
    keys = chain("a", 6)
    assert store.write([run_of(LAYOUT, keys[:3])]) == [3]
    clock.now += 40
    assert store.write([run_of(LAYOUT, keys[3:], keys[2])]) == [3]
    clock.now += 40
    assert store.contains_prefix(keys) == 6
    clock.now += 30
    assert store.contains_prefix(keys) == store.usage().pages == 0
    store.close()


def test_a_use_that_was_not_written_down_in_time_does_not_bring_a_page_back(path: Path) -> None:
    clock = Clock()
    store = open_store(path, ttl=60, clock=clock)
    write(store, "a")
    clock.now += 40
    assert read(store, "a") == 5
    clock.now += 61
    assert read(store, "a") == store.usage().pages == 0
    store.close()


def test_a_clock_that_goes_back_does_no_harm(path: Path) -> None:
    clock = Clock()
    store = open_store(path, ttl=60, clock=clock)
    write(store, "a")
    clock.now -= 10_000
    write(store, "b")
    assert (read(store, "a"), read(store, "b")) == (5, 5)
    write(store, "c")
    audit(store)
    clock.now += 10_030
    assert (read(store, "a"), read(store, "b"), read(store, "c")) == (5, 5, 5)
    store.close()


def test_time_goes_on_while_the_store_is_closed(path: Path) -> None:
    clock = Clock()
    store = open_store(path, ttl=60, clock=clock)
    write(store, "a")
    store.close()
    clock.now += 61
    store = open_store(path, ttl=60, clock=clock)
    assert read(store, "a") == store.usage().pages == 0
    store.close()


def test_each_namespace_has_its_own_time(path: Path) -> None:
    clock = Clock()
    store, other = open_store(path, ttl=60, clock=clock), open_store(path, OTHER, clock=clock)
    write(store, "a")
    write(other, "b")
    clock.now += 1000
    assert (read(store, "a"), read(other, "b")) == (0, 5)
    audit(store)
    other.close()
    store.close()
