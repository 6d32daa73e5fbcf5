"""Damaged stores: never a wrong byte, never a signal; what cannot be trusted is set aside, and work goes on."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest

from hicache.errors import ConfigError, StorageError, StoreCorruptError, StoreUnavailableError
from hicache.storage_backends import lmdb_open
from hicache.storage_backends.budget import ValuesMode
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.lmdb_damage import MARK_FILE, used_data_bytes
from hicache.storage_backends.lmdb_env import DATA_FILE
from hicache.storage_backends.lmdb_locks import LOCK_FILE
from hicache.storage_backends.lmdb_open import SESSION_FILE, SLAB_FILE
from hicache.storage_backends.lmdb_schema import MAX_DATABASES, Databases
from hicache.testing.audit import audit
from hicache.testing.processes import exit_code, forked
from hicache.testing.storage import IDENTITY, chain, read_checked, run_of

LAYOUT = IDENTITY.layout
BUDGET = 4 << 20
MODES: list[ValuesMode] = ["slab", "inline"]
SLAB = f"{SLAB_FILE}-{LAYOUT.page_stride}"
CHAINS = {"a": 12, "b": 8, "c": 5}


def open_store(path: Path, values: ValuesMode = "slab", **options: Any) -> LmdbBackend:
    return LmdbBackend(path, IDENTITY, BUDGET, values, **{"durability": "none", **options})


def fill(path: Path, values: ValuesMode = "slab", **options: Any) -> None:
    """A store with pages, free slots and holes, closed."""
    store = open_store(path, values, **options)
    for name, length in {**CHAINS, "gone": 9}.items():
        assert store.write([run_of(LAYOUT, chain(name, length))]) == [length]
    store.write([run_of(LAYOUT, chain("branch", 4), chain("a", 12)[5])])
    store.delete(chain("gone", 9)[4:])
    store.close()


def is_whole(store: LmdbBackend) -> bool:
    return [read_checked(store, LAYOUT, chain(name, length)) for name, length in CHAINS.items()] == [12, 8, 5]


def use(store: LmdbBackend) -> None:
    """Everything that a store does; whatever is read is compared."""
    for name, length in CHAINS.items():
        assert read_checked(store, LAYOUT, chain(name, length)) <= length
    for number in range(3):
        store.write([run_of(LAYOUT, chain(f"more {number}", 100))])
    store.delete(chain("b", 8)[2:])
    store.usage()
    store.clear()
    store.write([run_of(LAYOUT, chain("last", 5))])
    assert read_checked(store, LAYOUT, chain("last", 5)) in (0, 5)


def survive(path: Path, values: ValuesMode = "slab") -> None:
    """Use a damaged store as a tier does: open it again after an error. In the end it works."""
    for _ in range(4):
        try:
            store = open_store(path, values)
        except StorageError:
            continue
        try:
            use(store)
        except StorageError:
            continue
        finally:
            store.close()
        break
    store = open_store(path, values)
    assert store.write([run_of(LAYOUT, chain("end", 20))]) == [20]
    assert read_checked(store, LAYOUT, chain("end", 20)) == 20
    store.close()


def asides(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir() if entry.name.startswith(f"{path.name}.aside"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


# ---- the slab -------------------------------------------------------------------------------------


def test_a_flipped_byte_in_the_slab_is_found(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(path)
    keys, slab = chain("b", 8), bytearray((path / SLAB).read_bytes())
    slab[slab.index(keys[3])] ^= 1
    (path / SLAB).write_bytes(slab)
    store = open_store(path)
    with caplog.at_level(logging.WARNING):
        assert read_checked(store, LAYOUT, keys) == 3
    assert keys[3].hex() in caplog.text
    assert store.damaged_pages == 1
    assert store.contains_prefix(keys) == 3
    audit(store)
    store.close()
    assert asides(path) == []


@pytest.mark.parametrize("left", [0, 3, None])
def test_a_slab_that_is_cut_or_missing_loses_only_what_lay_there(path: Path, left: int | None) -> None:
    store = open_store(path)
    keys = chain("a", 20)
    store.write([run_of(LAYOUT, keys)])
    store.close()
    if left is None:
        (path / SLAB).unlink()
    else:
        os.truncate(path / SLAB, left * LAYOUT.page_stride)
    store = open_store(path)
    assert read_checked(store, LAYOUT, keys) == (left or 0)
    assert store.write([run_of(LAYOUT, keys)]) == [20]
    assert read_checked(store, LAYOUT, keys) == 20
    audit(store)
    store.close()


def test_a_slab_cut_while_open_gives_misses(path: Path) -> None:
    store, keys = open_store(path), chain("a", 20)
    store.write([run_of(LAYOUT, keys)])
    os.truncate(path / SLAB, LAYOUT.page_stride)
    assert read_checked(store, LAYOUT, keys) == 1
    assert store.write([run_of(LAYOUT, keys)]) == [20]
    assert read_checked(store, LAYOUT, keys) == 20
    audit(store)
    store.close()


def test_slabs_that_the_index_does_not_know_are_removed(path: Path) -> None:
    """As after a kill before the first commit to one."""
    fill(path)
    (path / f"{SLAB_FILE}-8192").write_bytes(bytes(1 << 20))
    store = open_store(path)
    assert not (path / f"{SLAB_FILE}-8192").exists()
    assert is_whole(store)
    store.close()


def test_blocks_without_a_page_are_given_back_at_open(path: Path) -> None:
    """As after a kill between the growth of the slab and the commit that says so."""
    fill(path)
    before = (path / SLAB).stat().st_blocks
    with open(path / SLAB, "r+b") as slab:
        os.posix_fallocate(slab.fileno(), os.fstat(slab.fileno()).st_size, 2 << 20)
    assert (path / SLAB).stat().st_blocks > before
    store = open_store(path)
    assert (path / SLAB).stat().st_blocks <= before
    assert is_whole(store)
    store.close()


# ---- the index as a file --------------------------------------------------------------------------


def _cut(size: int) -> Callable[[Path], None]:
    return lambda data: os.truncate(data, size)


def _garbage(start: int, size: int) -> Callable[[Path], None]:
    def overwrite(data: Path) -> None:
        with open(data, "r+b") as file:
            file.seek(start)
            file.write(random.Random(start).randbytes(size))

    return overwrite


SPOILS = {
    "cut within a meta page": _cut(100),
    "cut after a meta page": _cut(4096),
    "cut after the meta pages": _cut(8192),
    "cut in the middle": _cut(5 * 4096),
    "all garbage": _garbage(0, 1 << 16),
    "garbage in the first meta page": _garbage(0, 4096),
    "garbage in the second meta page": _garbage(4096, 4096),
    "garbage behind the meta pages": _garbage(8192, 1 << 16),
}


@pytest.mark.parametrize("values", MODES)
@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS.keys())
def test_a_damaged_index_is_set_aside(
    path: Path, values: ValuesMode, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    fill(path, values)
    spoil(path / DATA_FILE)
    spoiled = (path / DATA_FILE).read_bytes()
    assert exit_code(lambda: survive(path, values)) == 0
    assert asides(path) == ["s.aside-1"]
    assert (path.with_name("s.aside-1") / DATA_FILE).read_bytes() == spoiled


@pytest.mark.parametrize("values", MODES)
@pytest.mark.parametrize("size", [100, 4096, 8192, 5 * 4096])
def test_a_large_index_that_was_cut_is_set_aside(
    path: Path, values: ValuesMode, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not walked at the start: that its file is too short has to be seen before LMDB touches the rest."""
    monkeypatch.setattr(lmdb_open, "MAX_WALKED_BYTES", 0)
    fill(path, values)
    os.truncate(path / DATA_FILE, size)
    assert exit_code(lambda: survive(path, values)) == 0
    assert asides(path) == ["s.aside-1"]


