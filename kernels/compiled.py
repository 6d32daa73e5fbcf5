"""Copy kernels compiled with numba, an optional extra: a whole batch is one call that does not hold the GIL.

numpy gives the GIL back and takes it again once for each call, so a batch of many planes needs it hundreds of
times; beside a scheduler that runs Python all the time, each of them may cost the interpreter's switch interval
of 5 ms. Here it is needed once for each batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numba
import numpy as np
import numpy.typing as npt

from hicache.errors import ProtocolError
from hicache.kernels.base import Bytes2D, check_planes, check_pools, checked_pairs, columns
from hicache.types import PageIndices

Addresses: TypeAlias = npt.NDArray[np.int64]

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t]
_memcpy.restype = ctypes.c_size_t


@numba.njit("void(int64[::1], int64[::1], int64[::1], int64[::1], int64)", nogil=True)
def _move(
    sources: Addresses, source_offsets: Addresses, targets: Addresses, target_offsets: Addresses, plane_bytes: int
) -> None:
    """Addresses of planes and, for each page, its offset in every plane. Nothing is checked here."""
    for page in range(source_offsets.size):
        for plane in range(sources.size):
            _memcpy(targets[plane] + target_offsets[page], sources[plane] + source_offsets[page], plane_bytes)


@dataclass(frozen=True)
class _Pool:
    """Rows of bytes: the address of each plane, and the distance of two pages in all of them."""

    planes: Sequence[Bytes2D]  # keep the memory
    addresses: Addresses
    stride: int

    @classmethod
    def of(cls, planes: Sequence[Bytes2D]) -> _Pool:
        strides = planes[0].strides
        if strides[1] != 1 or any(plane.strides != strides for plane in planes):
            raise ProtocolError(f"planes are not rows of bytes, strides {sorted({plane.strides for plane in planes})}")
        return cls(planes, np.array([plane.ctypes.data for plane in planes], np.int64), strides[0])

    def offsets(self, pages: PageIndices) -> Addresses:
        return pages.astype(np.int64) * self.stride


class CompiledCopy:
    """One memcpy for each plane of each page, in machine code."""

    def __init__(self, device: _Pool, host: _Pool, device_pages: PageIndices, host_pages: PageIndices) -> None:
        self._device, self._host = device, host
        self._device_offsets, self._host_offsets = device.offsets(device_pages), host.offsets(host_pages)
        self._plane_bytes = device.planes[0].shape[1]

    def gather(self) -> None:
        """See PageCopy."""
        device, host = self._device.addresses, self._host.addresses
        _move(device, self._device_offsets, host, self._host_offsets, self._plane_bytes)

    def scatter(self, first_plane: int, count: int) -> None:
        """See PageCopy."""
        check_planes(first_plane, count, len(self._device.planes))
        some = slice(first_plane, first_plane + count)
        device, host = self._device.addresses[some], self._host.addresses[some]
        _move(host, self._host_offsets, device, self._device_offsets, self._plane_bytes)


class CompiledCopier:
    """See PageCopier. Planes of other than contiguous bytes are refused: ProtocolError."""

    def __init__(self, planes: Sequence[Bytes2D], host: Bytes2D) -> None:
        check_pools(planes, host)
        width = planes[0].shape[1]
        self._device = _Pool.of(planes)
        self._host = _Pool.of([host[:, columns(width, index)] for index in range(len(planes))])

    def copy(self, device_pages: PageIndices, host_pages: PageIndices) -> CompiledCopy:
        """See PageCopier."""
        pairs = checked_pairs(device_pages, len(self._device.planes[0]), host_pages, len(self._host.planes[0]))
        return CompiledCopy(self._device, self._host, *pairs)
