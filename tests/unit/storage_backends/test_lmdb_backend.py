"""Where a store may be opened, what it says, and what happens when the operating system refuses."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest

from hicache.errors import ConfigError, StoreIdentityError, StoreUnavailableError
from hicache.storage_backends import filesystem, lmdb_values
from hicache.storage_backends.budget import ValuesMode
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.lmdb_env import DATA_FILE
from hicache.storage_backends.lmdb_open import SLAB_FILE
from hicache.testing.audit import audit, disk_bytes
from hicache.testing.processes import exit_code
from hicache.testing.storage import IDENTITY, blank_pages, chain, read_checked, run_of

LAYOUT = IDENTITY.layout
BUDGET = 4 << 20
MODES: list[ValuesMode] = ["slab", "inline"]


def open_store(path: Path, values: ValuesMode = "slab", budget: int = BUDGET, **options: Any) -> LmdbBackend:
    return LmdbBackend(path, IDENTITY, budget, values, **{"durability": "none", **options})


def write(store: LmdbBackend, name: str, length: int = 5) -> int:
    return store.write([run_of(LAYOUT, chain(name, length))])[0]


def read(store: LmdbBackend, name: str, length: int = 5) -> int:
    return read_checked(store, LAYOUT, chain(name, length))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


# ---- where it may be opened -----------------------------------------------------------------------


def test_all_who_open_a_folder_share_one_store(path: Path) -> None:
    """Also through a symlink. The last to close it closes the files."""
    first = open_store(path)
    path.with_name("link").symlink_to(path)
    second = open_store(path.with_name("link"))
    assert second._store is first._store
    assert write(first, "a") == 5
    assert read(second, "a") == 5
    first.close()
    first.close()
    assert read(second, "a") == 5
    second.close()
    third = open_store(path)
    assert third._store is not first._store
    assert read(third, "a") == 5
    third.close()


def test_another_mode_of_values_is_refused(path: Path) -> None:
    """Whether the store is open in this process or not; nothing is changed."""
    store = open_store(path, "inline")
    write(store, "a")
    with pytest.raises(StoreIdentityError, match="made with values: inline, not slab"):
        open_store(path, "slab")
    store.close()
    with pytest.raises(StoreIdentityError, match="made with values: inline, not slab"):
        open_store(path, "slab")
    store = open_store(path, "inline")
    assert read(store, "a") == 5
    store.close()
    assert [file.name for file in path.parent.iterdir()] == ["s"]


def test_the_first_to_open_a_store_sets_its_budget(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = open_store(path)
    second = open_store(path, budget=2 * BUDGET)
    assert f"{2 * BUDGET} are ignored" in caplog.text
    assert first.usage().budget_bytes == second.usage().budget_bytes == BUDGET
    second.close()
    first.close()


def test_the_database_of_another_program_is_left_alone(path: Path) -> None:
    path.mkdir()
    with lmdb.open(str(path), map_size=1 << 20) as env, env.begin(write=True) as txn:
        txn.put(b"key", b"value")
    with pytest.raises(StoreIdentityError, match="another program"):
        open_store(path)
    with lmdb.open(str(path)) as env, env.begin() as txn:
        assert txn.get(b"key") == b"value"


def test_a_folder_with_other_files_is_refused(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("the only copy")
    with pytest.raises(ConfigError, match=r"holds other files \(thesis.tex"):
        open_store(path)
    assert (path / "thesis.tex").read_text() == "the only copy"
    assert not (path / DATA_FILE).exists()


def test_a_network_file_system_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "file_system_of", lambda path: "nfs4")
    with pytest.raises(ConfigError, match=r"network file system \(nfs4\)"):
        open_store(path)
    assert not path.exists()


def _a_file(path: Path) -> None:
    path.write_text("not a folder")


def _under_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("not a folder")


def _without_parent(path: Path) -> None:
    path.parent.rmdir()


@pytest.mark.parametrize("spoil", [_a_file, _under_a_file, _without_parent])
def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = tmp_path / "parent" / "s"
    path.parent.mkdir()
    spoil(path)
    with pytest.raises(ConfigError, match="storage path") as raised:
        open_store(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("choice", [{"values": "other"}, {"durability": "other"}, {"eviction": "other"}])
def test_unknown_choices_are_refused(path: Path, choice: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="use one of"):
        open_store(path, **choice)
    assert not path.exists()


@pytest.mark.parametrize("values", MODES)
def test_a_budget_or_a_quota_for_nothing_is_refused(path: Path, values: ValuesMode) -> None:
    with pytest.raises(ConfigError, match="does not hold one batch"):
        open_store(path, values, budget=64 * 1024)
    with pytest.raises(ConfigError, match="does not hold one batch"):
        open_store(path, values, quota_bytes=64 * 1024 - 1)
    assert not path.exists()


# ---- what stays -----------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["batch", "always"])
def test_durable_stores_keep_what_they_stored(path: Path, durability: str) -> None:
    for _ in range(2):
        store = open_store(path, durability=durability)
        assert write(store, "a") == 5
        assert store.usage().pages == 5
        store.close()


@pytest.mark.parametrize("values", MODES)
def test_what_a_cold_chain_under_a_used_root_held_is_found_again(path: Path, values: ValuesMode) -> None:
    """The tail was written last, in parts, and only the root was used since."""
    store, keys = open_store(path, values), chain("a", 60)
    for start in (0, 20, 40):
        parent = keys[start - 1] if start else None
        assert store.write([run_of(LAYOUT, keys[start : start + 20], parent)]) == [20]
    for _ in range(5):
        assert read_checked(store, LAYOUT, keys[:20]) == 20
    store.close()
    store = open_store(path, values)
    assert store.contains_prefix(keys) == read_checked(store, LAYOUT, keys) == 60
    audit(store)
    store.close()


def test_use_is_remembered_over_a_restart(path: Path) -> None:
    """Notes of readers are written at the end at the latest."""
    store = open_store(path)
    for name in ("a", "b", "c"):
        write(store, name)
    assert read(store, "a") == 5
    store.close()
    store, number = open_store(path), 0
    while store._store.view(lambda view: view.has(chain("c", 1)[0])):
        write(store, f"fill {number}", 2)
        number += 1
    assert store.contains_prefix(chain("a", 5)) == 5
    store.close()


def test_clear_gives_the_slab_back_and_counts(path: Path) -> None:
    store = open_store(path)
    write(store, "a", 200)
    assert store.generation() == 0
    assert store.clear() == 200
    assert store.generation() == 1
    assert (path / f"{SLAB_FILE}-{LAYOUT.page_stride}").stat().st_blocks == 0
    audit(store)
    store.close()


@pytest.mark.parametrize("values", MODES)
def test_usage_counts_the_pages_and_the_disk(path: Path, values: ValuesMode) -> None:
    store = open_store(path, values)
    write(store, "a", 7)
    usage = store.usage()
    assert (usage.pages, usage.budget_bytes, usage.evicted_pages) == (7, BUDGET, 0)
    assert 7 * LAYOUT.page_bytes < usage.used_bytes <= disk_bytes(path) <= usage.used_bytes + (64 << 10)
    store.delete(chain("a", 7)[5:])
    assert store.usage().pages == 5
    audit(store)
    store.close()


# ---- forks ----------------------------------------------------------------------------------------


def test_a_forked_child_is_refused_and_harms_nothing(path: Path) -> None:
    store = open_store(path)
    write(store, "a")

    def use_it() -> None:
        for call in (
            lambda: store.contains_prefix(chain("a", 5)),
            lambda: read(store, "a"),
            lambda: write(store, "b"),
            lambda: store.delete(chain("a", 5)),
            store.clear,
            store.usage,
            store.generation,
        ):
            with pytest.raises(StoreUnavailableError, match="fork"):
                call()
        store.close()

    assert exit_code(use_it) == 0
    assert read(store, "a") == 5
    assert write(store, "b") == 5
    audit(store)
    store.close()


def test_a_forked_child_may_open_the_store_itself(path: Path) -> None:
    store = open_store(path)
    write(store, "a")

    def open_again() -> None:
        own = open_store(path)
        assert own._store is not store._store
        assert read(own, "a") == 5
        assert write(own, "b") == 5
        own.close()

    assert exit_code(open_again) == 0
    assert read(store, "b") == 5
    assert write(store, "c") == 5
    store.close()
    store = open_store(path)
    assert [read(store, name) for name in "abc"] == [5, 5, 5]
    audit(store)
    store.close()


# ---- the operating system says no -----------------------------------------------------------------


def refusing(code: int) -> Callable[..., Any]:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


REASONS = [
    (errno.ENOSPC, "disk_full"),
    (errno.EDQUOT, "disk_full"),
    (errno.EIO, "io_error"),
    (errno.EROFS, "read_only"),
]


@pytest.fixture
def store(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LmdbBackend]:
    """Its slab grows with every batch."""
    monkeypatch.setattr(lmdb_values, "GROWTH_BYTES", LAYOUT.page_stride)
    store = open_store(path)
    assert write(store, "a") == 5
    yield store
    audit(store)
    store.close()


@pytest.mark.parametrize("call", ["pwritev", "posix_fallocate"])
@pytest.mark.parametrize(("code", "reason"), REASONS)
def test_a_failed_write_stores_nothing(
    store: LmdbBackend, monkeypatch: pytest.MonkeyPatch, call: str, code: int, reason: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refusing(code))
        with pytest.raises(StoreUnavailableError, match=os.strerror(code)) as raised:
            write(store, "b", 20)
        assert raised.value.reason == reason
        audit(store)
        assert store.contains_prefix(chain("b", 20)) == 0
        assert read(store, "a") == 5
    assert write(store, "b", 20) == read(store, "b", 20) == 20


def test_a_disk_that_fills_up_in_the_middle_of_a_batch(store: LmdbBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pages of the batch have been written by then, to slots that nothing refers to."""
    real, calls = os.pwritev, []

    def fail_later(file: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, buffers[:2], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail_later)
        with pytest.raises(StoreUnavailableError):
            write(store, "b")
    assert store.contains_prefix(chain("b", 5)) == 0
    assert write(store, "b") == read(store, "b") == 5


