"""The file that carries pages from one store to another.

    | MAGIC | frame Header | frame Page | bytes of the page | frame Page | bytes of the page | ... | frame End |

A frame is its length (uint32 little-endian), the XXH3 checksum of its payload (uint64) and its payload in
MessagePack. The bytes of a page are those that the store keeps, encoded by its codec, checked by `Page.checksum` as in
the store. A page comes after its parent, and chains come in the order in which they would be evicted: what a smaller
store keeps of an import is what was used last. A file without its End was cut off.
"""

from __future__ import annotations

import struct
from typing import Any, BinaryIO

import msgspec
from xxhash import xxh3_64_intdigest

from hicache.errors import ConfigError, StoreCorruptError

MAGIC = b"hicache-pages\n"
EXCHANGE_VERSION = 1

MAX_FRAME_BYTES = 16 << 20

_FRAME = struct.Struct("<IQ")


class SpaceInfo(msgspec.Struct, frozen=True):
    """A namespace: its identity, and its rules for a store that does not know it yet."""

    number: int
    label: dict[str, str | int | None]
    policy: int
    quota: int
    ttl_us: int


class Header(msgspec.Struct, frozen=True, tag="header", array_like=True):
    """`pages` and `nbytes` are what there was when the export began: a file made beside an engine may have others."""

    version: int
    values: str
    spaces: list[SpaceInfo]
    pages: int
    nbytes: int


class Page(msgspec.Struct, frozen=True, tag="page", array_like=True):
    """`length` bytes follow. `slot_bytes`: of the slot it was in, 0 for a value in the index. `children`: pages in the
    file whose parent it is, if more than one; else 0 or 1, for which nothing has to be kept in mind."""

    space: int
    key: bytes
    parent: bytes | None
    length: int
    slot_bytes: int
    checksum: int
    stamp: int
    children: int


class End(msgspec.Struct, frozen=True, tag="end", array_like=True):
    pages: int
    nbytes: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header | Page | End)


class FrameWriter:
    """Writes an exchange file to `file`. Raises OSError."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        file.write(MAGIC)

    def put(self, frame: Header | Page | End, data: memoryview | None = None) -> None:
        payload = _encoder.encode(frame)
        self._file.write(_FRAME.pack(len(payload), xxh3_64_intdigest(payload)) + payload)
        if data is not None:
            self._file.write(data)


class FrameReader:
    """Reads an exchange file from `file`. `position`: bytes read so far.

    Raises ConfigError if it is another kind of file, StoreCorruptError where it is damaged or cut off, OSError.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self.position = 0
        start = self._file.read(len(MAGIC))
        if start != MAGIC:
            raise ConfigError(f"{name} is not a file of 'hicache store export'")
        self.position = len(MAGIC)

    def header(self) -> Header:
        frame = self.next()
        if not isinstance(frame, Header):
            raise StoreCorruptError(f"{self._name} does not begin with a header")
        if frame.version != EXCHANGE_VERSION:
            raise ConfigError(f"{self._name} has version {frame.version}, this version reads {EXCHANGE_VERSION}")
        return frame

    def next(self) -> Header | Page | End:
        length, checksum = _FRAME.unpack(self._exactly(_FRAME.size))
        if length > MAX_FRAME_BYTES:
            raise self._damaged()
        payload = self._exactly(length)
        if xxh3_64_intdigest(payload) != checksum:
            raise self._damaged()
        try:
            frame: Header | Page | End = _decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{self._name}: another version made what ends at byte {self.position}: {error}"
            ) from error
        return frame

    def fill(self, place: memoryview) -> None:
        """Read the bytes of a page to `place`."""
        done = 0
        while done < place.nbytes:
            count = self._readinto(place[done:])
            if not count:
                raise self._cut_off()
            done += count
            self.position += count

    def _readinto(self, place: memoryview) -> int:
        readinto: Any = getattr(self._file, "readinto")  # noqa: B009 - BinaryIO does not declare it
        return int(readinto(place) or 0)

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        self.fill(memoryview(data))
        return bytes(data)

    def _damaged(self) -> StoreCorruptError:
        return StoreCorruptError(f"{self._name} is damaged before byte {self.position}")

    def _cut_off(self) -> StoreCorruptError:
        return StoreCorruptError(f"{self._name} ends at byte {self.position}, without its end mark: it was cut off")
