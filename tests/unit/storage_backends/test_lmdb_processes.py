"""Several processes on one store."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest

from hicache.errors import StorageError, StoreIdentityError, StoreUnavailableError
from hicache.hashing import StoreIdentity
from hicache.storage_backends import budget, lmdb_env, lmdb_locks, lmdb_store, lmdb_transactions
from hicache.storage_backends.base import PageRun
from hicache.storage_backends.budget import BudgetPlan, ValuesMode
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.lmdb_env import IndexEnvironment
from hicache.storage_backends.lmdb_eviction import evict
from hicache.storage_backends.lmdb_index import IndexWriter
from hicache.storage_backends.lmdb_open import StoreFolder
from hicache.testing.audit import audit
from hicache.testing.processes import Process, Work, exit_code, forked
from hicache.testing.storage import IDENTITY, chain, filled_pages, read_checked, run_of

LAYOUT = IDENTITY.layout
OTHER = replace(IDENTITY, model="other")
WIDE = replace(IDENTITY, layout=replace(LAYOUT, num_layers=16))
"""Pages of 32 KiB."""
BUDGET = 4 << 20
MODES: list[ValuesMode] = ["slab", "inline"]


def open_store(path: Path, values: ValuesMode = "slab", budget_bytes: int = BUDGET, **options: Any) -> LmdbBackend:
    identity: StoreIdentity = options.pop("identity", IDENTITY)
    return LmdbBackend(path, identity, budget_bytes, values, **{"durability": "none", **options})


def write(store: LmdbBackend, name: str, length: int = 5, generation: int | None = None) -> int:
    keys = chain(name, length)
    return store.write([PageRun(keys, filled_pages(LAYOUT, keys), None, generation)])[0]


def read(store: LmdbBackend, name: str, length: int = 5) -> int:
    return read_checked(store, LAYOUT, chain(name, length))


def remove(store: LmdbBackend, name: str) -> int:
    return store.delete(chain(name, 1))


def map_bytes(store: LmdbBackend) -> int:
    return store._store.env.map_bytes


CALLS: dict[str, Callable[..., Any]] = {
    "write": write,
    "read": read,
    "clear": LmdbBackend.clear,
    "usage": LmdbBackend.usage,
    "map": map_bytes,
}


def serving(path: Path, *options: Any, **more: Any) -> Work:
    """A process that has the store open and does what it is told, until it is told to close."""

    def work(pipe: Any) -> None:
        store = open_store(path, *options, **more)
        pipe.send("open")
        while (order := pipe.recv()) != "close":
            try:
                pipe.send(CALLS[order[0]](store, *order[1:]))
            except StorageError as error:
                pipe.send(error.reason)
        store.close()
        pipe.send("closed")

    return work


@contextmanager
def another(path: Path, *options: Any, **more: Any) -> Iterator[Process]:
    with forked(serving(path, *options, **more)) as process:
        assert process.receive() == "open"
        yield process
        if process.lives:
            process.send("close")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.mark.parametrize("values", MODES)
def test_two_processes_write_in_turn_and_read_each_others_pages(path: Path, values: ValuesMode) -> None:
    with another(path, values) as other:
        store = open_store(path, values)
        for number in range(150):
            assert other.ask(("write", f"theirs {number}", 8)) == 8
            assert read(store, f"theirs {number}", 8) == 8
            assert write(store, f"ours {number}", 8) == 8
            assert other.ask(("read", f"ours {number}", 8)) == 8
        assert store.usage() == other.ask(("usage",))
        assert store.usage().evicted_pages > 0
        audit(store)
        store.close()


def test_a_process_joins_while_another_writes(path: Path) -> None:
    """What it finds is whole, at any time."""

    def write_on(pipe: Any) -> None:
        store, number = open_store(path), 0
        pipe.send(None)
        while not pipe.poll():
            assert write(store, f"{number % 200}", 10) == 10
            number += 1

    with forked(write_on) as writer:
        writer.receive()
        for _ in range(10):
            store = open_store(path)
            for number in range(0, 200, 10):
                read(store, f"{number}", 10)
            assert write(store, "ours", 10) == 10
            store.close()
        writer.send("enough")
    store = open_store(path)
    audit(store)
    store.close()


def test_room_that_another_process_takes_is_made_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making room and using it are two transactions; others may come in between."""
    with another(path) as other:
        store, number = open_store(path, identity=WIDE), 0
        while not other.ask(("usage",)).evicted_pages:
            other.ask(("write", f"fill {number}", 20))
            number += 1
        robberies: list[bool] = []
        make_room = store._store._make_room

        def make_room_for_others(*args: Any) -> bool:
            made = make_room(*args)
            if len(robberies) < 3:
                for page in range(60):  # one by one, so that room is left for one of these only
                    assert other.ask(("write", f"rob {len(robberies)}/{page}", 1)) == 1
                robberies.append(made)
            return made

        monkeypatch.setattr(store._store, "_make_room", make_room_for_others)
        assert store.write([run_of(WIDE.layout, chain("a", 6))]) == [6]
        assert len(robberies) == 3
        audit(store)
        store.close()