def test_what_is_set_aside_gets_a_name_of_its_own_and_a_line_in_the_log(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        fill(path)
        _garbage(0, 8192)(path / DATA_FILE)
        open_store(path).close()
        assert f"set aside as {path}.aside-{number}" in caplog.text
    assert asides(path) == ["s.aside-1", "s.aside-2"]


def test_a_link_to_a_damaged_store_leads_to_the_new_one(path: Path) -> None:
    fill(path)
    link = path.with_name("link")
    link.symlink_to(path)
    _garbage(0, 8192)(path / DATA_FILE)
    store = open_store(link)
    assert store.write([run_of(LAYOUT, chain("a", 3))]) == [3]
    store.close()
    assert link.is_symlink()
    assert asides(link) == []
    assert asides(path) == ["s.aside-1"]
    store = open_store(path)
    assert store.usage().pages == 3
    store.close()


def flip(data: bytearray, rng: random.Random) -> tuple[int, int]:
    """One bit somewhere."""
    at = (rng.randrange(len(data)), rng.randrange(8))
    data[at[0]] ^= 1 << at[1]
    return at


@pytest.mark.parametrize("values", MODES)
@pytest.mark.parametrize("seed", range(2))
def test_flipped_bits_anywhere_in_the_index_do_no_harm(path: Path, values: ValuesMode, seed: int) -> None:
    """In a process of its own, so that a signal is seen."""
    pristine = path.with_name("pristine")
    fill(pristine, values)
    used = used_data_bytes(pristine)
    rng = random.Random(seed)

    def try_all(pipe: Any) -> None:
        for _ in range(30):
            shutil.copytree(pristine, path)
            with open(path / DATA_FILE, "r+b") as file:
                data = bytearray(file.read(used))
                pipe.send(flip(data, rng))
                file.seek(0)
                file.write(data)
            survive(path, values)
            for entry in path.parent.glob("s*"):
                shutil.rmtree(entry)
        pipe.send("all survived")

    with forked(try_all) as process:
        last = process.receive()
        while isinstance(last, tuple):
            before, last = last, _receive_after(process, last)
        assert last == "all survived", before


def _receive_after(process: Any, case: tuple[int, int]) -> Any:
    try:
        return process.receive()
    except EOFError:
        raise AssertionError(f"bit {case[1]} of byte {case[0]}: exit code {process.join()}") from None


# ---- the records of the index ---------------------------------------------------------------------

RECORDS = [name for name in Databases._fields if name != "values"]


@pytest.mark.parametrize("name", RECORDS)
def test_flipped_bits_in_its_records_do_no_harm(path: Path, name: str) -> None:
    """In some bits of the key, and of the value, of each of some records."""
    pristine, rng = path.with_name("pristine"), random.Random(name)
    fill(pristine)
    with lmdb.open(str(pristine), max_dbs=MAX_DATABASES) as env, env.begin() as txn:
        records = list(txn.cursor(env.open_db(name.encode(), txn=txn, create=False)))
    chosen = records if len(records) < 4 else rng.sample(records, 4)
    for key, value in chosen:
        for field in ("key", "value") if value else ("key",):
            for _ in range(3):
                shutil.copytree(pristine, path)
                _flip_record(path, name, key, value, field, rng)
                survive(path)
                for entry in path.parent.glob("s*"):
                    shutil.rmtree(entry)


def _flip_record(path: Path, name: str, key: bytes, value: bytes, field: str, rng: random.Random) -> None:
    new = {"key": bytearray(key), "value": bytearray(value)}
    flip(new[field], rng)
    with lmdb.open(str(path), max_dbs=MAX_DATABASES, map_size=16 << 20) as env:
        database = env.open_db(name.encode(), create=False)
        with env.begin(write=True, db=database) as txn:
            txn.delete(key)
            txn.put(bytes(new["key"]), bytes(new["value"]))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("pages", lambda store: store.contains_prefix(chain("b", 8)) and read_checked(store, LAYOUT, chain("b", 8))),
        ("spaces", lambda store: store.usage()),
        ("meta", lambda store: store.write([run_of(LAYOUT, chain("x", 1))])),
        ("slabs", lambda store: store.write([run_of(LAYOUT, chain("x", 1))])),
        ("free", lambda store: store.write([run_of(LAYOUT, chain("x", 1))])),
        ("holes", lambda store: store.clear()),
    ],
)
def test_damage_that_is_met_while_it_is_open_has_the_store_set_aside(
    path: Path, name: str, call: Callable[[LmdbBackend], object]
) -> None:
    """By the next start that has it alone."""
    fill(path)
    store = open_store(path)
    env, databases = store._store.env.env, store._store.env.databases
    with env.begin(write=True, db=getattr(databases, name)) as txn:
        for key, value in list(txn.cursor()):
            txn.put(key, value[:-1] + bytes([value[-1] ^ 1]))
    with pytest.raises(StoreCorruptError):
        call(store)
    assert (path / MARK_FILE).exists()
    store.close()
    store = open_store(path)
    assert asides(path) == ["s.aside-1"]
    assert store.usage().pages == 0
    assert not (path / MARK_FILE).exists()
    store.close()


