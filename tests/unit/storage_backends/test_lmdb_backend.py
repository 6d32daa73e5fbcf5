from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hicache.errors import ConfigError, StoreIdentityError, StoreUnavailableError
from hicache.hashing import StoreIdentity
from hicache.storage_backends.budget import ValuesMode
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.lmdb_env import DATA_FILE
from hicache.storage_backends.lmdb_values import SLAB_FILE
from hicache.storage_backends.slab import SlabFile
from hicache.testing.storage import IDENTITY, chain, filled_pages, read_checked, run_of

LAYOUT = IDENTITY.layout
BUDGET = 4 << 20
MODES: list[ValuesMode] = ["slab", "inline"]


def open_store(path: Path, values: ValuesMode = "slab", budget: int = BUDGET) -> LmdbBackend:
    return LmdbBackend(path, IDENTITY, budget, values, "none")


def store_with(path: Path, keys: list[bytes], values: ValuesMode = "slab") -> None:
    store = open_store(path, values)
    assert store.write([run_of(LAYOUT, keys)]) == [len(keys)]
    store.close()


def disk_bytes(path: Path) -> int:
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(path))


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "lock.mdb"}


# ---- identity -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (replace(IDENTITY, model="another"), ["model", "'another'", "'conformance'"]),
        (replace(IDENTITY, weights_digest="0f"), ["weights_digest", "'0f'", "None"]),
        (replace(IDENTITY, tp_rank=1, tp_size=2), ["tp_rank", "tp_size"]),
        (replace(IDENTITY, layout=replace(LAYOUT, dtype="bfloat16")), ["layout.dtype", "'bfloat16'", "'float16'"]),
        (replace(IDENTITY, layout=replace(LAYOUT, page_size=16)), ["layout.page_size", "16", "8"]),
    ],
)
def test_another_identity_is_refused_and_changes_nothing(
    tmp_path: Path, other: StoreIdentity, named: list[str]
) -> None:
    store_with(tmp_path / "s", chain("a", 5))
    before = contents(tmp_path / "s")
    with pytest.raises(StoreIdentityError) as raised:
        LmdbBackend(tmp_path / "s", other, BUDGET)
    for word in named:
        assert word in str(raised.value)
    assert contents(tmp_path / "s") == before
    store = open_store(tmp_path / "s")
    assert read_checked(store, LAYOUT, chain("a", 5)) == 5
    store.close()


def test_another_mode_of_values_is_another_store(tmp_path: Path) -> None:
    store_with(tmp_path / "s", chain("a", 1), "inline")
    with pytest.raises(StoreIdentityError, match=r"store.values is 'slab' here and 'inline' there"):
        open_store(tmp_path / "s", "slab")


# ---- damage ---------------------------------------------------------------------------------------


def test_a_flipped_byte_in_the_slab_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = chain("a", 8)
    store_with(tmp_path / "s", keys)
    slab = bytearray((tmp_path / "s" / SLAB_FILE).read_bytes())
    at = slab.index(keys[3])
    slab[at] ^= 1
    (tmp_path / "s" / SLAB_FILE).write_bytes(slab)
    store = open_store(tmp_path / "s")
    with caplog.at_level(logging.WARNING):
        assert read_checked(store, LAYOUT, keys) == 3
    assert keys[3].hex() in caplog.text
    assert store.damaged_pages == 1
    assert store.usage().pages == 3
    store.close()


