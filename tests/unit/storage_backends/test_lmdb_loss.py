"""A start with less room takes no page unless it is asked to, and says in numbers what it would take."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache.errors import ConfigError, StoreUnavailableError
from hicache.storage_backends import filesystem
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.lmdb_compact import shrink
from hicache.storage_backends.recovering import RecoveringBackend
from hicache.testing.audit import audit
from hicache.testing.processes import exit_code
from hicache.testing.storage import IDENTITY, chain, read_checked, run_of

LAYOUT = IDENTITY.layout
MIB = 1 << 20
PAGES = 1200


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def full(path: Path) -> Path:
    """A store of 16 MiB with 1,200 pages, 4.7 MiB of slots."""
    store = open_store(path)
    for number in range(PAGES // 20):
        assert store.write([run_of(LAYOUT, chain(str(number), 20))]) == [20]
    store.close()
    return path


def open_store(path: Path, budget: int = 16 * MIB, **options: Any) -> LmdbBackend:
    return LmdbBackend(path, options.pop("identity", IDENTITY), budget, **{"durability": "none", **options})


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "lock.mdb"}


@pytest.mark.parametrize("budget", [2 * MIB, 4 * MIB])
def test_a_start_with_a_smaller_size_changes_nothing(full: Path, budget: int) -> None:
    """The smaller one has to write the index anew as well."""
    before = contents(full)
    with pytest.raises(ConfigError, match=r"holds 1,200 pages \(4.7 MiB\), and about [\d,]+ of them would stay"):
        open_store(full, budget)
    assert contents(full) == before
    store = open_store(full)
    assert store.usage().pages == PAGES
    assert read_checked(store, LAYOUT, chain("0", 20)) == 20
    store.close()


def test_a_smaller_size_that_holds_all_pages_needs_no_permission(full: Path) -> None:
    store = open_store(full, 12 * MIB)
    assert (store.usage().pages, store.usage().budget_bytes) == (PAGES, 12 * MIB)
    store.close()


def test_what_is_asked_for_is_done(full: Path) -> None:
    store = open_store(full, 4 * MIB, shrink=True)
    assert 0 < store.usage().pages < PAGES
    assert store.usage().used_bytes <= 4 * MIB
    audit(store)
    store.close()
    open_store(full, 4 * MIB).close()


def test_the_numbers_are_about_right(full: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        open_store(full, 4 * MIB)
    kept = int(str(raised.value).partition("about ")[2].split()[0].replace(",", ""))
    done = shrink(full, 4 * MIB)
    assert done.before == PAGES
    assert abs(done.after - kept) < PAGES / 20
    store = open_store(full, 4 * MIB)
    assert store.usage().pages == done.after
    audit(store)
    store.close()


def test_a_store_that_is_open_is_not_shrunk(full: Path) -> None:
    store = open_store(full)

    def others() -> None:
        with pytest.raises(StoreUnavailableError, match="shrunk alone"):
            shrink(full, 4 * MIB)

    assert exit_code(others) == 0
    assert store.usage().pages == PAGES
    store.close()


def test_an_engine_whose_store_is_too_small_serves_without_it(full: Path) -> None:
    """Where the first call opens it: nothing is evicted then, either."""
    store = RecoveringBackend(lambda: open_store(full, 4 * MIB))
    with pytest.raises(StoreUnavailableError, match="1,200 pages") as raised:
        store.contains_prefix(chain("0", 20))
    assert raised.value.reason == "refused"
    store.close()


def test_a_smaller_quota_changes_nothing(full: Path) -> None:
    other = open_store(full, identity=replace(IDENTITY, model="other"))
    with pytest.raises(ConfigError, match=r"of this model, 1,200 pages .* with a quota of 2\.0 MiB"):
        open_store(full, quota_bytes=2 * MIB)
    other.close()
    store = open_store(full, quota_bytes=8 * MIB)
    assert store.usage().pages == PAGES
    store.close()
    store = open_store(full, quota_bytes=2 * MIB, shrink=True)
    assert store.write([run_of(LAYOUT, chain("more", 20))]) == [20]
    assert store.usage().pages <= 2 * MIB // LAYOUT.page_stride
    store.close()


def test_another_model_takes_nothing_by_its_start(full: Path) -> None:
    open_store(full, identity=replace(IDENTITY, model="other")).close()
    store = open_store(full)
    assert store.usage().pages == PAGES
    store.close()


# ---- room -----------------------------------------------------------------------------------------


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.statvfs(path.parent)
    disk = os.statvfs_result((*found[:2], (32 * MIB) // found.f_frsize, *found[3:]))
    monkeypatch.setattr(filesystem.os, "statvfs", lambda path: disk)
    with pytest.raises(ConfigError, match="has 32 MiB in all, and the store may grow to 64 MiB"):
        open_store(path, 64 * MIB)
    assert not path.exists()
    open_store(path, 16 * MIB).close()


@pytest.mark.parametrize("values", ["slab", "inline"])
def test_a_limit_of_file_sizes_is_refused_before_anything_is_written(path: Path, values: str) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, 8 * MIB))
        with pytest.raises(ConfigError, match=r"at most 8.0 MiB \(ulimit -f\), and one of the store's may grow to"):
            open_store(path, 64 * MIB, values=values)
        assert not path.exists()
        store = open_store(path, 4 * MIB, values=values)
        for number in range(100):
            store.write([run_of(LAYOUT, chain(str(number), 20))])
        store.close()

    assert exit_code(limited) == 0
