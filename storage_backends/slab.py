"""One file of equal slots, read and written in place from and to the caller's pages."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hicache.errors import StoreReplacedError, StoreUnavailableError
from hicache.storage_backends.filesystem import FILE_MODE

IOV_MAX = 1024

_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2

_libc = ctypes.CDLL(None, use_errno=True)

_Vectored = Callable[[int, list[memoryview], int], int]


class SlabFile:
    """Slot i is the `slot_bytes` bytes from i * slot_bytes on. Safe to use from several threads and processes.

    Transfers bypass the page cache (O_DIRECT). Where the file system or the memory's alignment does
    not allow that, they go through it.
    """

    def __init__(self, path: Path, slot_bytes: int) -> None:
        self.path = path
        self._stride = slot_bytes
        self._padding = memoryview(bytearray(slot_bytes))
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._buffered = os.open(path, flags, FILE_MODE)
        fcntl.flock(self._buffered, fcntl.LOCK_SH | fcntl.LOCK_NB)  # systemd's cleaner of /tmp leaves it alone then
        try:
            self._direct: int | None = os.open(path, flags | os.O_DIRECT, FILE_MODE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                os.close(self._buffered)
                raise
            self._direct = None  # the file system has no O_DIRECT

    def check_in_place(self) -> None:
        """Raises StoreReplacedError if another file, or none, lies at the path by now."""
        try:
            found: os.stat_result | None = os.stat(self.path)
        except FileNotFoundError:
            found = None
        if found is None or not os.path.samestat(found, os.fstat(self._buffered)):
            verb = "removed" if found is None else "replaced"
            raise StoreReplacedError(
                f"the file {self.path} was {verb} while the store was open: its pages are lost, the store is opened "
                "again without them; find out who does that",
                f"slab_{verb}",
            )

    @property
    def allocated_bytes(self) -> int:
        """Bytes the file takes on disk, holes not counted."""
        return os.fstat(self._buffered).st_blocks * 512

    @property
    def slots(self) -> int:
        """Whole slots within the file's size."""
        return os.fstat(self._buffered).st_size // self._stride

    def write(self, slots: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Write buffers[i] to slots[i]; consecutive slots go out in one call. Raises OSError."""
        for start, stop in _consecutive(slots):
            vector = self._vector(buffers[start:stop])
            if self._transfer(os.pwritev, vector, slots[start] * self._stride):
                raise StoreUnavailableError("the slab file takes no more bytes: the disk is full", "disk_full")

    def read(self, slots: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Fill buffers[i] from slots[i]. A buffer whose slot lies beyond the end of the file keeps garbage."""
        for start, stop in _consecutive(slots):
            self._transfer(os.preadv, self._vector(buffers[start:stop]), slots[start] * self._stride)

    def reserve(self, extent: range) -> None:
        """Give the slots blocks on disk. Raises OSError, as when the disk is full."""
        os.posix_fallocate(self._buffered, extent.start * self._stride, len(extent) * self._stride)

    def release(self, extent: range) -> None:
        """Give the slots' blocks back; they read as zeros from now on."""
        end = min(extent.stop, self.slots + 1)
        if end <= extent.start:
            return
        start, size = extent.start * self._stride, (end - extent.start) * self._stride
        mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        if _libc.fallocate(self._buffered, mode, ctypes.c_int64(start), ctypes.c_int64(size)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def resize(self, slots: int) -> None:
        """Cut or extend (without blocks) the file to `slots` slots."""
        os.ftruncate(self._buffered, slots * self._stride)

    def sync(self) -> None:
        os.fdatasync(self._buffered)

    def close(self) -> None:
        os.close(self._buffered)
        if self._direct is not None:
            os.close(self._direct)

    def _vector(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        """What to transfer: pages that do not fill their slot get a shared scratch for the rest."""
        if all(buffer.nbytes == self._stride for buffer in buffers):
            return list(buffers)
        vector = []
        for buffer in buffers:
            vector.append(buffer)
            if buffer.nbytes < self._stride:
                vector.append(self._padding[buffer.nbytes :])
        return vector

    def _transfer(self, call: _Vectored, vector: list[memoryview], offset: int) -> int:
        """Move the whole vector; returns the bytes that could not be moved (end of file)."""
        left = sum(buffer.nbytes for buffer in vector)
        while left:
            moved = self._call(call, vector[:IOV_MAX], offset)
            if not moved:
                break
            left -= moved
            offset += moved
            if left:
                vector = _skip(vector, moved)
        return left

    def _call(self, call: _Vectored, vector: list[memoryview], offset: int) -> int:
        if self._direct is not None:
            try:
                return call(self._direct, vector, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise  # EINVAL: the buffers are not aligned
        return call(self._buffered, vector, offset)


def _consecutive(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Index ranges [start, stop) of `slots` in which each slot follows the one before."""
    start = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield start, index
            start = index


def _skip(vector: list[memoryview], nbytes: int) -> list[memoryview]:
    """The vector without its first `nbytes` bytes."""
    for index, buffer in enumerate(vector):
        if nbytes < buffer.nbytes:
            return [buffer.cast("B")[nbytes:], *vector[index + 1 :]]
        nbytes -= buffer.nbytes
    return []
