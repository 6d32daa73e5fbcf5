"""What the index keeps, and how: its databases and their records. LMDB checks nothing, so every record is sealed."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from lmdb import Environment, Transaction, _Database  # the database type has no public name
from xxhash import xxh3_64_digest

from hicache.errors import StoreCorruptError
from hicache.storage_backends.budget import inline_cost

Txn: TypeAlias = "Transaction[bytes] | Transaction[memoryview]"

STORE_FORMAT = 2

MAX_DATABASES = 12

BLOCK_BYTES = 4096
"""Slots are multiples of this."""

_SEAL_BYTES = 4
_RECORD = struct.Struct("<HBxIQQQ")
_SPACE = struct.Struct("<9QBB")
_STATE = struct.Struct("<8Q")
_SLAB = struct.Struct("<QQ")
_SPACE_ID = struct.Struct(">H")
_UNITS = struct.Struct(">I")
_STATE_KEY = b"state"

_SLOT_BITS = 40


class Databases(NamedTuple):
    meta: _Database
    spaces: _Database
    pages: _Database
    children: _Database
    order: _Database
    slabs: _Database
    free: _Database
    holes: _Database
    values: _Database

    @classmethod
    def open(cls, env: Environment, txn: Transaction[bytes]) -> Databases:
        """Open them in a write transaction; those that are missing are created."""
        return cls(*(env.open_db(name.encode(), txn=txn) for name in cls._fields))


def seal(key: bytes, payload: bytes) -> bytes:
    """The payload with a checksum over it and its key."""
    return payload + xxh3_64_digest(key + payload)[:_SEAL_BYTES]


def unseal(key: bytes, raw: bytes | memoryview) -> bytes:
    """The payload of a sealed record. Raises StoreCorruptError if a bit of it has changed."""
    payload = bytes(raw[:-_SEAL_BYTES])
    if xxh3_64_digest(key + payload)[:_SEAL_BYTES] != raw[-_SEAL_BYTES:]:
        raise StoreCorruptError(f"the index record {key.hex()} does not match its checksum")
    return payload


# ---- pages --------------------------------------------------------------------------------------


def slot_location(slot_bytes: int, slot: int) -> int:
    """Where a page lies in a slab: which slab, by its slot size, and which slot."""
    return (slot_bytes // BLOCK_BYTES) << _SLOT_BITS | slot


def slab_of(location: int) -> int:
    """Slot size of the page's slab in bytes; 0 for a page whose bytes are in the index."""
    return (location >> _SLOT_BITS) * BLOCK_BYTES


def slot_of(location: int) -> int:
    return location & ((1 << _SLOT_BITS) - 1)


class PageRecord(NamedTuple):
    """`length` bytes at `location` with that checksum, last used at `stamp`."""

    space: int
    segment: int
    length: int
    location: int
    checksum: int
    stamp: int
    parent: bytes | None

    @property
    def cost(self) -> int:
        """Bytes that the page takes outside the index's own."""
        return slab_of(self.location) or inline_cost(self.length)

    @property
    def slot_bytes(self) -> int:
        """Bytes that are read for it at once."""
        return slab_of(self.location) or self.length

    def pack(self, key: bytes) -> bytes:
        fixed = _RECORD.pack(self.space, self.segment, self.length, self.location, self.checksum, self.stamp)
        return seal(key, fixed + (self.parent or b""))

    @classmethod
    def unpack(cls, key: bytes, raw: bytes | memoryview) -> PageRecord:
        payload = unseal(key, raw)
        space, segment, length, location, checksum, stamp = _RECORD.unpack_from(payload)
        return cls(space, segment, length, location, checksum, stamp, payload[_RECORD.size :] or None)


class NewPage(NamedTuple):
    key: bytes
    parent: bytes | None
    buffer: memoryview


class Encoded(NamedTuple):
    """A page as it is to be stored: the first `length` bytes of `buffer`, in a slot of `slot_bytes` bytes.

    Without a `checksum`, it is computed while the page is being written.
    """

    length: int
    slot_bytes: int
    buffer: memoryview
    checksum: int | None = None


