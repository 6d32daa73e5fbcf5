"""Lossy codecs: each value becomes one byte, with one float32 scale for each plane of the page.

An encoded page, of fixed length:

    | scales: num_planes float32 | codes: 1 byte for each value, planes in the order of the page |

A value is decoded as code * scale, rounded to the dtype. A plane of zeros has scale 0 and comes back exactly.
Scales are made from finite values only; then NaN becomes 0 and ±inf the plane's largest finite magnitude, so
that neither spoils the other values.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hicache.errors import StoreCorruptError
from hicache.layout import SCALE_BYTES, HostFormat, KVLayout
from hicache.storage_backends.codecs import Codec

_Floats = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]

_LARGEST = {"float32": 3.4028234663852886e38, "float16": 65504.0, "bfloat16": 3.3895313892515355e38}
_SMALLEST_SCALE = np.float32(2.0**-126)  # a subnormal scale would be too coarse itself


_BLOCK = 1 << 16
"""Values coded at a time: what lies between the steps stays in the cache of the CPU."""


class QuantisedCodec(Codec):
    """What int8 and fp8 share: scales, the format, its checks. `limit` is the largest magnitude of a code.

    Raises ConfigError if the layout's values have one byte already.
    """

    exact = False
    limit: float

    def __init__(self, layout: KVLayout) -> None:
        self.format = HostFormat(layout, self.name)
        self._dtype = layout.dtype
        self._planes = layout.num_planes
        self._plane_bytes = layout.plane_bytes
        self._values = self._planes * self.format.plane_values
        self._length = self.format.page_bytes
        self._decoded = self._code_values()
        self.slot_bytes = (self.format.page_stride,)

    @abstractmethod
    def _code(self, values: _Floats) -> _Bytes:
        """Codes of values within ±limit, which may be overwritten."""

    @abstractmethod
    def _code_values(self) -> _Floats:
        """(256,): what each code stands for, 0 for those that `_code` does not make."""

    @abstractmethod
    def _has_bad_code(self, codes: _Bytes) -> bool:
        """Whether there is a code that `_code` does not make."""

    def encode(self, page: memoryview, out: memoryview) -> int:
        values = read_values(page, self._dtype, self._values).reshape(self._planes, -1)
        peaks = np.maximum(values.max(1), -values.min(1))
        if not (peaks <= _LARGEST[self._dtype]).all():
            values, peaks = self._tamed(page)
        scales = self._scales(peaks)
        values /= np.where(scales > 0, scales, np.float32(1))[:, np.newaxis]
        np.frombuffer(out, "<f4", self._planes)[:] = scales
        codes, flat = np.frombuffer(out, np.uint8, self._values, self.format.codes_offset), values.ravel()
        for start in range(0, self._values, _BLOCK):
            codes[start : start + _BLOCK] = self._code(flat[start : start + _BLOCK])
        return self._length

    def decode(self, data: memoryview, page: memoryview) -> None:
        if data.nbytes != self._length:
            raise StoreCorruptError(f"an encoded page has {data.nbytes} bytes, it should have {self._length}")
        scales = np.frombuffer(data, "<f4", self._planes)
        codes = np.frombuffer(data, np.uint8, self._values, self.format.codes_offset)
        if not self._possible(scales):
            raise StoreCorruptError("a scale of an encoded page is negative, not finite or too large")
        if self._has_bad_code(codes):
            raise StoreCorruptError("an encoded page holds a code that stands for nothing")
        out = np.frombuffer(page, np.uint8, self._planes * self._plane_bytes)
        self.decode_planes(data, 0, list(out.reshape(self._planes, -1)))

    def decode_planes(self, data: memoryview, first_plane: int, planes: Sequence[_Bytes]) -> None:
        """Fill each of `planes`, uint8 (plane_bytes,), with a plane of an encoded page, from `first_plane` on.

        Nothing is checked: codes that stand for nothing become 0.
        """
        scales = np.frombuffer(data, "<f4", len(planes), SCALE_BYTES * first_plane)
        count = self.format.plane_values
        codes = np.frombuffer(data, np.uint8, len(planes) * count, self.format.codes_offset + first_plane * count)
        with np.errstate(over="ignore", invalid="ignore"):  # scales that no codec makes
            # 256 products and roundings for a plane, then one look-up for each value
            tables = narrowed(scales[:, np.newaxis] * self._decoded, self._dtype)
        for table, plane, target in zip(tables, codes.reshape(len(planes), count), planes):
            np.take(table, plane, out=target.view(table.dtype), mode="clip")

    def _possible(self, scales: _Floats) -> bool:
        largest = _LARGEST[self._dtype] * (1 + 2**-20)  # more than the rounding of a scale can add
        with np.errstate(invalid="ignore"):  # a signaling NaN
            return bool(((scales >= 0) & (scales * np.float64(self.limit) <= largest)).all())

    def _tamed(self, page: memoryview) -> tuple[_Floats, _Floats]:
        """Values and peaks of a page in which not all values are finite."""
        values = read_values(page, self._dtype, self._values, finite=False).reshape(self._planes, -1)
        peaks = np.abs(np.where(np.isfinite(values), values, np.float32(0))).max(1)
        numbers = np.where(np.isnan(values), np.float32(0), values)
        # Not np.clip: whether it gives 0 or -0 where both bounds are 0 depends on the CPU.
        return np.copysign(np.minimum(np.abs(numbers), peaks[:, np.newaxis]), numbers), peaks

    def _scales(self, peaks: _Floats) -> _Floats:
        scales = np.where(peaks > 0, np.maximum(peaks / np.float32(self.limit), _SMALLEST_SCALE), np.float32(0))
        with np.errstate(over="ignore"):
            overflowing = np.isinf(scales * np.float32(self.limit))  # the scale was rounded up
        return np.where(overflowing, np.nextafter(scales, np.float32(0)), scales)


class Int8Codec(QuantisedCodec):
    """Symmetric int8, scale = max|x| / 127: an error of at most scale / 2 before the rounding to the dtype."""

    name = "int8"
    limit = 127.0

    def _code(self, values: _Floats) -> _Bytes:
        return np.rint(values, out=values).astype(np.int8).view(np.uint8)

    def _code_values(self) -> _Floats:
        values = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
        values[0x80] = 0  # -128
        return values

    def _has_bad_code(self, codes: _Bytes) -> bool:
        return bool(codes.view(np.int8).min() == -128)


class Fp8Codec(QuantisedCodec):
    """float8_e4m3fn, scale = max|x| / 448, rounded half to even.

    Before the rounding to the dtype the error is at most |x| / 16, or scale / 1024 where that is more.
    """

    name = "fp8"
    limit = 448.0

    def _code(self, values: _Floats) -> _Bytes:
        # Times 2^-120 the exponent has float8's bias (7 instead of 127), subnormals included: what is left is
        # to round 20 bits of mantissa away.
        values *= np.float32(2.0**-120)
        bits = values.view(np.uint32)
        codes = (bits >> 20) & 1
        codes += bits & 0x7FFFFFFF
        codes += 0x7FFFF
        codes >>= 20
        codes |= (bits >> 24) & 0x80
        return codes.astype(np.uint8)

    def _code_values(self) -> _Floats:
        codes = np.arange(256, dtype=np.uint16)
        halves = ((codes & 0x80) << 8 | (codes & 0x7F) << 7).view(np.float16)  # float16 with float8's exponents
        values: _Floats = halves.astype(np.float32) * np.float32(256)
        values[[0x7F, 0xFF]] = 0  # NaN
        return values

    def _has_bad_code(self, codes: _Bytes) -> bool:
        return bool((codes & 0x7F).max() == 0x7F)  # NaN


def read_values(page: memoryview, dtype: str, count: int, finite: bool = True) -> _Floats:
    """The first `count` values of a page as a new float32 array (count,); `dtype` is float32, float16 or bfloat16.

    `finite`: NaN and inf of float16 become values above 65504, which is several times faster.
    """
    if dtype == "float32":
        return np.frombuffer(page, "<f4", count).astype(np.float32)
    if dtype == "bfloat16":
        wide: _Floats = np.left_shift(np.frombuffer(page, "<u2", count), 16, dtype=np.uint32).view(np.float32)
        return wide
    if not finite:
        return np.frombuffer(page, "<f2", count).astype(np.float32)
    # The exponent moves to its place in float32; the product corrects its bias (127 instead of 15).
    bits = np.left_shift(np.frombuffer(page, "<i2", count), 13, dtype=np.int32)
    bits &= np.int32(-0x70000001)  # of the sign's copies, only the first stays
    values: _Floats = bits.view(np.float32)
    values *= np.float32(2.0**112)
    return values


def narrowed(values: _Floats, dtype: str) -> npt.NDArray[np.generic]:
    """Finite values rounded half to even to `dtype`, of the same shape; bfloat16 as uint16."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
