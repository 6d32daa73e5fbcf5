"""Opening a store for `hicache store`: looking leaves no trace, and what is wrong becomes one line and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hicache.errors import ConfigError, StoreCorruptError, StoreIdentityError, StoreUnavailableError

if TYPE_CHECKING:
    from hicache.storage_backends.lmdb_store import Store

_NOT_NOW = ("busy", "read_only", "readers_full", "lmdb_build")
"""Reasons for which a store cannot be used that are not its own fault."""


@contextmanager
def opened(path: Path) -> Iterator[Store]:
    """The store in `path`, beside engines that use it.

    Raises ConfigError if there is none or it cannot be used now, StoreIdentityError if it is of another format or
    program, StoreCorruptError if it is damaged. It is left as it is in any case.
    """
    from hicache.storage_backends.lmdb_opening import close_store, open_existing

    with plain_errors(path):
        check_is_store(path)
        store = open_existing(path)
        try:
            yield store
        finally:
            close_store(store)


def check_is_store(path: Path) -> None:
    """Raises ConfigError if `path` holds no store. To be called within `plain_errors`."""
    if not path.is_dir():
        raise ConfigError(f"{path} {'is not a folder' if path.exists() else 'does not exist'}")
    if not holds_store(path):
        raise ConfigError(f"{path} holds no store: give the folder that a storage tier's 'path' names")


def holds_store(path: Path) -> bool:
    """Is there a store, whole or not? Raises StoreIdentityError if it is another program's database."""
    from hicache.storage_backends.lmdb_damage import used_data_bytes
    from hicache.storage_backends.lmdb_env import DATA_FILE
    from hicache.storage_backends.lmdb_locks import LOCK_FILE

    if not (path / DATA_FILE).exists() or not used_data_bytes(path):
        return False
    if not (path / LOCK_FILE).exists():
        _check_label(path)  # opening it would leave files among those of another program
    return True


@contextmanager
def plain_errors(path: Path) -> Iterator[None]:
    """Errors of a store as the command line tells them."""
    try:
        yield
    except StoreUnavailableError as error:
        if error.reason in _NOT_NOW:
            raise ConfigError(str(error)) from error
        raise
    except StoreCorruptError as error:
        if error.reason == "format":
            raise StoreIdentityError(f"the store in {path} cannot be used: {error}") from error
        raise StoreCorruptError(
            f"the store in {path} is damaged: {error}; the next engine that has it alone sets it aside as "
            f"{path.resolve().name}.aside-N and begins a new one",
            error.reason,
        ) from error
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: {error.strerror or error}") from error


def _check_label(path: Path) -> None:
    import lmdb

    from hicache.storage_backends.lmdb_opening import check_label
    from hicache.storage_backends.lmdb_schema import MAX_DATABASES

    with lmdb.open(str(path), readonly=True, lock=False, max_dbs=MAX_DATABASES) as env, env.begin() as txn:
        check_label(env, txn, path, None)
