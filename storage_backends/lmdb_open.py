"""Opening a store's folder: can it be one, who else has it open, is it whole, and what is it a store of.

Whoever comes first has the folder alone for a moment: it looks the store over, sets aside what cannot be
used, and takes up what an earlier process left. Then it shares it with whoever joins.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path

from hicache.errors import ConfigError, StoreCorruptError, StoreUnavailableError
from hicache.storage_backends.filesystem import access_problem, check_local
from hicache.storage_backends.lmdb_aside import is_aside, set_aside
from hicache.storage_backends.lmdb_damage import (
    MARK_FILE,
    MAX_WALKED_BYTES,
    check_mark,
    used_data_bytes,
    walk_index,
)
from hicache.storage_backends.lmdb_env import DATA_FILE, Durability
from hicache.storage_backends.lmdb_locks import LOCK_FILE, FolderLocks
from hicache.storage_backends.lmdb_readers import READERS_FILE
from hicache.storage_backends.lmdb_rewrite import REWRITTEN, discard_rewritten

SESSION_FILE = "session"
SLAB_FILE = "slab"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class StoreFolder:
    """The folder of one store, shared from `open` to `release` with other processes that have it open."""

    def __init__(self, path: Path) -> None:
        """Create the folder if need be. Raises ConfigError if it cannot be used."""
        self.path = path.resolve()  # a symlink stays where it is when a store is set aside
        try:
            check_local(self.path)
            problem = access_problem(self.path, is_own) if self.path.exists() else None
        except PermissionError as error:
            problem = f"user {os.geteuid()} may not look there ({error.filename})"
        if problem:
            raise ConfigError(f"storage path {self.path}: {problem}")
        self._locks = FolderLocks(self.path)

    @property
    def key(self) -> tuple[int, int]:
        """Equal for two paths to the same folder."""
        stat = os.stat(self.path)
        return stat.st_dev, stat.st_ino

    def try_alone(self) -> bool:
        """True if nobody else has the store open: nobody gets it until `share`."""
        self._locks.renew()
        return self._locks.try_alone()

    def share(self) -> None:
        """Open the store to others, or wait until it is open to us. Raises StoreUnavailableError."""
        self._locks.share()

    @property
    def replaced(self) -> bool:
        """True if the folder was set aside before we shared it."""
        return self._locks.replaced

    def check_in_place(self) -> None:
        """Raises StoreReplacedError if the files that we share are not at the path any more; see `FolderLocks`."""
        self._locks.check()

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
        set_aside(self.path, reason, is_own)
        if not self.try_alone():
            raise StoreUnavailableError(f"the store in {self.path} was opened while it was begun anew", "busy")

    def begin_session(self, durability: Durability) -> None:
        """Note that power may go from now on; `end_session` takes that back."""
        session = {"boot_id": _boot_id(), "durability": durability, "clean": False}
        (self.path / SESSION_FILE).write_text(json.dumps(session))

    def end_session(self) -> None:
        """Everything has been made durable. Notes that, unless others have the store open or the folder is gone."""
        with suppress(OSError):  # the note of a session that is under way stays: at worst the store is set aside
            if self._locks.in_place and self._locks.try_alone():
                (self.path / SESSION_FILE).write_text(json.dumps({"clean": True}))

    def release(self) -> None:
        self._locks.release()

    def abandon(self) -> None:
        """To be called in a forked child."""
        self._locks.abandon()

    def _check_empty(self) -> None:
        if stranger := self._stranger():
            raise ConfigError(f"storage path {self.path} holds other files ({stranger}, ...): give an empty folder")

    def _stranger(self) -> str | None:
        """A file that is not of a store: a damaged store is set aside with its folder, which must not take it along."""
        return min((name for name in os.listdir(self.path) if not is_own(name)), default=None)

    def _check_session(self) -> None:
        """Without syncs, an index that the power was taken from is not to be believed."""
        try:
            session = json.loads((self.path / SESSION_FILE).read_text())
            lost = not session["clean"] and session["durability"] == "none" and session["boot_id"] != _boot_id()
        except (OSError, ValueError, KeyError, TypeError):
            return  # a file of a few bytes that was not written in time: as after a killed process
        if lost:
            raise StoreCorruptError("the machine went down while it was open with durability: none")


def is_own(name: str) -> bool:
    """Is this the name of a file of a store?"""
    files = (DATA_FILE, READERS_FILE, LOCK_FILE, SESSION_FILE, MARK_FILE, REWRITTEN, "lost+found")
    return name in files or name == SLAB_FILE or is_slab(name) or is_aside(name)  # "slab": of the first format


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
