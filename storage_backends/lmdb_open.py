"""Opening a store's folder: can it be one, who else has it open, is it whole, and what is it a store of.

Whoever comes first has the folder alone for a moment: it looks the store over, sets aside what cannot be
used, and takes up what an earlier process left. Then it shares it with whoever joins.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from hicache.errors import ConfigError, StoreCorruptError, StoreUnavailableError
from hicache.storage_backends.filesystem import check_local
from hicache.storage_backends.lmdb_damage import (
    MARK_FILE,
    MAX_WALKED_BYTES,
    check_mark,
    set_aside,
    used_data_bytes,
    walk_index,
)
from hicache.storage_backends.lmdb_env import DATA_FILE, Durability
from hicache.storage_backends.lmdb_rewrite import REWRITTEN, discard_rewritten

LOCK_FILE = "lock"
SESSION_FILE = "session"
SLAB_FILE = "slab"

JOIN_SECONDS = 30.0
"""How long a process that joins waits for one that looks the store over."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class StoreFolder:
    """The folder of one store, shared from `open` to `release` with other processes that have it open."""

    def __init__(self, path: Path) -> None:
        """Create the folder if need be. Raises ConfigError if it cannot be used."""
        self.path = path.resolve()  # a symlink stays where it is when a store is set aside
        check_local(self.path)
        self._lock = _open_lock(self.path)

    @property
    def key(self) -> tuple[int, int]:
        """Equal for two paths to the same folder."""
        stat = os.stat(self.path)
        return stat.st_dev, stat.st_ino

    def try_alone(self) -> bool:
        """True if nobody else has the store open: nobody gets it until `share`."""
        self._renew()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def share(self) -> None:
        """Open the store to others, or wait until it is open to us. Raises StoreUnavailableError."""
        until = time.monotonic() + JOIN_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise StoreUnavailableError(
                        f"the store in {self.path} is being repaired or compacted by another process: wait for it",
                        "busy",
                    ) from None
            time.sleep(0.01)

    @property
    def replaced(self) -> bool:
        """True if the folder was set aside before we shared it."""
        try:
            return os.stat(self.path / LOCK_FILE).st_ino != os.fstat(self._lock).st_ino
        except OSError:
            return True

    def check(self) -> None:
        """Is what lies here whole? To be called alone.

        Raises StoreCorruptError, or ConfigError if a store would begin among files that are not its own.
        """
        used = used_data_bytes(self.path)
        check_mark(self.path)
        discard_rewritten(self.path)
        if not used:
            self._check_empty()
        else:
            self._check_session()
            if used <= MAX_WALKED_BYTES:
                walk_index(self.path)

    def set_aside(self, reason: str) -> None:
        """Make room for a new store. To be called alone; the new folder is ours alone, too.

        Raises StoreUnavailableError if that cannot be done.
        """
        if stranger := self._stranger():
            raise StoreUnavailableError(
                f"the store in {self.path} cannot be used ({reason}), and its folder holds other files "
                f"({stranger}, ...): move them or the store away",
                "corrupt",
            )
        set_aside(self.path, reason)
        self._renew()
        if not self.try_alone():
            raise StoreUnavailableError(f"the store in {self.path} was opened while it was begun anew", "busy")

    def begin_session(self, durability: Durability) -> None:
        """Note that power may go from now on; `end_session` takes that back."""
        session = {"boot_id": _boot_id(), "durability": durability, "clean": False}
        (self.path / SESSION_FILE).write_text(json.dumps(session))

    def end_session(self) -> None:
        """Everything has been made durable. Notes that, unless others have the store open or the folder is gone."""
        with suppress(OSError):  # the note of a session that is under way stays: at worst the store is set aside
            if not self.replaced:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (self.path / SESSION_FILE).write_text(json.dumps({"clean": True}))

    def release(self) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing alone would leave it to children forked meanwhile
        os.close(self._lock)

    def _check_empty(self) -> None:
        if stranger := self._stranger():
            raise ConfigError(f"storage path {self.path} holds other files ({stranger}, ...): give an empty folder")

    def _stranger(self) -> str | None:
        """A file that is not of a store: a damaged store is set aside with its folder, which must not take it along."""
        return min((name for name in os.listdir(self.path) if not _is_own(name)), default=None)

    def _check_session(self) -> None:
        """Without syncs, an index that the power was taken from is not to be believed."""
        try:
            session = json.loads((self.path / SESSION_FILE).read_text())
            lost = not session["clean"] and session["durability"] == "none" and session["boot_id"] != _boot_id()
        except (OSError, ValueError, KeyError, TypeError):
            return  # a file of a few bytes that was not written in time: as after a killed process
        if lost:
            raise StoreCorruptError("the machine went down while it was open with durability: none")

    def _renew(self) -> None:
        """Lock the folder that is there now."""
        if self.replaced:
            os.close(self._lock)
            self._lock = _open_lock(self.path)


def _is_own(name: str) -> bool:
    files = (DATA_FILE, "lock.mdb", LOCK_FILE, SESSION_FILE, MARK_FILE, REWRITTEN, "lost+found")
    return name in files or name == SLAB_FILE or is_slab(name)  # "slab": of the first format


def slab_name(slot_bytes: int) -> str:
    """File of the slab with slots of that size."""
    return f"{SLAB_FILE}-{slot_bytes}"


def is_slab(name: str) -> bool:
    return re.fullmatch(rf"{SLAB_FILE}-\d+", name) is not None


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _open_lock(path: Path) -> int:
    try:
        path.mkdir(exist_ok=True)
        return os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise StoreUnavailableError(f"storage path {path}: {error.strerror}", "disk_full") from error
        raise ConfigError(f"storage path {path}: {error.strerror}; give a folder that can be written") from error