@pytest.mark.parametrize("name", ["pages", "order"])
def test_an_index_that_lacks_a_part_is_set_aside(path: Path, name: str) -> None:
    """Its counters say how many records there should be."""
    fill(path)
    with lmdb.open(str(path), max_dbs=MAX_DATABASES) as env:
        database = env.open_db(name.encode(), create=False)
        with env.begin(write=True) as txn:
            txn.drop(database)
    open_store(path).close()
    assert asides(path) == ["s.aside-1"]


def test_a_store_that_does_not_say_whose_pages_it_has_is_set_aside(path: Path) -> None:
    """One letter of a label is another."""
    fill(path)
    with lmdb.open(str(path), max_dbs=MAX_DATABASES) as env:
        database = env.open_db(b"meta", create=False)
        with env.begin(write=True, db=database) as txn:
            label = txn.get(b"space 1", b"")
            txn.put(b"space 1", label.replace(b"conformance", b"conformanse"))
    open_store(path).close()
    assert asides(path) == ["s.aside-1"]


def test_a_clear_of_pages_that_are_not_in_the_order_comes_to_an_end(path: Path) -> None:
    fill(path)
    store = open_store(path)
    other = LmdbBackend(path, replace(IDENTITY, model="other"), BUDGET, durability="none")
    assert other.write([run_of(LAYOUT, chain("x", 3))]) == [3]
    databases = store._store.env.databases
    with store._store.env.env.begin(write=True) as txn:
        txn.drop(databases.order, delete=False)
    with pytest.raises(StoreCorruptError, match="missing in the eviction order"):
        store.clear()
    other.close()
    store.close()
    open_store(path).close()
    assert asides(path) == ["s.aside-1"]


