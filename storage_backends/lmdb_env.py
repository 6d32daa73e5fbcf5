"""The LMDB environment of a store: transactions that end with their call, its map, its errors."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, cast

import lmdb

from hicache.errors import StoreCorruptError, StoreUnavailableError
from hicache.storage_backends.filesystem import FILE_MODE
from hicache.storage_backends.lmdb_index import IndexView, IndexWriter
from hicache.storage_backends.lmdb_readers import ReaderLock, byte_lock, open_environment
from hicache.storage_backends.lmdb_schema import MAX_DATABASES, Databases

DATA_FILE = "data.mdb"

Durability: TypeAlias = Literal["none", "batch", "always"]
"""What a power loss may take; a killed process loses nothing that was acknowledged, in any mode.

none: everything: the store is set aside at the next start. batch: the last batches.
always: nothing that was acknowledged.
"""

MAX_READERS = 512

_LEAST_FREE = 1 << 20
"""A file system with fewer bytes free is full."""

_CORRUPT = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.NotFoundError,  # a database that every store has
    lmdb.PageNotFoundError,
    lmdb.CursorFullError,
    lmdb.TxnFullError,
    lmdb.BadValsizeError,
    lmdb.KeyExistsError,
    struct.error,
    OverflowError,
    UnicodeDecodeError,
)

_REASONS = {
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EIO: "io_error",
    errno.EROFS: "read_only",
    errno.EACCES: "read_only",
    errno.EPERM: "read_only",
}

_MENDS = {
    "disk_full": "free room on the disk or lower the budget",
    "io_error": "check the disk (dmesg, smartctl)",
    "read_only": "make the folder writable, or remount the file system",
}


@contextmanager
def storage_errors(name: str) -> Iterator[None]:
    """Turn errors of LMDB and of the operating system into storage errors that say why and what to do."""
    try:
        yield
    except (lmdb.MapFullError, lmdb.MapResizedError):
        raise  # the store deals with these
    except lmdb.PanicError as error:  # an earlier error of the disk: this environment is unusable, the files are not
        raise StoreCorruptError(f"{name}: LMDB gave up after an earlier error: {error}", "reopen") from error
    except lmdb.ReadersFullError as error:
        raise StoreUnavailableError(f"{name}: {error}: too many processes read it", "readers_full") from error
    except lmdb.VersionMismatchError as error:
        raise StoreUnavailableError(
            f"{name}: another process has it open with another build of LMDB: {error}; use one", "lmdb_build"
        ) from error
    except _CORRUPT as error:
        raise StoreCorruptError(f"{name}: the index is damaged: {error}") from error
    except (OSError, lmdb.Error) as error:
        reason = _reason(error)
        mend = f"; {_MENDS[reason]}" if reason in _MENDS else ""
        raise StoreUnavailableError(f"{name}: {error}{mend}", reason) from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return _REASONS.get(error.errno or 0, "unavailable")
    if isinstance(error, lmdb.DiskError):
        return "disk_full"
    if isinstance(error, lmdb.ReadonlyError):
        return "read_only"
    # LMDB passes other errors of the system on by their text only.
    return next((word for code, word in _REASONS.items() if os.strerror(code) in str(error)), "unavailable")


def _is_io_error(error: Exception) -> bool:
    return os.strerror(errno.EIO) in str(error)


class IndexEnvironment:
    """An open environment. No transaction outlives the `with` block that it was begun in."""

    def __init__(self, path: Path, map_bytes: int, durability: Durability) -> None:
        self.map_bytes = map_bytes
        self._writer = threading.Lock()
        self.env = open_environment(
            path,
            map_size=map_bytes,
            mode=FILE_MODE,
            max_dbs=MAX_DATABASES,
            max_readers=MAX_READERS,
            sync=durability != "none",
            metasync=durability == "always",
        )
        try:
            self._file = os.open(path / DATA_FILE, os.O_RDWR | os.O_CLOEXEC)
            self._reader = ReaderLock(path)
            self.env.reader_check()
        except BaseException:
            self.env.close()
            raise

    def open_databases(self, labels: Mapping[bytes, bytes]) -> None:
        """Create what is missing, `labels` in `meta` included."""
        self._extend()
        with self.env.begin(write=True) as txn:
            self.databases = Databases.open(self.env, txn)
            for name, label in labels.items():
                txn.put(name, label, overwrite=False, db=self.databases.meta)

    def join_databases(self) -> None:
        """As `open_databases` where all is there already."""
        # Each waits for a writer: handles opened in a read transaction end with it.
        with self._turn():
            handles = (self.env.open_db(name.encode(), create=False) for name in Databases._fields)
            self.databases = Databases(*handles)

    @contextmanager
    def view(self, buffers: bool = False) -> Iterator[IndexView]:
        """A snapshot. With `buffers`, values are memoryviews of the map, valid until its end."""
        self._check_size()
        with self.snapshot(buffers) as txn:
            yield IndexView(txn, self.databases)

    @contextmanager
    def snapshot(self, buffers: bool = False) -> Iterator[lmdb.Transaction[bytes]]:
        """A transaction that reads."""
        with self._reader.reading(), self._begin_read(buffers) as txn:
            yield txn

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Only one writer of all processes is within: LMDB's own lock has one waiter at most, from any of them.

        LMDB's lock knows its owner by a thread id, and so does the kernel when a process dies that waits for it:
        in two containers that may be the same number. An open file description is nobody else's.
        """
        with self._writer:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, byte_lock(fcntl.F_WRLCK, 0))
            try:
                yield
            finally:
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, byte_lock(fcntl.F_UNLCK, 0))

    @contextmanager
    def writer(self, now_us: int) -> Iterator[IndexWriter]:
        """Commits at the end; an exception leaves the index as it was. Waits for writers of other processes."""
        self._check_size()
        try:
            with self._turn(), self.env.begin(write=True) as txn:
                index = IndexWriter(txn, self.databases, now_us)
                yield index
                index.save()
        except lmdb.Error as error:
            if _is_io_error(error) and self._disk_is_full:  # LMDB says so of a short write
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise

    def grow(self, map_bytes: int) -> None:
        """Enlarge the map. There must be no transaction of this process."""
        self.map_bytes = max(map_bytes, self.map_bytes)
        self._extend()
        self.env.set_mapsize(self.map_bytes)

    def adopt_map(self) -> None:
        """Follow another process that has enlarged the map. There must be no transaction of this process."""
        self.env.set_mapsize(0)  # the largest that LMDB was ever given: enough to see how large it is now
        self.map_bytes = 0
        with self.view() as view:
            map_bytes = view.state().map_bytes
        self.env.set_mapsize(map_bytes)
        self.map_bytes = map_bytes

    def check_readers(self) -> int:
        """Free the slots of readers that died; returns how many."""
        return int(self.env.reader_check())

    def lag(self) -> int:
        """How many transactions the oldest reader is behind: what it may see cannot be reused."""
        newest = int(self.env.info()["last_txnid"])
        behind = [newest - int(line.split()[2]) for line in self._reader_lines() if line.split()[2].isdigit()]
        return max(behind, default=0)

    def readers(self) -> int:
        return len(self._reader_lines())

    def _reader_lines(self) -> list[str]:
        lines = self.env.readers().splitlines()
        return [line for line in lines[1:] if len(line.split()) == 3]

    @property
    def data_bytes(self) -> int:
        """Bytes of the data file on disk."""
        return os.fstat(self._file).st_blocks * 512

    @property
    def used_bytes(self) -> int:
        """Bytes of the data file that LMDB has put to use, free pages included."""
        return (int(self.env.info()["last_pgno"]) + 1) * int(self.env.stat()["psize"])

    @property
    def _disk_is_full(self) -> bool:
        found = os.fstatvfs(self._file)
        return found.f_bavail * found.f_frsize < _LEAST_FREE

    def sync(self) -> None:
        self.env.sync(True)

    def close(self) -> None:
        self.env.close()
        self._reader.close()
        os.close(self._file)

    def abandon(self) -> None:
        """Let go of the environment in a forked child: to close it there would end the parent's transactions."""
        self._reader.close()
        os.close(self._file)  # a copy would keep the writer's turn when the parent is gone
        del self.env, self.databases

    def _begin_read(self, buffers: bool) -> lmdb.Transaction[bytes]:
        begin = cast("Callable[[], lmdb.Transaction[bytes]]", partial(self.env.begin, buffers=buffers))
        try:
            return begin()
        except lmdb.ReadersFullError:
            self.env.reader_check()  # readers that were killed give their slots back
            return begin()

    def _extend(self) -> None:
        """Keep the file as long as the map (sparse): every mapped page can be touched, and a cut file shows."""
        if os.fstat(self._file).st_size < self.map_bytes:
            os.truncate(self._file, self.map_bytes)

    def _check_size(self) -> None:
        """A page of the map that the file has no longer ends the process with SIGBUS when it is touched."""
        if os.fstat(self._file).st_size < self.map_bytes:
            raise StoreCorruptError(f"{DATA_FILE} has been cut short while it was open")