# ---- the map --------------------------------------------------------------------------------------


@pytest.fixture
def small_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """The map is made far too small for the pages that there is room for."""
    monkeypatch.setattr(budget, "INDEX_BYTES_PER_PAGE", 16)
    monkeypatch.setattr(BudgetPlan, "_working_bytes", property(lambda self: 128 << 10))


def fill_until_it_grows(process: Process) -> int:
    """Have the other process write until its map is larger; returns its size."""
    before, number = process.ask(("map",)), 0
    while (now := process.ask(("map",))) == before:
        assert process.ask(("write", f"fill {number}", 20)) == 20
        number += 1
        assert number < 100, "the map was never full"
    return int(now)


@pytest.mark.usefixtures("small_map")
@pytest.mark.parametrize("use", [read, write, remove])
def test_a_map_that_one_enlarges_is_followed_by_the_other(path: Path, use: Callable[..., int]) -> None:
    with another(path) as other:
        store = open_store(path)
        write(store, "a")
        now = fill_until_it_grows(other)
        assert map_bytes(store) < now
        assert use(store, "a") == 5
        assert map_bytes(store) == now
        assert write(store, "b") == 5
        assert other.ask(("read", "b")) == 5
        audit(store)
        store.close()


@pytest.mark.usefixtures("small_map")
def test_a_map_that_grows_in_the_middle_of_a_write_is_followed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the pages are encoded others write."""
    with another(path) as other:
        store = open_store(path)
        grown: list[int] = []
        encode = store._encode

        def encode_slowly(page: Any) -> Any:
            if not grown:
                grown.append(fill_until_it_grows(other))
            return encode(page)

        monkeypatch.setattr(store, "_encode", encode_slowly)
        assert write(store, "a") == 5
        assert map_bytes(store) == grown[0]
        assert read(store, "a") == 5
        audit(store)
        store.close()


@pytest.mark.usefixtures("small_map")
def test_a_process_that_joins_later_sees_the_whole_map(path: Path) -> None:
    with another(path) as other:
        now = fill_until_it_grows(other)
        store = open_store(path)
        assert map_bytes(store) >= now
        assert read(store, "fill 0", 20) == 20
        store.close()


# ---- clearing, budgets ----------------------------------------------------------------------------


def test_what_one_process_has_cleared_another_does_not_bring_back(path: Path) -> None:
    with another(path) as other:
        store = open_store(path)
        before = store.generation()
        assert write(store, "a", generation=before) == 5
        assert other.ask(("clear",)) == 5
        assert read(store, "a") == 0
        assert write(store, "a", generation=before) == 0
        assert store.generation() == before + 1
        assert write(store, "a", generation=before + 1) == 5
        assert other.ask(("read", "a")) == 5
        store.close()


@pytest.mark.parametrize("budget_bytes", [BUDGET // 2, 2 * BUDGET])
def test_the_budget_of_the_first_holds_for_all(path: Path, budget_bytes: int) -> None:
    store = open_store(path)
    with another(path, budget_bytes=budget_bytes) as second, another(path, budget_bytes=budget_bytes) as third:
        for number in range(60):
            for process in (second, third):
                process.ask(("write", f"{process.pid} {number}", 20))
        assert second.ask(("usage",)).budget_bytes == BUDGET
        assert BUDGET // 2 < store.usage().used_bytes <= BUDGET
        audit(store)
    store.close()


def test_another_mode_of_values_is_refused_while_it_is_open(path: Path) -> None:
    with another(path, "inline"), pytest.raises(StoreIdentityError, match="made with values: inline, not slab"):
        open_store(path, "slab")


# ---- processes that end ---------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", [False, True])
def test_killed_readers_give_their_slots_back(path: Path, buffers: bool) -> None:
    """All slots of the reader table belong to a process that is gone."""
    path.mkdir()
    env = IndexEnvironment(path, 1 << 20, "none")
    env.open_databases({})

    def read_and_die() -> None:
        env.abandon()
        reader, transactions = lmdb.open(str(path)), []
        with suppress(lmdb.ReadersFullError):
            while True:
                transactions.append(reader.begin())
        os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(read_and_die) == -signal.SIGKILL
    assert env.readers() >= lmdb_env.MAX_READERS
    with env.view(buffers=buffers) as view:
        assert view.spaces() == {}
    assert env.readers() <= 1
    env.close()


@pytest.mark.parametrize("values", MODES)
def test_readers_that_are_killed_all_the_time_do_no_harm(path: Path, values: ValuesMode) -> None:
    store = open_store(path, values)
    for number in range(15):
        assert write(store, f"{number}", 20) == 20
        with another(path, values) as other:
            assert other.ask(("read", f"{number}", 20)) == 20
            other.kill()
    assert store._store.env.readers() < 15
    for number in range(100):
        assert write(store, f"more {number}", 20) == 20
    audit(store)
    store.close()


@pytest.mark.parametrize("values", MODES)
def test_a_killed_writer_gives_the_lock_back(path: Path, values: ValuesMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies within a transaction, with bytes written that nothing refers to yet."""

    def write_slowly(pipe: Any) -> None:
        store = open_store(path, values)
        write(store, "before")
        pipe.send("open")
        pipe.recv()
        real = IndexWriter.insert

        def stop(*args: Any) -> None:
            real(*args)
            pipe.send("within a transaction")
            pipe.recv()

        monkeypatch.setattr(IndexWriter, "insert", stop)
        write(store, "never")

    with forked(write_slowly) as writer:
        writer.receive()
        store = open_store(path, values)
        assert writer.ask("go on") == "within a transaction"
        assert read(store, "before") == 5
        writer.kill()
        assert write(store, "after") == 5
        assert (read(store, "never"), read(store, "before"), read(store, "after")) == (0, 5, 5)
        audit(store)
        store.close()


