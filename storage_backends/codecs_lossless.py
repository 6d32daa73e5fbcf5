"""Lossless codecs: the bytes of the elements are parted by significance, then each part is compressed.

Signs and exponents of KV values repeat, mantissas look random. Together they hardly compress; apart, the
exponents do and the mantissas are stored. An encoded page:

    | length of part 0: uint32 | ... | length of part e-1: uint32 | part 0 | ... | part e-1 |

e is the element size, part k holds byte k (little-endian) of each element. A part that does not get smaller is
stored as it is. If the encoded page would not be smaller than the page, it is the page: its length is page_bytes.
"""

from __future__ import annotations

import struct
import threading
from abc import abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.errors import StoreCorruptError
from hicache.layout import DTYPE_BYTES, HOST_ALIGNMENT, KVLayout, round_up
from hicache.storage_backends.codecs import Codec

_Bytes = npt.NDArray[np.uint8]

# Sixteenths of a page. Finer in the middle, where most pages of bfloat16 (0.68) and float16 (0.86) end up.
_SLOT_SIXTEENTHS = (6, 8, 10, 11, 12, 13, 14, 16)


class LosslessCodec(Codec):
    """What zstd and lz4 share: parting, the format, its checks."""

    exact = True

    def __init__(self, layout: KVLayout) -> None:
        self._page_bytes = layout.page_bytes
        self._parts = DTYPE_BYTES[layout.dtype]
        self._part_bytes = layout.page_bytes // self._parts
        self._header = struct.Struct(f"<{self._parts}I")
        sizes = {round_up(layout.page_stride * part // 16, HOST_ALIGNMENT) for part in _SLOT_SIXTEENTHS}
        self.slot_bytes = tuple(sorted(sizes))

    @abstractmethod
    def _compress(self, part: _Bytes) -> bytes: ...

    @abstractmethod
    def _decompress(self, data: memoryview) -> bytes:
        """At most `_part_bytes` bytes, whatever `data` is. Raises StoreCorruptError if it cannot be decompressed."""

    def encode(self, page: memoryview, out: memoryview) -> int:
        parts = [self._smaller(part) for part in self._split(page)]
        lengths = [len(part) for part in parts]
        end = self._header.size + sum(lengths)
        if end >= self._page_bytes:
            out[: self._page_bytes] = page[: self._page_bytes]
            return self._page_bytes
        self._header.pack_into(out, 0, *lengths)
        start = self._header.size
        for part, length in zip(parts, lengths):
            out[start : start + length] = part
            start += length
        return end

    def decode(self, data: memoryview, page: memoryview) -> None:
        if data.nbytes == self._page_bytes:
            page[: self._page_bytes] = data
            return
        self._join([self._restored(part) for part in self._parts_of(data)], page)

    def _split(self, page: memoryview) -> list[_Bytes]:
        words = np.frombuffer(page, f"<u{self._parts}", self._part_bytes)
        return [(words >> 8 * byte).astype(np.uint8) for byte in range(self._parts)]

    def _join(self, parts: list[_Bytes], page: memoryview) -> None:
        words = np.frombuffer(page, f"<u{self._parts}", self._part_bytes)
        words[:] = parts[-1]
        for part in reversed(parts[:-1]):
            words <<= 8
            words |= part

    def _smaller(self, part: _Bytes) -> bytes | memoryview:
        compressed = self._compress(part)
        return compressed if len(compressed) < self._part_bytes else part.data

    def _parts_of(self, data: memoryview) -> list[memoryview]:
        """The parts in `data` as they are stored. Raises StoreCorruptError if their lengths cannot be."""
        start, size = self._header.size, data.nbytes
        if not start < size < self._page_bytes:
            raise StoreCorruptError(f"an encoded page has {size} bytes, the page has {self._page_bytes}")
        lengths = self._header.unpack_from(data)
        if start + sum(lengths) != size or max(lengths) > self._part_bytes:
            raise StoreCorruptError(f"an encoded page of {size} bytes claims parts of {lengths} bytes")
        parts = []
        for length in lengths:
            parts.append(data[start : start + length])
            start += length
        return parts

    def _restored(self, part: memoryview) -> _Bytes:
        plain: bytes | memoryview = part if part.nbytes == self._part_bytes else self._decompress(part)
        if len(plain) != self._part_bytes:
            raise StoreCorruptError(f"a part of a page has {len(plain)} bytes, it should have {self._part_bytes}")
        return np.frombuffer(plain, np.uint8)


class ZstdCodec(LosslessCodec):
    """Zstandard as little more than an entropy coder. Raises ImportError without the package zstandard."""

    name = "zstd"

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout)
        self._zstd = zstd = import_module("zstandard")
        # Matches hardly occur in exponents: looking for long ones only, in a tiny table, beats each level in ratio
        # and speed. Negative levels do not code literals, and that is where the gain is.
        parameters = zstd.ZstdCompressionParameters.from_level(
            1, source_size=self._part_bytes, min_match=7, hash_log=6, target_length=0
        )
        window = 1 << max(10, self._part_bytes.bit_length())
        self._compressor = _PerThread(lambda: zstd.ZstdCompressor(compression_params=parameters))
        self._decompressor = _PerThread(lambda: zstd.ZstdDecompressor(max_window_size=window))

    def _compress(self, part: _Bytes) -> bytes:
        compressed: bytes = self._compressor.value.compress(part)
        return compressed

    def _decompress(self, data: memoryview) -> bytes:
        try:
            # The decompressor allocates what the frame claims.
            claimed = self._zstd.frame_content_size(data)
            if claimed != self._part_bytes:
                raise StoreCorruptError(f"a part of a page claims {claimed} bytes, it should have {self._part_bytes}")
            plain: bytes = self._decompressor.value.decompress(data, allow_extra_data=False)
        except self._zstd.ZstdError as error:
            raise StoreCorruptError(f"a page cannot be decompressed: {error}") from error
        return plain


class Lz4Codec(LosslessCodec):
    """LZ4 blocks: no entropy coder, so it gains on repeated values only. Raises ImportError without the package lz4."""

    name = "lz4"

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout)
        self._block: Any = import_module("lz4.block")

    def _compress(self, part: _Bytes) -> bytes:
        compressed: bytes = self._block.compress(part, store_size=False)
        return compressed

    def _decompress(self, data: memoryview) -> bytes:
        try:
            plain: bytes = self._block.decompress(data, uncompressed_size=self._part_bytes)
        except self._block.LZ4BlockError as error:
            raise StoreCorruptError(f"a page cannot be decompressed: {error}") from error
        return plain


class _PerThread(threading.local):
    """`value`: made by `make` once in each thread. Zstandard's contexts must not be shared."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.value = make()