@pytest.mark.parametrize("values", MODES)
@pytest.mark.parametrize("size", [100, 4096, 5 * 4096])
def test_a_truncated_index_is_set_aside(
    tmp_path: Path, values: ValuesMode, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    keys = chain("a", 40)
    store_with(tmp_path / "s", keys, values)
    os.truncate(tmp_path / "s" / DATA_FILE, size)
    store = open_store(tmp_path / "s", values)
    assert "set aside" in caplog.text
    assert (tmp_path / "s.damaged-1" / DATA_FILE).stat().st_size == size
    assert read_checked(store, LAYOUT, keys) == 0
    assert store.write([run_of(LAYOUT, keys)]) == [40]
    assert read_checked(store, LAYOUT, keys) == 40
    store.close()


def test_garbage_in_place_of_the_index_is_set_aside(tmp_path: Path) -> None:
    store_with(tmp_path / "s", chain("a", 4))
    (tmp_path / "s.damaged-1").mkdir()
    (tmp_path / "s" / DATA_FILE).write_bytes(b"\xa5" * (1 << 16))
    open_store(tmp_path / "s").close()
    assert (tmp_path / "s.damaged-2" / DATA_FILE).read_bytes()[:4] == b"\xa5" * 4


@pytest.mark.parametrize("left", [0, 3])
def test_a_truncated_slab_loses_only_what_was_cut_off(tmp_path: Path, left: int) -> None:
    keys = chain("a", 20)
    store_with(tmp_path / "s", keys)
    os.truncate(tmp_path / "s" / SLAB_FILE, left * LAYOUT.page_stride)
    store = open_store(tmp_path / "s")
    assert read_checked(store, LAYOUT, keys) == left
    assert store.write([run_of(LAYOUT, keys)]) == [20]
    assert read_checked(store, LAYOUT, keys) == 20
    store.close()


def test_a_slab_cut_while_open_gives_misses(tmp_path: Path) -> None:
    keys = chain("a", 20)
    store = open_store(tmp_path / "s")
    store.write([run_of(LAYOUT, keys)])
    os.truncate(tmp_path / "s" / SLAB_FILE, LAYOUT.page_stride)
    assert read_checked(store, LAYOUT, keys) == 1
    store.close()


# ---- the budget -----------------------------------------------------------------------------------


@pytest.mark.parametrize("values", MODES)
def test_sixteen_budgets_go_through_one(tmp_path: Path, values: ValuesMode) -> None:
    store = open_store(tmp_path / "s", values)
    batch = 32
    for number in range(16 * BUDGET // (batch * LAYOUT.page_stride)):
        assert store.write([run_of(LAYOUT, chain(f"{number}", batch))]) == [batch]
        assert disk_bytes(tmp_path / "s") <= BUDGET + batch * LAYOUT.page_stride
    usage = store.usage()
    assert usage.pages * LAYOUT.page_stride > BUDGET // 8
    assert usage.used_bytes <= BUDGET
    store.close()


def test_a_lower_budget_shrinks_the_store(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s", budget=4 * BUDGET)
    for number in range(100):
        store.write([run_of(LAYOUT, chain(f"{number}", 32))])
    store.close()
    assert disk_bytes(tmp_path / "s") > 2 * BUDGET
    store = open_store(tmp_path / "s", budget=2 * BUDGET)
    assert disk_bytes(tmp_path / "s") <= 2 * BUDGET
    assert read_checked(store, LAYOUT, chain("99", 32)) == 32
    store.close()


@pytest.mark.parametrize("values", MODES)
def test_a_budget_for_nothing_is_refused(tmp_path: Path, values: ValuesMode) -> None:
    with pytest.raises(ConfigError, match="does not hold one batch"):
        open_store(tmp_path / "s", values, budget=64 * 1024)
    assert not (tmp_path / "s").exists()


def test_clear_gives_the_slab_back_and_counts(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    store.write([run_of(LAYOUT, chain("a", 200))])
    assert store.generation == 0
    assert store.clear() == 200
    assert store.generation == 1
    assert (tmp_path / "s" / SLAB_FILE).stat().st_blocks == 0
    store.close()


# ---- where it may be opened -----------------------------------------------------------------------


def test_a_store_is_opened_once(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    (tmp_path / "link").symlink_to("s")
    for path in (tmp_path / "s", tmp_path / "link"):
        with pytest.raises(StoreUnavailableError, match="open already"):
            open_store(path)
    store.close()
    open_store(tmp_path / "link").close()


def test_a_forked_child_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    keys = chain("a", 5)
    store = open_store(tmp_path / "s")
    store.write([run_of(LAYOUT, keys)])
    if not (child := os.fork()):
        code = 1
        try:
            store.contains_prefix(keys)
        except StoreUnavailableError:
            store.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read_checked(store, LAYOUT, keys) == 5
    assert store.write([run_of(LAYOUT, chain("b", 5))]) == [5]
    store.close()


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


@pytest.mark.parametrize("choice", [{"values": "other"}, {"durability": "other"}])
def test_unknown_choices_are_refused(tmp_path: Path, choice: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="use one of"):
        LmdbBackend(tmp_path / "s", IDENTITY, BUDGET, **choice)  # type: ignore[arg-type]


# ---- the operating system says no -----------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    store = open_store(tmp_path / "s")
    store.write([run_of(LAYOUT, chain("a", 5))])
    with monkeypatch.context() as patch:
        patch.setattr(SlabFile, "write", refuse)
        with pytest.raises(StoreUnavailableError, match=os.strerror(code)):
            store.write([run_of(LAYOUT, chain("b", 5))])
    assert store.contains_prefix(chain("b", 5)) == 0
    assert read_checked(store, LAYOUT, chain("a", 5)) == 5
    assert store.write([run_of(LAYOUT, chain("b", 5))]) == [5]
    store.close()


def test_a_failed_read_is_an_error_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    keys = chain("a", 5)
    store = open_store(tmp_path / "s")
    store.write([run_of(LAYOUT, keys)])
    with monkeypatch.context() as patch:
        patch.setattr(SlabFile, "read", refuse)
        with pytest.raises(StoreUnavailableError):
            store.read_into(keys, filled_pages(LAYOUT, keys))
    assert read_checked(store, LAYOUT, keys) == 5
    store.close()


@pytest.mark.parametrize("durability", ["batch", "always"])
def test_durable_stores_keep_what_they_stored(tmp_path: Path, durability: str) -> None:
    for _ in range(2):
        store = LmdbBackend(tmp_path / "s", IDENTITY, BUDGET, "slab", durability)  # type: ignore[arg-type]
        assert store.write([run_of(LAYOUT, chain("a", 5))]) == [5]
        store.close()
    store = open_store(tmp_path / "s")
    assert store.usage().pages == 5
    store.close()
