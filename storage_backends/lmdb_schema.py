"""What the index keeps, and how: its databases and their records."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lmdb import Environment, Transaction, _Database  # the database type has no public name

_RECORD = struct.Struct("<QQQ")
_STATE = struct.Struct("<QQQQ")
_STATE_KEY = b"state"

MAX_DATABASES = 8


class Databases(NamedTuple):
    meta: _Database
    pages: _Database
    children: _Database
    order: _Database
    free: _Database
    holes: _Database
    values: _Database

    @classmethod
    def open(cls, env: Environment, txn: Transaction[bytes]) -> Databases:
        """Open them in a write transaction; those that are missing are created."""
        return cls(*(env.open_db(name.encode(), txn=txn) for name in cls._fields))


class PageRecord(NamedTuple):
    location: int
    checksum: int
    stamp: int
    parent: bytes | None

    def pack(self) -> bytes:
        return _RECORD.pack(self.location, self.checksum, self.stamp) + (self.parent or b"")

    @classmethod
    def unpack(cls, raw: bytes | memoryview) -> PageRecord:
        location, checksum, stamp = _RECORD.unpack_from(raw)
        return cls(location, checksum, stamp, bytes(raw[_RECORD.size :]) or None)


def leading_records(
    txn: Transaction[bytes] | Transaction[memoryview], databases: Databases, keys: Sequence[bytes]
) -> list[PageRecord]:
    """Records of the leading keys that are stored."""
    get, pages = txn.get, databases.pages
    records = []
    for key in keys:
        raw = get(key, db=pages)
        if raw is None:
            break
        records.append(PageRecord.unpack(raw))
    return records


class NewPage(NamedTuple):
    key: bytes
    parent: bytes | None
    buffer: memoryview


@dataclass
class IndexState:
    """`clock`: next stamp. `generation`: number of `clear` calls. `backed`: slots that have blocks on disk."""

    clock: int = 1
    generation: int = 0
    evicted: int = 0
    backed: int = 0

    @classmethod
    def load(cls, txn: Transaction[bytes], databases: Databases) -> IndexState:
        raw = txn.get(_STATE_KEY, db=databases.meta)
        return cls(*_STATE.unpack(raw)) if raw is not None else cls()

    def save(self, txn: Transaction[bytes], databases: Databases) -> None:
        raw = _STATE.pack(self.clock, self.generation, self.evicted, self.backed)
        txn.put(_STATE_KEY, raw, db=databases.meta)
