"""Stores that are set aside are kept, found, listed, and brought back by the version that can read them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.errors import ConfigError, StoreUnavailableError
from hicache.storage_backends import lmdb_aside, lmdb_opening
from hicache.storage_backends.lmdb_aside import remove_aside, stores_aside
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.lmdb_env import DATA_FILE
from hicache.testing.audit import audit
from hicache.testing.processes import exit_code
from hicache.testing.storage import IDENTITY, chain, read_checked, run_of

LAYOUT = IDENTITY.layout


def open_store(path: Path) -> LmdbBackend:
    return LmdbBackend(path, IDENTITY, 4 << 20, durability="none")


def use(path: Path, name: str) -> int:
    """How much of a chain a start finds; it is there afterwards."""
    store = open_store(path)
    keys = chain(name, 5)
    found = read_checked(store, LAYOUT, keys)
    assert store.write([run_of(LAYOUT, keys)]) == [5]
    audit(store)
    store.close()
    return found


def spoil(path: Path) -> None:
    with open(path / DATA_FILE, "r+b") as file:
        file.write(bytes(8192))


@pytest.fixture
def other_format(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """`setattr` makes this another version, `undo` the one that it is."""
    with monkeypatch.context() as patch:
        yield patch


def change_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lmdb_opening, "STORE_FORMAT", lmdb_opening.STORE_FORMAT + 1)


@pytest.fixture(params=["beside", "within"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store that can be renamed, and one that cannot, as a mount point."""
    folder = tmp_path / "s"
    if request.param == "within":
        rename = os.rename

        def refuse(source: Path, target: Path) -> None:
            if source == folder:
                raise OSError(16, os.strerror(16))
            rename(source, target)

        monkeypatch.setattr(os, "rename", refuse)
    return folder


def test_each_version_finds_its_own_store_again(path: Path, other_format: pytest.MonkeyPatch) -> None:
    """An upgrade, a rollback, an upgrade."""
    assert use(path, "old") == 0
    change_version(other_format)
    assert use(path, "new") == 0
    assert len(stores_aside(path)) == 1
    other_format.undo()
    assert use(path, "old") == 5
    assert use(path, "new") == 0
    change_version(other_format)
    assert use(path, "new") == 5
    assert [aside.reason for aside in stores_aside(path)] == [None]


def test_a_damaged_store_does_not_come_back(path: Path, other_format: pytest.MonkeyPatch) -> None:
    use(path, "old")
    spoil(path)
    assert use(path, "newer") == 0
    change_version(other_format)
    use(path, "new")
    other_format.undo()
    assert use(path, "newer") == 5
    assert [bool(aside.reason) for aside in stores_aside(path)] == [True, False]


def test_what_is_set_aside_is_listed_and_can_be_removed(path: Path) -> None:
    for _ in range(2):
        use(path, "a")
        spoil(path)
        use(path, "b")
    first, second = stores_aside(path)
    assert (first.number, second.number) == (1, 2)
    assert first.disk_bytes > 0 and "meta page" in (first.reason or "")
    with pytest.raises(ConfigError, match="set aside are: 1, 2"):
        remove_aside(path, 3)
    remove_aside(path, 1)
    assert stores_aside(path) == [second]
    assert use(path, "b") == 5


@pytest.mark.parametrize("killed_at", range(5))
def test_a_kill_while_a_mount_point_is_cleared_loses_no_file(
    tmp_path: Path, killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    use(path, "a")
    spoil(path)
    rename, calls = os.rename, [0]

    def die_or_rename(source: Path, target: Path) -> None:
        if source == path:
            raise OSError(16, os.strerror(16))
        if calls[0] == killed_at:
            os._exit(9)
        calls[0] += 1
        rename(source, target)

    monkeypatch.setattr(os, "rename", die_or_rename)
    files = {file.name: file.stat().st_ino for file in path.iterdir() if file.name not in ("lock", "damaged")}
    assert exit_code(lambda: open_store(path).close()) in (0, 9)
    calls[0] = -100
    open_store(path).close()
    kept = {file.name: file.stat().st_ino for aside in stores_aside(path) for file in aside.path.iterdir()}
    assert files.items() <= kept.items()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_store_in_a_mount_point_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(path)], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("nothing may be mounted here")
    try:
        use(path, "a")
        spoil(path)
        assert use(path, "b") == 0
        assert [aside.path for aside in stores_aside(path)] == [path / "aside-1"]
        assert use(path, "b") == 5
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_store_that_can_be_moved_nowhere_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    use(path, "a")
    spoil(path)

    def refuse(*_: object) -> None:
        raise OSError(16, os.strerror(16))

    monkeypatch.setattr(lmdb_aside.os, "rename", refuse)
    with pytest.raises(StoreUnavailableError, match="cannot be moved") as raised:
        open_store(path)
    assert raised.value.reason == "corrupt"
    assert (path / DATA_FILE).exists()


def test_files_that_cannot_be_linked_stay_set_aside(
    path: Path, other_format: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(path, "old")
    change_version(other_format)
    use(path, "new")
    other_format.undo()

    def refuse(*_: object) -> None:
        raise OSError(1, os.strerror(1))

    monkeypatch.setattr(os, "link", refuse)
    assert use(path, "old") == 0
    assert len(stores_aside(path)) == 2


def test_a_folder_that_only_looks_like_one_is_nobodys(path: Path) -> None:
    path.mkdir()
    other = path.with_name(f"{path.name}.aside-x")
    other.mkdir()
    assert stores_aside(path) == []
    shutil.rmtree(path)
    assert stores_aside(path) == []