def test_a_child_that_closes_what_it_has_inherited_does_not_disturb_the_parent(path: Path) -> None:
    store = open_store(path)
    write(store, "a")

    def check(view: Any) -> int:
        assert exit_code(store.close) == 0
        assert len(store._store.env.env.readers().splitlines()) > 1, "this transaction is not on the list any more"
        return int(view.space(store._number).pages)

    assert store._store.view(check) == 5
    assert not is_free(path)
    assert write(store, "b") == 5
    store.close()
    assert is_free(path)


def is_free(path: Path) -> bool:
    """Has nobody the store open?"""
    folder = StoreFolder(path)
    alone = folder.try_alone()
    folder.release()
    return alone


def test_a_child_that_lives_on_does_not_keep_the_folder(path: Path) -> None:
    """It has copies of the parent's files, and with them of its lock."""
    store = open_store(path)
    with forked(lambda pipe: pipe.recv()) as child:
        store.close()
        assert is_free(path)
        child.send("enough")


def test_who_finds_the_folder_taken_waits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process repairs the store: not for ever, and it is opened as soon as that is done."""
    path.mkdir()
    (path / lmdb_locks.LOCK_FILE).touch()

    def repair(pipe: Any) -> None:
        with open(path / lmdb_locks.LOCK_FILE) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            pipe.send("repairing")
            pipe.recv()

    with forked(repair) as process:
        process.receive()
        with monkeypatch.context() as patch, pytest.raises(StoreUnavailableError) as raised:
            patch.setattr(lmdb_locks, "JOIN_SECONDS", 0.02)
            open_store(path)
        assert raised.value.reason == "busy"
        process.send("enough")
        process.join()
        open_store(path).close()


# ---- a clear that is cut short --------------------------------------------------------------------


def begin_to_clear_and_die(path: Path, steps: int, patch: pytest.MonkeyPatch) -> None:
    """Killed after the first transaction and `steps` more."""
    store, calls = open_store(path), [0]

    def die_later(*args: Any) -> Any:
        if calls[0] == steps:
            os.kill(os.getpid(), signal.SIGKILL)
        calls[0] += 1
        return evict(*args)

    patch.setattr(lmdb_store, "evict", die_later)
    patch.setattr(lmdb_store, "MAX_CHUNK_PAGES", 7)
    store.clear()


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("beside", [False, True])
def test_a_clear_that_is_cut_short_is_finished(
    path: Path, steps: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next start, or by the next write of another process that has the store open. What is beside it stays."""
    store, other = open_store(path), open_store(path, identity=OTHER)
    assert write(store, "a", 40) == 40
    assert write(other, "b", 40) == 40
    if not beside:
        other.close()
        store.close()
    assert exit_code(lambda: begin_to_clear_and_die(path, steps, monkeypatch)) == -signal.SIGKILL
    if not beside:
        store, other = open_store(path), open_store(path, identity=OTHER)
        assert store.usage().pages == 0
    else:
        assert store._store.view(lambda view: view.space(store._number).clearing)
    assert store.contains_prefix(chain("a", 40)) == read(store, "a", 40) == 0
    assert write(store, "new", 5) == read(store, "new", 5) == 5
    assert store.usage().pages == 5
    assert store.usage().evicted_pages == 0
    assert read(other, "b", 40) == 40
    audit(store)
    other.close()
    store.close()


