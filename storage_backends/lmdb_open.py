"""Opening a store's folder: can it be one, is it open already, is it whole, and whose pages does it hold."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import lmdb

from hicache.errors import ConfigError, StoreCorruptError, StoreIdentityError, StoreUnavailableError
from hicache.hashing import Field, StoreIdentity
from hicache.storage_backends.budget import Budget
from hicache.storage_backends.lmdb_damage import set_aside, used_data_bytes
from hicache.storage_backends.lmdb_env import Durability, IndexEnvironment, storage_errors

STORE_FORMAT = 1

_META = b"meta"
_IDENTITY = b"identity"

LOCK_FILE = "lock"


def store_identity(identity: StoreIdentity, values: str) -> dict[str, Field]:
    """Everything that must be equal for a store to be used."""
    return {**identity.flat(), "store.values": values, "store.format": STORE_FORMAT}


class StoreFolder:
    """The folder of one store. Until `release`, or the end of the process, nobody else gets it."""

    def __init__(self, path: Path) -> None:
        """Create the folder if need be.

        Raises ConfigError if it cannot be used, StoreUnavailableError if the store is open elsewhere.
        """
        self.path = path.resolve()  # a symlink stays where it is when a damaged store is set aside
        self._lock = _lock_folder(self.path)

    def open_index(
        self, expected: dict[str, Field], split: Callable[[int], Budget], durability: Durability
    ) -> tuple[IndexEnvironment, Budget]:
        """Open the index, in a clean store if this one is damaged.

        `split` turns the bytes that the index takes already into limits. Raises StoreIdentityError,
        with nothing changed on disk, if the store was made for another identity.
        """
        try:
            return self._open_index(expected, split, durability)
        except StoreCorruptError as error:
            set_aside(self.path, str(error))
            lock = _lock_folder(self.path)
            self.release()
            self._lock = lock
            return self._open_index(expected, split, durability)

    def release(self) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing alone would leave it to children forked meanwhile
        os.close(self._lock)

    def _open_index(
        self, expected: dict[str, Field], split: Callable[[int], Budget], durability: Durability
    ) -> tuple[IndexEnvironment, Budget]:
        budget = split(used_data_bytes(self.path))
        with storage_errors(f"store {self.path}"):
            env = IndexEnvironment(self.path, budget.map_bytes, durability)
            try:
                _check_identity(env.env, self.path, expected)
                env.open_databases({_IDENTITY: json.dumps(expected).encode()})
            except BaseException:
                env.close()
                raise
        return env, budget


def _lock_folder(path: Path) -> int:
    """A file descriptor whose lock keeps every other backend out, in this process and in others."""
    try:
        path.mkdir(exist_ok=True)
        file = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"storage path {path}: {error.strerror}; give a folder that can be written") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise StoreUnavailableError(
            f"the store in {path} is open already, in this process or another; close it there or use another path"
        ) from error
    return file


def _check_identity(env: lmdb.Environment, path: Path, expected: dict[str, Field]) -> None:
    """Raises StoreIdentityError, without writing, if the store was made for another identity."""
    found = _read_identity(env, path)
    if found is None:
        return
    differing = [name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
    if differing:
        fields = ", ".join(f"{name} is {expected.get(name)!r} here and {found.get(name)!r} there" for name in differing)
        raise StoreIdentityError(
            f"the store in {path} was written for another identity: {fields}; choose another path or remove the store"
        )


def _read_identity(env: lmdb.Environment, path: Path) -> dict[str, Field] | None:
    """None if the environment is empty."""
    with env.begin() as txn:
        if not txn.stat()["entries"]:
            return None
        try:
            raw = txn.get(_IDENTITY, db=env.open_db(_META, txn=txn, create=False))
        except lmdb.Error as error:
            raise StoreIdentityError(f"{path} holds the LMDB database of another program; use another path") from error
    return _parse_identity(raw)


def _parse_identity(raw: bytes | None) -> dict[str, Field]:
    try:
        found = json.loads(raw or b"")
    except ValueError as error:
        raise StoreCorruptError("the store's identity cannot be read") from error
    if not isinstance(found, dict):
        raise StoreCorruptError("the store's identity cannot be read")
    return found
