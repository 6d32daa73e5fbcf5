"""Stores that were set aside: what cannot be used is kept, beside the store or within its folder."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hicache.errors import ConfigError, StoreUnavailableError
from hicache.storage_backends.lmdb_damage import MARK_FILE
from hicache.storage_backends.lmdb_env import DATA_FILE
from hicache.storage_backends.lmdb_locks import LOCK_FILE
from hicache.storage_backends.lmdb_readers import READERS_FILE

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SetAside:
    """A store that was set aside. `disk_bytes`: as the file system counts. `reason`: None where it is whole and of
    another format."""

    path: Path
    disk_bytes: int
    reason: str | None

    @property
    def number(self) -> int:
        return int(self.path.name.rpartition("-")[2])


def is_aside(name: str) -> bool:
    """Is this the name of a folder within a store's for one that was set aside?"""
    return re.fullmatch(r"aside-\d+", name) is not None


def stores_aside(path: Path) -> list[SetAside]:
    """Those of the store in `path`, the oldest first."""
    path = path.resolve()
    beside = re.compile(re.escape(path.name) + r"\.aside-\d+")
    found = [each for each in _folders(path.parent) if beside.fullmatch(each.name)]
    found += [each for each in _folders(path) if is_aside(each.name)]
    return sorted(map(_look, found), key=lambda aside: aside.number)


def remove_aside(path: Path, number: int) -> SetAside:
    """Delete the store that was set aside under that number. Raises ConfigError if there is none, OSError."""
    found = [aside for aside in stores_aside(path) if aside.number == number]
    if not found:
        known = ", ".join(str(aside.number) for aside in stores_aside(path)) or "none"
        raise ConfigError(f"{path} has no store aside-{number}; set aside are: {known}")
    for aside in found:
        shutil.rmtree(aside.path)
    return found[0]


def set_aside(path: Path, reason: str, is_own: Callable[[str], bool]) -> Path:
    """Make the folder `path` empty of what a store has there, and return where that is now.

    The folder is renamed to PATH.aside-N. Where that cannot be, because it is a mount point or nothing may be written
    beside it, its files are moved to PATH/aside-N; a process that is killed meanwhile is followed by one that goes on.
    To be called with the store alone. Raises StoreUnavailableError if neither can be done.
    """
    number = _next_number(path)
    target = path.with_name(f"{path.name}.aside-{number}")
    try:
        try:
            os.rename(path, target)
            path.mkdir()
        except OSError:
            target = _move_within(path, number, is_own)
    except OSError as error:
        raise StoreUnavailableError(
            f"the store in {path} cannot be used ({reason}) and cannot be moved to {target} "
            f"({error.strerror}); move it away",
            "corrupt",
        ) from error
    log.error(
        "store %s cannot be used (%s): set aside as %s, with %d bytes; 'hicache store aside' lists and removes such",
        path, reason, target, _disk_bytes(target),
    )  # fmt: skip
    return target


def _next_number(path: Path) -> int:
    return max((aside.number for aside in stores_aside(path)), default=0) + 1


def _move_within(path: Path, number: int, is_own: Callable[[str], bool]) -> Path:
    """Move a store's files to a folder of its own, the index last: as long as that is missing there, it is not done."""
    begun = [aside.path for aside in stores_aside(path) if aside.path.parent == path]
    target = next((each for each in begun if not (each / DATA_FILE).exists()), path / f"aside-{number}")
    target.mkdir(exist_ok=True)
    names = [name for name in os.listdir(path) if is_own(name) and not is_aside(name)]
    last = (DATA_FILE, MARK_FILE)  # a mark is for the index beside it
    for name in sorted(set(names) - {LOCK_FILE, "lost+found"}, key=lambda name: (name in last, name)):
        os.rename(path / name, target / name)
    return target


def bring_back(path: Path, aside: SetAside) -> None:
    """Have a store that was set aside in the folder `path` again, which holds none. To be called with it alone.

    Its files lie in both places until the index is moved: a process that is killed meanwhile takes nothing away.
    Raises OSError, with the store still where it was set aside.
    """
    for file in aside.path.iterdir():
        if file.name not in (DATA_FILE, LOCK_FILE, READERS_FILE) and file.is_file():
            (path / file.name).unlink(missing_ok=True)
            os.link(file, path / file.name)
    os.rename(aside.path / DATA_FILE, path / DATA_FILE)
    shutil.rmtree(aside.path)
    log.warning("store %s: %s is back, set aside before by a version that has another format", path, aside.path)


def _folders(path: Path) -> Iterator[Path]:
    if path.is_dir() and os.access(path, os.R_OK | os.X_OK):
        yield from (each for each in path.iterdir() if each.is_dir() and not each.is_symlink())


def _look(path: Path) -> SetAside:
    mark = path / MARK_FILE
    return SetAside(path, _disk_bytes(path), mark.read_text(errors="replace") if mark.exists() else None)


def _disk_bytes(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