@pytest.mark.parametrize(("code", "reason"), REASONS)
def test_a_failed_read_is_an_error_and_loses_nothing(
    store: LmdbBackend, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refusing(code))
        with pytest.raises(StoreUnavailableError) as raised:
            store.read_into(chain("a", 5), blank_pages(LAYOUT, 5))
    assert raised.value.reason == reason
    assert store.damaged_pages == 0
    assert read(store, "a") == 5


def test_an_encoder_that_fails_leaves_nothing(store: LmdbBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(store, "_encode", lambda page: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            write(store, "b")
    assert store.contains_prefix(chain("b", 5)) == 0
    assert write(store, "b") == 5


@pytest.mark.parametrize("values", MODES)
def test_an_index_that_cannot_be_written_goes_on_when_it_can(path: Path, values: ValuesMode) -> None:
    """The limit on the size of files makes LMDB's own writes fail, in a process of its own."""

    def meet_the_limit() -> None:
        store = open_store(path, values)
        write(store, "a")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (store._store.env.used_bytes + (64 << 10), hard))
        with pytest.raises(StoreUnavailableError):
            for number in range(200):
                write(store, f"{number}")
        assert store.contains_prefix(chain(f"{number}", 5)) == 0
        assert read(store, "a") == 5
        audit(store)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert write(store, f"{number}") == read(store, f"{number}") == 5
        audit(store)
        store.close()

    assert exit_code(meet_the_limit) == 0


@pytest.mark.parametrize("values", MODES)
def test_a_folder_that_is_gone_does_not_keep_a_store_from_closing(path: Path, values: ValuesMode) -> None:
    path = path / "deeper"
    path.parent.mkdir()
    store = open_store(path, values)
    write(store, "a")
    shutil.rmtree(path.parent)
    store.close()
    assert not path.exists()


def test_a_disk_that_is_full_at_the_end_does_not_keep_a_store_from_closing(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(path, durability="batch")
    write(store, "a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refusing(errno.EIO))
        patch.setattr(Path, "write_text", refusing(errno.ENOSPC))
        store.close()
    assert "closing" in caplog.text
    store = open_store(path)
    assert read(store, "a") == 5
    store.close()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.EROFS, ConfigError),
        (errno.EACCES, ConfigError),
        (errno.ENOSPC, StoreUnavailableError),
        (errno.EIO, StoreUnavailableError),
    ],
)
def test_a_folder_that_cannot_be_written_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: type[Exception]
) -> None:
    open_store(path).close()
    with monkeypatch.context() as patch, pytest.raises(expected, match=os.strerror(code)):
        patch.setattr(os, "open", refusing(code))
        open_store(path)
    open_store(path).close()


def test_a_log_line_says_why_there_is_no_hit(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(path)
    with caplog.at_level(logging.INFO):
        other = LmdbBackend(path, replace(IDENTITY, model="another"), BUDGET, durability="none")
    assert "model is 'another' here and 'conformance' there" in caplog.text
    assert other.write([run_of(LAYOUT, chain("x", 1))]) == [1]
    other.close()
    store.close()


def test_pages_that_come_encoded_need_a_codec_that_a_host_tier_has(path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot have codec 'zstd'"):
        LmdbBackend(path, replace(IDENTITY, codec="zstd"), 8 << 20, encoded=True)
    assert not path.exists()
