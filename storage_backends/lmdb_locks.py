"""Who has a store open: locks on the inodes of its files, held by open file descriptions.

Names prove nothing: a cleaner may remove the lock file, and a second one of that name is another lock. Process ids
prove nothing: two containers may both be process 1. So whoever has a store open holds a shared lock on the lock file,
on the index, and on LMDB's own lock file, and whoever wants it alone needs the first two exclusively.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from hicache.errors import ConfigError, StoreReplacedError, StoreUnavailableError
from hicache.storage_backends.filesystem import FILE_MODE, access_problem
from hicache.storage_backends.lmdb_env import DATA_FILE
from hicache.storage_backends.lmdb_readers import READERS_FILE

LOCK_FILE = "lock"
JOIN_SECONDS = 30.0
"""How long a process that joins waits for one that looks the store over."""

log = logging.getLogger(__name__)


class FolderLocks:
    """The locks of one process on the store in the folder `path`, from `try_alone` or `share` to `release`."""

    def __init__(self, path: Path) -> None:
        """Create the folder and its lock file if need be. Raises ConfigError, StoreUnavailableError."""
        self._path = path
        self._lock_path = str(path / LOCK_FILE)  # looked at with each call of a backend: kept ready
        self._open_lock()
        self._alone = False
        self._shared: dict[str, int] = {}  # open files with a lock, by name
        self._watched: dict[str, tuple[int, int]] = {}  # what must lie where, by path
        self._relocking = threading.Lock()

    @property
    def replaced(self) -> bool:
        """True if the lock file at the path is not the one that we opened."""
        return _identity_of(self._lock_path) != self._lock_id

    @property
    def in_place(self) -> bool:
        """False if the folder holds another index than the one that we share, or another lock file than ours."""
        if not self._watched:
            return not self.replaced  # we had it alone all the time
        path = str(self._path / DATA_FILE)
        return path in self._watched and _identity_of(path) == self._watched[path]

    def renew(self) -> None:
        """Open the lock file that is there now, if it is another one."""
        if self.replaced:
            self.release()
            self._open_lock()

    def try_alone(self) -> bool:
        """True if nobody else has the store open: nobody gets it until `share` or `release`."""
        if not _try_lock(self._lock, fcntl.LOCK_EX):
            return False
        if self._take(DATA_FILE, fcntl.LOCK_EX):
            self._alone = True
            return True
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # others have it open, whose lock file was removed
        return False

    def share(self) -> None:
        """Open the store to others, or wait until it is open to us. Raises StoreUnavailableError."""
        until = time.monotonic() + JOIN_SECONDS
        while not (_try_lock(self._lock, fcntl.LOCK_SH) and self._join()):
            if time.monotonic() > until:
                raise StoreUnavailableError(
                    f"the store in {self._path} is being repaired or compacted by another process, or was open in one "
                    f"when its {READERS_FILE} was removed: wait for it",
                    "busy",
                )
            time.sleep(0.01)

    def check(self) -> None:
        """Are the files at the path those that we share? Costs three calls of `stat`.

        A lock file that alone was removed is made again: the index is still locked, so that nobody had the store for
        himself meanwhile. Raises StoreReplacedError if anything else was removed or replaced.
        """
        for path, expected in self._watched.items():
            if _identity_of(path) != expected:
                raise StoreReplacedError(*self._what_happened(path))
        if self.replaced:
            self._lock_again()

    def release(self) -> None:
        """Give all locks up, the lock file's last."""
        for file in (*self._shared.values(), self._lock):
            fcntl.flock(file, fcntl.LOCK_UN)  # closing alone would leave it to children forked meanwhile
            os.close(file)
        self._alone = False
        self._shared.clear()
        self._watched.clear()

    def abandon(self) -> None:
        """To be called in a forked child: its copies would keep the locks when the parent is gone."""
        for file in (*self._shared.values(), self._lock):
            os.close(file)

    def _open_lock(self) -> None:
        self._lock = _open_lock(self._path)
        self._lock_id = _identity(os.fstat(self._lock))
        self._folder_id = _identity(os.stat(self._path))

    def _join(self) -> bool:
        """Share the index and LMDB's lock file as well; False, with nothing locked, if that cannot be done now."""
        if (self._alone or self._readers_are_common()) and self._take(DATA_FILE, fcntl.LOCK_SH):
            self._take_readers()
            self._alone = False
            self._watched = {
                str(self._path / name): _identity(os.fstat(file)) for name, file in sorted(self._shared.items())
            }
            return True
        if not self._alone:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        return False

    def _take_readers(self) -> None:
        """Lock LMDB's file, which it may have open by now: then no copy may be closed before it closes its own.

        That would drop the locks by which LMDB tells processes that live from those that died.
        """
        with suppress(FileNotFoundError):  # it is made by whoever opens the index next
            file = self._shared[READERS_FILE] = os.open(self._path / READERS_FILE, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(file, fcntl.LOCK_SH)  # those who look whether it is locked are quick

    def _readers_are_common(self) -> bool:
        """False if others have the index open with another lock file of LMDB than the one that is there."""
        return _is_held(self._path / READERS_FILE) or not _is_held(self._path / DATA_FILE)

    def _take(self, name: str, mode: int) -> bool:
        """Lock the file of this name, if there is one; False if others have it."""
        path, known = self._path / name, self._shared.get(name)
        if known is not None and _identity_of(path) != _identity(os.fstat(known)):
            os.close(self._shared.pop(name))  # written anew by us
            known = None
        if known is None:
            try:
                known = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return True
        if _try_lock(known, mode):
            self._shared[name] = known
            return True
        self._shared.pop(name, None)
        os.close(known)
        return False

    def _lock_again(self) -> None:
        with self._relocking, suppress(OSError):  # a folder that takes no new file: the index is locked all the same
            if not self.replaced:
                return
            file = os.open(self._path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            if not _try_lock(file, fcntl.LOCK_SH):  # somebody is finding out that the index is locked
                os.close(file)
                return
            old, self._lock, self._lock_id = self._lock, file, _identity(os.fstat(file))
            fcntl.flock(old, fcntl.LOCK_UN)
            os.close(old)
            log.warning("store %s: its file %r was removed while it was open, and has been made again: "
                        "exempt the folder from whatever cleans up there", self._path, LOCK_FILE)  # fmt: skip

    def _what_happened(self, path: str) -> tuple[str, str]:
        """Message and reason for a file that is not the one that we share."""
        what, victim = "file", Path(path).name
        reason = {DATA_FILE: "index", READERS_FILE: "lock"}[victim]
        if _identity_of(self._path) != self._folder_id:
            what, path, reason = "folder", str(self._path), "folder"
        verb = "replaced" if os.path.exists(path) else "removed"
        return (
            f"the {what} {path} was {verb} while the store was open: it is opened again as it is now; "
            "find out who does that",
            f"{reason}_{verb}",
        )


def _open_lock(path: Path) -> int:
    try:
        path.mkdir(exist_ok=True)
        return os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise StoreUnavailableError(f"storage path {path}: {error.strerror}", "disk_full") from error
        problem = (
            access_problem(path, lambda name: name == LOCK_FILE)
            or f"{error.strerror}; give a folder that can be written"
        )
        raise ConfigError(f"storage path {path}: {problem}") from error


def _try_lock(file: int, mode: int) -> bool:
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_held(path: Path) -> bool:
    """Does anybody hold a lock on this file?"""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(file, fcntl.LOCK_EX)
    finally:
        os.close(file)


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _identity_of(path: Path | str) -> tuple[int, int] | None:
    """Device and inode of what lies there; None if there is nothing."""
    try:
        return _identity(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
