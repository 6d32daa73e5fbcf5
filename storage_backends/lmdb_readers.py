"""Who reads an index now: LMDB's table of readers, made to hold in containers whose processes have the same id.

LMDB tells a reader that lives from one that died by an exclusive lock on the byte of its process id in `lock.mdb`,
kept from its first read to its end. A second process of that id, in another container, could not even open the index.
So the lock is given up after opening and held during reads only, shared: LMDB takes a reader for alive while anybody
of that id reads, and a second one is kept out for as long as a read takes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

READERS_FILE = "lock.mdb"
"""LMDB's: its table of readers and its writer's lock. All who have a store open must share one."""

OPEN_SECONDS = 10.0
"""How long a process waits for one of the same id that reads."""


def open_environment(path: Path, **options: Any) -> lmdb.Environment:
    """`lmdb.open`, as soon as no process of the same id reads. Raises lmdb.Error."""
    until = time.monotonic() + OPEN_SECONDS
    while True:
        try:
            # Transactions that are kept would keep their slots in the table, which is given up between reads.
            return lmdb.open(str(path), max_spare_txns=0, **options)
        except lmdb.LockError as error:
            if os.strerror(errno.EAGAIN) not in str(error) or time.monotonic() > until:
                raise
        time.sleep(0.001)


class ReaderLock:
    """The lock of this process on the byte of its id, in the folder `path` of an open environment.

    To be closed after that: the close of any copy of the file gives up LMDB's locks, too.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path / READERS_FILE, os.O_RDWR | os.O_CLOEXEC)
        self._pid = os.getpid()
        self._readers = 0
        self._counting = threading.Lock()
        self._set(fcntl.F_UNLCK)  # it was LMDB's, exclusive

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Whoever is within is taken for alive."""
        with self._counting:
            if not self._readers:
                self._set(fcntl.F_RDLCK)  # may wait for a process of the same id that is opening the index
            self._readers += 1
        try:
            yield
        finally:
            with self._counting:
                self._readers -= 1
                if not self._readers:
                    self._set(fcntl.F_UNLCK)

    def close(self) -> None:
        os.close(self._file)

    def _set(self, kind: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_SETLKW, byte_lock(kind, self._pid))


def byte_lock(kind: int, byte: int) -> bytes:
    """struct flock of a 64-bit Linux, for one byte of a file."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0)