@pytest.mark.parametrize(
    "label",
    [
        b'{"format": 3, "values": "slab"}',
        b'{"format": 2, "values": "slib"}',
        b'{"values": "slab"}',
        b'{"format": 2, "values": "slab"',
        b"[2]",
        b"\xff",
        b"",
    ],
)
def test_a_store_of_another_format_is_set_aside(path: Path, label: bytes) -> None:
    fill(path)
    _put_meta(path, b"store", label)
    store = open_store(path)
    assert asides(path) == ["s.aside-1"]
    assert store.usage().pages == 0
    store.close()


def test_a_store_of_the_first_format_is_set_aside(path: Path) -> None:
    """It had the identity where there is a label now."""
    path.mkdir()
    with lmdb.open(str(path), max_dbs=2) as env:
        env.open_db(b"meta")
    _put_meta(path, b"identity", json.dumps(IDENTITY.flat()).encode())
    (path / "slab").write_bytes(bytes(1 << 16))
    open_store(path).close()
    assert asides(path) == ["s.aside-1"]
    assert not (path / "slab").exists()


def _put_meta(path: Path, key: bytes, value: bytes) -> None:
    with lmdb.open(str(path), max_dbs=MAX_DATABASES) as env:
        database = env.open_db(b"meta", create=False)
        with env.begin(write=True, db=database) as txn:
            txn.put(key, value)


