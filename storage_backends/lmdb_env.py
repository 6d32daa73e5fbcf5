"""The LMDB environment of a store: transactions that end with their call, its map, its errors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

import lmdb

from hicache.errors import StoreCorruptError, StoreUnavailableError
from hicache.storage_backends.lmdb_index import IndexView, IndexWriter
from hicache.storage_backends.lmdb_schema import MAX_DATABASES, Databases

DATA_FILE = "data.mdb"

Durability: TypeAlias = Literal["none", "batch", "always"]
"""What a power loss may take; a killed process loses nothing that was acknowledged, in any mode.

none: everything, and it may leave an index that has to be removed. batch: the last batches.
always: nothing that was acknowledged.
"""

MAX_READERS = 512

_CORRUPT = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)


@contextmanager
def storage_errors(name: str) -> Iterator[None]:
    """Turn errors of LMDB and of the operating system into storage errors."""
    try:
        yield
    except _CORRUPT as error:
        raise StoreCorruptError(f"{name}: the index is damaged: {error}") from error
    except (OSError, lmdb.Error) as error:
        raise StoreUnavailableError(f"{name}: {error}") from error


class IndexEnvironment:
    """An open environment. No transaction outlives the `with` block that it was begun in."""

    def __init__(self, path: Path, map_bytes: int, durability: Durability) -> None:
        self._data = path / DATA_FILE
        self.map_bytes = map_bytes
        self.env = lmdb.open(
            str(path),
            map_size=map_bytes,
            max_dbs=MAX_DATABASES,
            max_readers=MAX_READERS,
            sync=durability != "none",
            metasync=durability == "always",
        )
        self.env.reader_check()

    def open_databases(self, labels: Mapping[bytes, bytes]) -> None:
        """Create what is missing, `labels` in `meta` included. Comes after the identity has been checked: it writes."""
        self._extend()
        with self.env.begin(write=True) as txn:
            self.databases = Databases.open(self.env, txn)
            for name, label in labels.items():
                txn.put(name, label, overwrite=False, db=self.databases.meta)

    @contextmanager
    def view(self) -> Iterator[IndexView]:
        with self._begin_read() as txn:
            yield IndexView(txn, self.databases)

    @contextmanager
    def buffers(self) -> Iterator[lmdb.Transaction[memoryview]]:
        """A read transaction whose values are views of the map, valid until its end."""
        with self.env.begin(buffers=True) as txn:
            yield txn

    @contextmanager
    def writer(self) -> Iterator[IndexWriter]:
        """Commits at the end; an exception leaves the index as it was."""
        with self.env.begin(write=True) as txn:
            index = IndexWriter(txn, self.databases)
            yield index
            index.save()

    def grow(self, map_bytes: int) -> None:
        """Enlarge the map. There must be no transaction of this process."""
        self.map_bytes = max(map_bytes, self.map_bytes)
        self._extend()
        self.env.set_mapsize(self.map_bytes)

    @property
    def data_bytes(self) -> int:
        """Bytes of the data file on disk."""
        return os.stat(self._data).st_blocks * 512

    def sync(self) -> None:
        self.env.sync(True)

    def close(self) -> None:
        self.env.close()

    def _begin_read(self) -> lmdb.Transaction[bytes]:
        try:
            return self.env.begin()
        except lmdb.ReadersFullError:
            self.env.reader_check()  # readers that were killed give their slots back
            return self.env.begin()

    def _extend(self) -> None:
        """Keep the file as long as the map (sparse): every mapped page can be touched, and a cut file shows."""
        if self._data.stat().st_size < self.map_bytes:
            os.truncate(self._data, self.map_bytes)
