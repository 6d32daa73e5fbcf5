"""Files that change underneath an open store, other PID namespaces, other users: noticed, named, and nothing lost that
was not taken away."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.errors import ConfigError, StoreReplacedError, StoreUnavailableError
from hicache.storage_backends import lmdb_locks
from hicache.storage_backends.base import StorageBackend
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.lmdb_compact import compact
from hicache.storage_backends.lmdb_env import DATA_FILE
from hicache.storage_backends.lmdb_locks import LOCK_FILE
from hicache.storage_backends.lmdb_open import SLAB_FILE, StoreFolder
from hicache.storage_backends.lmdb_readers import READERS_FILE
from hicache.storage_backends.lmdb_verify import check_structure
from hicache.storage_backends.recovering import RecoveringBackend
from hicache.testing.audit import audit
from hicache.testing.processes import exit_code, forked
from hicache.testing.storage import IDENTITY, chain, read_checked, run_of

LAYOUT = IDENTITY.layout
BUDGET = 4 << 20
SLAB = f"{SLAB_FILE}-{LAYOUT.page_stride}"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes its user")


def open_store(path: Path, budget: int = BUDGET) -> LmdbBackend:
    return LmdbBackend(path, IDENTITY, budget, durability="none")


def write(store: StorageBackend, name: str, length: int = 5) -> int:
    return store.write([run_of(LAYOUT, chain(name, length))])[0]


def read(store: StorageBackend, name: str, length: int = 5) -> int:
    return read_checked(store, LAYOUT, chain(name, length))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


# ---- the lock file --------------------------------------------------------------------------------


def test_a_lock_file_that_is_removed_leaves_nobody_alone_with_an_open_store(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As systemd-tmpfiles does in /var/tmp. Nobody may cut or compact it, and who joins keeps to its budget."""
    store = open_store(path)
    assert write(store, "a", 100) == 100

    def others() -> None:
        with pytest.raises(StoreUnavailableError, match="open in another process") as raised:
            compact(path)
        assert raised.value.reason == "busy"
        assert not check_structure(path)
        second = open_store(path, 2 << 20)
        assert second.usage().budget_bytes == BUDGET
        assert read(second, "a", 100) == 100
        assert write(second, "b") == 5
        second.close()

    for _ in range(2):
        (path / LOCK_FILE).unlink(missing_ok=True)
        assert exit_code(others) == 0
        assert read(store, "a", 100) == 100  # makes the file again
        assert (path / LOCK_FILE).exists()
        assert not StoreFolder(path).try_alone()
    assert "its file 'lock' was removed while it was open" in caplog.text
    audit(store)
    store.close()
    store = open_store(path)
    assert (read(store, "a", 100), read(store, "b")) == (100, 5)
    store.close()


def test_who_comes_after_lmdbs_lock_file_was_removed_waits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """He would have another writer's lock than those who have the store open."""
    monkeypatch.setattr(lmdb_locks, "JOIN_SECONDS", 0.02)
    store = open_store(path)
    assert write(store, "a") == 5
    for name in (READERS_FILE, LOCK_FILE):
        (path / name).unlink()

    def refused() -> None:
        with pytest.raises(StoreUnavailableError, match=READERS_FILE):
            open_store(path)

    assert exit_code(refused) == 0
    with pytest.raises(StoreReplacedError):
        write(store, "b")
    store.close()
    assert exit_code(lambda: open_store(path).close()) == 0
    store = open_store(path)
    assert read(store, "a") == 5
    store.close()


# ---- other files ----------------------------------------------------------------------------------


def _remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def _replace(name: str) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        shutil.copy(path / name, path / "copy")
        os.replace(path / "copy", path / name)

    return replace


