"""Is a store's data file whole? Read here, before LMDB maps it and believes it."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lmdb.verify import VerifyError, verify

from hicache.errors import StoreCorruptError
from hicache.storage_backends.lmdb_env import DATA_FILE

_MAGIC = 0xBEEFC0DE
_DATA_VERSION = 1
_PAGE_HEADER_BYTES = 16
_META_PAGE = struct.Struct("<IIQQ")  # magic, version, address, map size
_PAGE_SIZE_AT = _META_PAGE.size  # first field of the free list's record, two of which follow
_LAST_PAGE = struct.Struct("<QQ")  # last page number, transaction
_LAST_PAGE_AT = _META_PAGE.size + 2 * 48
_META_BYTES = _PAGE_HEADER_BYTES + _LAST_PAGE_AT + _LAST_PAGE.size


class _Meta(NamedTuple):
    page_bytes: int
    last_page: int
    transaction: int


def used_data_bytes(path: Path) -> int:
    """Bytes of the data file that LMDB has put to use; 0 for a store that is not begun.

    LMDB maps the file and believes its meta pages: a file that is shorter than they say ends the
    process with SIGBUS. So they are read here first. Raises StoreCorruptError.
    """
    data = path / DATA_FILE
    size = data.stat().st_size if data.exists() else 0
    if not size:
        return 0
    with open(data, "rb") as file:
        first = _read_meta(file.read(_META_BYTES))
        file.seek(first.page_bytes)
        second = _read_meta(file.read(_META_BYTES))
    newest = max(first, second, key=lambda meta: meta.transaction)
    used = (newest.last_page + 1) * newest.page_bytes
    if size < used:
        raise StoreCorruptError(f"{DATA_FILE} has {size} bytes and should have {used}")
    return used


def _read_meta(raw: bytes) -> _Meta:
    if len(raw) < _META_BYTES:
        raise StoreCorruptError(f"{DATA_FILE} ends within its meta pages")
    magic, version, _, _ = _META_PAGE.unpack_from(raw, _PAGE_HEADER_BYTES)
    (page_bytes,) = struct.unpack_from("<I", raw, _PAGE_HEADER_BYTES + _PAGE_SIZE_AT)
    if magic != _MAGIC or version != _DATA_VERSION or page_bytes not in (1 << n for n in range(9, 17)):
        raise StoreCorruptError(f"{DATA_FILE} has a meta page that is not one of LMDB's data format {_DATA_VERSION}")
    last_page, transaction = _LAST_PAGE.unpack_from(raw, _PAGE_HEADER_BYTES + _LAST_PAGE_AT)
    return _Meta(page_bytes, last_page, transaction)


MAX_WALKED_BYTES = 64 << 20
"""An index up to this size is walked at every start; a larger one by `hicache store verify`."""


def walk_index(path: Path) -> None:
    """Raises StoreCorruptError if LMDB's own pages do not hang together: it believes them, and a flipped bit in one
    could end the process. Nobody may have the store open."""
    try:
        problems = verify(str(path), subdir=True)  # type: ignore[no-untyped-call]
    except VerifyError as error:
        problems = [str(error)]
    if problems:
        raise StoreCorruptError(f"{DATA_FILE}: {problems[0]}")


MARK_FILE = "damaged"


def mark_damaged(path: Path, reason: str) -> None:
    """Have the store set aside by the next start that has it alone."""
    with suppress(OSError):  # without the mark the next start finds the damage by itself, or meets it again
        (path / MARK_FILE).write_text(reason)


def check_mark(path: Path) -> None:
    """Raises StoreCorruptError if the store was found damaged while it was open."""
    mark = path / MARK_FILE
    if mark.exists():
        raise StoreCorruptError(mark.read_text() or "found damaged while it was open")