def read_label(raw: bytes | None, what: str) -> dict[str, object]:
    """A JSON object of `meta`. Raises StoreCorruptError."""
    try:
        found = json.loads(raw or b"")
    except ValueError as error:
        raise StoreCorruptError(f"the store's {what} cannot be read") from error
    if not isinstance(found, dict):
        raise StoreCorruptError(f"the store's {what} cannot be read")
    return found


# ---- counters -----------------------------------------------------------------------------------


@dataclass
class Space:
    """Counters and rules of one namespace: the pages of one identity.

    `leaves`: pages without children, `protected` of them in the protected segment. `quota` and
    `ttl_us` of 0: none. `clearing`: a `clear` was begun and has to be finished; there are no pages meanwhile.
    """

    pages: int = 0
    live_bytes: int = 0
    evicted: int = 0
    expired: int = 0
    generation: int = 0
    quota: int = 0
    ttl_us: int = 0
    leaves: int = 0
    protected: int = 0
    policy: int = 0
    clearing: bool = False

    def accepts(self, generation: int | None) -> bool:
        """May a run that was made for this generation be stored?"""
        return not self.clearing and generation in (None, self.generation)

    @classmethod
    def load(cls, txn: Txn, databases: Databases, number: int) -> Space:
        key = _SPACE_ID.pack(number)
        raw = txn.get(key, db=databases.spaces)
        if raw is None:
            return cls()
        space = cls(*_SPACE.unpack(unseal(key, raw)))
        space.clearing = bool(space.clearing)
        return space

    def save(self, txn: Transaction[bytes], databases: Databases, number: int) -> None:
        key, values = _SPACE_ID.pack(number), vars(self).values()
        txn.put(key, seal(key, _SPACE.pack(*values)), db=databases.spaces)


def space_key(number: int) -> bytes:
    return _SPACE_ID.pack(number)


def space_number(key: bytes | memoryview) -> int:
    return int(_SPACE_ID.unpack_from(key)[0])


@dataclass
class IndexState:
    """`clock`: next stamp. `data_bytes`: what pages may take beside the map of `map_bytes`.

    `backed_bytes`: slots that have blocks on disk. `live_bytes`: pages, of all namespaces.
    `setbacks`: how often the map was found full. `values`: number of the next inline value.
    """

    clock: int = 1
    budget_bytes: int = 0
    map_bytes: int = 0
    data_bytes: int = 0
    backed_bytes: int = 0
    live_bytes: int = 0
    setbacks: int = 0
    values: int = 0

    @classmethod
    def load(cls, txn: Txn, databases: Databases) -> IndexState:
        raw = txn.get(_STATE_KEY, db=databases.meta)
        return cls(*_STATE.unpack(unseal(_STATE_KEY, raw))) if raw is not None else cls()

    def save(self, txn: Transaction[bytes], databases: Databases) -> None:
        txn.put(_STATE_KEY, seal(_STATE_KEY, _STATE.pack(*vars(self).values())), db=databases.meta)


@dataclass
class SlabState:
    """Slots of one slab: `backed` have blocks on disk, `used` of these hold pages."""

    backed: int = 0
    used: int = 0

    @classmethod
    def load(cls, txn: Txn, databases: Databases, slot_bytes: int) -> SlabState:
        key = _UNITS.pack(slot_bytes // BLOCK_BYTES)
        raw = txn.get(key, db=databases.slabs)
        return cls(*_SLAB.unpack(unseal(key, raw))) if raw is not None else cls()

    def save(self, txn: Transaction[bytes], databases: Databases, slot_bytes: int) -> None:
        key = _UNITS.pack(slot_bytes // BLOCK_BYTES)
        txn.put(key, seal(key, _SLAB.pack(self.backed, self.used)), db=databases.slabs)


def slab_sizes(txn: Txn, databases: Databases) -> list[int]:
    """Slot sizes of the slabs, ascending."""
    return [_UNITS.unpack_from(key)[0] * BLOCK_BYTES for key in txn.cursor(databases.slabs).iternext(values=False)]