# ---- files beside it ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lock.mdb", LOCK_FILE, SESSION_FILE])
@pytest.mark.parametrize("raw", [b"", b"\xa5" * 100, b"\xa5" * (1 << 16), b"null", b"{}"])
def test_garbage_in_the_other_files_is_no_damage(path: Path, name: str, raw: bytes) -> None:
    fill(path)
    (path / name).write_bytes(raw)

    def open_it() -> None:
        store = open_store(path)
        assert is_whole(store)
        store.close()

    assert exit_code(open_it) == 0
    assert asides(path) == []


@pytest.mark.parametrize("values", MODES)
@pytest.mark.parametrize("size", [0, 100, 4096, 5 * 4096])
def test_an_index_cut_while_it_is_open_ends_no_process(path: Path, values: ValuesMode, size: int) -> None:
    """Pages of the map that the file has no longer must not be touched."""
    fill(path, values)

    def use_it() -> None:
        store = open_store(path, values)
        read_checked(store, LAYOUT, chain("a", 12))
        os.truncate(path / DATA_FILE, size)
        for call in (
            lambda: store.contains_prefix(chain("a", 12)),
            lambda: read_checked(store, LAYOUT, chain("a", 12)),
            lambda: store.write([run_of(LAYOUT, chain("x", 3))]),
            lambda: store.delete(chain("a", 1)),
            store.clear,
            store.usage,
            store.generation,
        ):
            with pytest.raises(StoreCorruptError, match="cut short"):
                call()
        store.close()

    assert exit_code(use_it) == 0
    open_store(path, values).close()
    assert asides(path) == ["s.aside-1"]


# ---- power ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("durability", "lost"), [("none", True), ("batch", False), ("always", False)])
def test_after_a_power_loss_a_store_that_was_not_synced_is_set_aside(
    path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, lost: bool
) -> None:
    def die() -> None:
        fill(path, durability=durability)
        open_store(path, durability=durability)
        os._exit(0)

    assert exit_code(die) == 0
    monkeypatch.setattr(lmdb_open, "_boot_id", lambda: "another")
    store = open_store(path)
    assert is_whole(store) is not lost
    store.close()
    assert bool(asides(path)) is lost


def test_a_process_that_joins_may_not_sync_either(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die() -> None:
        fill(path, durability="batch")
        open_store(path, durability="batch")
        assert exit_code(lambda: os._exit(0 if open_store(path, durability="none") else 1)) == 0
        os._exit(0)

    assert exit_code(die) == 0
    monkeypatch.setattr(lmdb_open, "_boot_id", lambda: "another")
    open_store(path).close()
    assert asides(path) == ["s.aside-1"]


def test_a_killed_process_loses_nothing(path: Path) -> None:
    def die() -> None:
        fill(path)
        open_store(path)
        os._exit(0)

    assert exit_code(die) == 0
    store = open_store(path)
    assert is_whole(store)
    store.close()


def test_the_end_of_a_store_that_was_moved_away_is_not_noted_in_its_successor(path: Path) -> None:
    fill(path)
    store = open_store(path)
    path.rename(path.with_name("moved"))
    path.mkdir()
    (path / SESSION_FILE).write_text("of the successor")
    (path / LOCK_FILE).touch()
    store.close()
    assert (path / SESSION_FILE).read_text() == "of the successor"


def test_after_a_clean_end_a_power_loss_takes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(path)
    monkeypatch.setattr(lmdb_open, "_boot_id", lambda: "another")
    store = open_store(path)
    assert is_whole(store)
    store.close()


def _mark(path: Path) -> None:
    (path / MARK_FILE).write_text("damaged")


def _spoil_index(path: Path) -> None:
    (path / DATA_FILE).write_text("not a database at all" * 1000)


@pytest.mark.parametrize("spoil", [lambda path: None, _mark, _spoil_index])
def test_other_files_are_never_set_aside(path: Path, spoil: Callable[[Path], None]) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    spoil(path)
    with pytest.raises((ConfigError, StoreUnavailableError), match=r"other files \(notes.txt"):
        open_store(path)
    assert asides(path) == []
    assert (path / "notes.txt").read_text() == "mine"