def _empty(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def _move(path: Path) -> None:
    path.rename(path.with_name("moved"))


def _replace_folder(path: Path) -> None:
    _move(path)
    shutil.copytree(path.with_name("moved"), path)


CHANGES: dict[str, Callable[[Path], None]] = {
    "folder_removed": shutil.rmtree,
    "folder_removed, moved": _move,
    "folder_replaced": _replace_folder,
    "index_removed": _remove(DATA_FILE),
    "index_removed, all files": _empty,
    "index_replaced": _replace(DATA_FILE),
    "lock_removed": _remove(READERS_FILE),
    "lock_replaced": _replace(READERS_FILE),
    "slab_removed": _remove(SLAB),
    "slab_replaced": _replace(SLAB),
}
KEPT = ("folder_replaced", "lock_removed", "lock_replaced", "index_replaced", "slab_replaced")
"""Changes after which the pages are still, or again, at the path."""

CALLS: dict[str, Callable[[StorageBackend], object]] = {
    "read": lambda store: read(store, "a"),
    "write": lambda store: write(store, "b"),
    "lookup": lambda store: store.contains_prefix(chain("a", 5)),
    "usage": lambda store: store.usage(),
    "clear": lambda store: store.clear(),
    "delete": lambda store: store.delete(chain("a", 1)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", CALLS)
def test_a_change_underneath_is_noticed_by_the_next_call(path: Path, change: str, call: str) -> None:
    if change.startswith("slab") and call not in ("read", "write"):
        pytest.skip("the slab is not looked at")
    store = open_store(path)
    assert write(store, "a") == 5
    CHANGES[change](path)
    with pytest.raises(StoreReplacedError) as raised:
        CALLS[call](store)
    assert raised.value.reason == change.partition(",")[0]
    assert str(path) in str(raised.value)
    store.close()


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_underneath_the_store_is_opened_again(path: Path, change: str) -> None:
    """With what lies at the path now, or begun there."""
    store = RecoveringBackend(lambda: open_store(path))
    assert write(store, "a") == 5
    CHANGES[change](path)
    with pytest.raises(StoreReplacedError):
        read(store, "a")
    assert read(store, "a") == 5 * (change in KEPT)
    assert write(store, "b") == 5
    assert read(store, "b") == 5
    store.close()
    last = open_store(path)
    assert read(last, "b") == 5
    audit(last)
    last.close()


def test_a_store_that_was_moved_away_stays_as_it_was(path: Path) -> None:
    store = RecoveringBackend(lambda: open_store(path))
    assert write(store, "a") == 5
    _move(path)
    with pytest.raises(StoreReplacedError):
        write(store, "b")
    assert write(store, "c") == 5
    store.close()
    moved = open_store(path.with_name("moved"))
    assert (read(moved, "a"), read(moved, "c")) == (5, 0)
    moved.close()


def test_pages_that_went_to_removed_files_are_not_acknowledged(path: Path) -> None:
    """The folder goes while a write is under way."""
    store = open_store(path)
    inner = store._store._insert

    def insert(*args: Any, **more: Any) -> Any:
        result = inner(*args, **more)
        shutil.rmtree(path)
        return result

    store._store._insert = insert  # type: ignore[method-assign]
    with pytest.raises(StoreReplacedError):
        write(store, "a")
    store.close()


# ---- processes ------------------------------------------------------------------------------------


NAMESAKE = """
import os, sys
from pathlib import Path
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.testing.storage import IDENTITY, chain, read_checked, run_of

store = LmdbBackend(Path(sys.argv[1]), IDENTITY, 4 << 20)
for order in sys.stdin:
    verb, name = order.split()
    keys = chain(name, 5)
    if verb == "write":
        done = store.write([run_of(IDENTITY.layout, keys)])[0]
    else:
        done = read_checked(store, IDENTITY.layout, keys)
    print(os.getpid(), done, flush=True)
store.close()
"""


@as_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_processes_with_the_same_id_in_two_containers_share_a_store(path: Path) -> None:
    """LMDB's table of readers takes no two processes with the same id."""
    if subprocess.run(["unshare", "--pid", "--fork", "true"], check=False).returncode:
        pytest.skip("no PID namespace may be made here")
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", NAMESAKE, str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first, subprocess.Popen(command, **pipes) as second:

        def ask(process: subprocess.Popen[str], order: str) -> str:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(f"{order}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        for process, name in ((first, "z"), (second, "z")):
            assert ask(process, f"read {name}") == "1 0"  # both are in LMDB's table of readers
        for process, name in ((first, "a"), (second, "b"), (first, "c"), (second, "d")):
            assert ask(process, f"write {name}") == "1 5"
        for process in (first, second):
            assert [ask(process, f"read {name}") for name in "abcd"] == ["1 5"] * 4
    store = open_store(path)
    assert [read(store, name) for name in "abcd"] == [5] * 4
    audit(store)
    store.close()


def lmdb_sees(path: Path, process: int) -> bool:
    """Does LMDB take the process for alive? It looks for a lock on the byte of that number, whose owner a close of
    any copy of the file would give up."""

    def look() -> None:
        with open(path / READERS_FILE, "r+b") as file:
            asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, process, 1, 0)
            found = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, asked))
        os._exit(found[0] == fcntl.F_UNLCK)

    return exit_code(look) == 0


def test_lmdb_takes_those_who_read_for_alive(path: Path) -> None:
    """Whoever begins a store, finds one or joins, and whoever has seen others come and go; and only while they read:
    a process of the same id in another container could not open it else."""
    for _ in range(2):
        store = open_store(path)
        assert read(store, "a") == 5 or write(store, "a") == 5

        def reads(store: LmdbBackend) -> bool:
            return bool(store._store.view(lambda view: store._store.view(lambda view: lmdb_sees(path, os.getpid()))))

        def join(pipe: Any) -> None:
            other = open_store(path)
            pipe.send(reads(other))
            pipe.recv()
            other.close()

        with forked(join) as process:
            assert process.receive()
            process.send("close")
        second = open_store(path)
        assert read(second, "a") == 5
        second.close()
        assert not check_structure(path)
        assert reads(store)
        assert not lmdb_sees(path, os.getpid())
        store.close()


def test_a_child_that_outlives_its_parent_keeps_no_lock(path: Path) -> None:
    """Neither the folder's nor the writer's turn: it has copies of the parent's open files."""

    def parent(pipe: Any) -> None:
        store = open_store(path)
        with store._store.env.writer(0):
            child = os.fork()
            if not child:
                signal.pause()
            pipe.send(child)
            pipe.recv()

    with forked(parent) as process:
        child = process.receive()
        try:
            process.kill()
            folder = StoreFolder(path)
            assert folder.try_alone()
            folder.release()
            store = open_store(path)
            assert write(store, "a") == 5
            store.close()
        finally:
            os.kill(child, signal.SIGKILL)


# ---- users ----------------------------------------------------------------------------------------


def as_user(user: int, group: int, work: Callable[[], object]) -> int:
    """Exit code of `work`, done by another user."""

    def change() -> None:
        os.setgroups([])
        os.setgid(group)
        os.setuid(user)
        os.umask(0o002)
        work()

    return exit_code(change)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder of user 1001 and group 2000, in one that all may look into, as pytest's is not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        path = Path(name) / "shared"
        path.mkdir()
        os.chown(path, 1001, 2000)
        os.chmod(path, 0o2770)
        yield path


@as_root
def test_users_of_one_group_share_a_store(shared: Path) -> None:
    path = shared

    def use(name: str) -> None:
        store = open_store(path)
        assert write(store, name) == 5
        store.close()

    assert as_user(1001, 2000, lambda: use("a")) == 0
    assert as_user(1002, 2000, lambda: use("b")) == 0
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == dict.fromkeys(
        (LOCK_FILE, READERS_FILE, DATA_FILE, SLAB, "session"), "0o664"
    )


@as_root
@pytest.mark.parametrize("name", [LOCK_FILE, READERS_FILE, DATA_FILE, SLAB, "session"])
def test_a_file_that_a_user_may_not_write_is_named(shared: Path, name: str) -> None:
    path = shared
    store = open_store(path)
    write(store, "a")
    store.close()
    for file in path.iterdir():
        os.chown(file, 1001, 2000)
        os.chmod(file, 0o660)
    os.chmod(path / name, 0o640)
    before = sorted((file.name, file.read_bytes()) for file in path.iterdir())

    def refused() -> None:
        with pytest.raises(ConfigError) as raised:
            open_store(path)
        assert str(path / name) in str(raised.value) and "mode 0640" in str(raised.value), raised.value

    assert as_user(1002, 2000, refused) == 0
    assert sorted((file.name, file.read_bytes()) for file in path.iterdir()) == before


@as_root
def test_a_folder_that_cannot_be_reached_is_named(shared: Path) -> None:
    os.chmod(shared, 0o700)

    def refused() -> None:
        with pytest.raises(ConfigError, match=str(shared)):
            open_store(shared / "s")

    assert as_user(1002, 2000, refused) == 0


def test_an_undisturbed_start_says_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        open_store(path).close()
        open_store(path).close()
    assert caplog.text == ""