def test_pages_written_after_a_clear_was_finished_by_another_stay(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that goes on with its clear only then has nothing to do."""
    monkeypatch.setattr(lmdb_store, "MAX_CHUNK_PAGES", 7)
    store, beside = open_store(path), open_store(path, identity=OTHER)
    assert (write(store, "a", 40), write(beside, "b")) == (40, 5)
    with another(path) as other:
        calls: list[Any] = []
        finish = store._store._finish_clear

        def count(*args: Any) -> Any:
            calls.append(args)
            return evict(*args)

        def late(number: int) -> None:
            assert other.ask(("write", "new")) == 5
            finish(number)

        monkeypatch.setattr(lmdb_store, "evict", count)
        monkeypatch.setattr(store._store, "_finish_clear", late)
        assert store.clear() == 40
        assert read(store, "new") == 5
        assert not calls
        audit(store)
    beside.close()
    store.close()


def test_late_pages_of_a_cleared_generation_are_refused_while_it_is_cleared(path: Path) -> None:
    store = open_store(path)
    run = run_of(LAYOUT, chain("a", 5))
    generation = store.generation()
    store.clear()
    assert store.write([replace(run, generation=generation), replace(run, generation=generation + 1)]) == [0, 5]
    store.close()


def test_a_stuck_reader_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it may see cannot be reused. When it ends, writing goes on."""
    monkeypatch.setattr(lmdb_transactions, "STUCK_LAG", 20)

    def hang(pipe: Any) -> None:
        with lmdb.open(str(path)) as env, env.begin():
            pipe.send("reading")
            pipe.recv()

    store = open_store(path, "inline")
    assert write(store, "a") == 5
    with forked(hang) as process:
        process.receive()
        with pytest.raises(StoreUnavailableError, match="find the process that hangs") as raised:
            for number in range(1000):
                write(store, f"{number}")
                assert read(store, f"{number}") == 5
        assert raised.value.reason == "reader_stuck"
        assert read(store, "0") in (0, 5)
        audit(store)
        process.send("enough")
        process.join()
        for number in range(200):
            assert write(store, f"more {number}") == read(store, f"more {number}") == 5
    audit(store)
    assert store.usage().used_bytes <= BUDGET
    store.close()
