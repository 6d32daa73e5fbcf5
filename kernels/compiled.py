"""Copy kernels compiled with numba, an optional extra: a whole batch is one call that does not hold the GIL.

numpy gives the GIL back and takes it again once for each call, so a batch of many planes needs it hundreds of
times; beside a scheduler that runs Python all the time, each of them may cost the interpreter's switch interval
of 5 ms. Here it is needed once for each batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TypeAlias

import numba
import numpy as np
import numpy.typing as npt

from hicache.errors import ProtocolError
from hicache.kernels.reference import Bytes2D, check_copy, columns
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


class CompiledKernels:
    """One memcpy for each plane of each page, in machine code."""

    def gather(
        self, planes: Sequence[Bytes2D], device_pages: PageIndices, host: Bytes2D, host_pages: PageIndices
    ) -> None:
        check_copy(planes, device_pages, host, host_pages)
        if planes:
            host_planes = _host_planes(host, planes, 0)
            _move(*_side(planes, device_pages), *_side(host_planes, host_pages), planes[0].shape[1])

    def scatter(
        self,
        planes: Sequence[Bytes2D],
        device_pages: PageIndices,
        host: Bytes2D,
        host_pages: PageIndices,
        first_plane: int,
    ) -> None:
        check_copy(planes, device_pages, host, host_pages, first_plane)
        if planes:
            host_planes = _host_planes(host, planes, first_plane)
            _move(*_side(host_planes, host_pages), *_side(planes, device_pages), planes[0].shape[1])


def _host_planes(host: Bytes2D, planes: Sequence[Bytes2D], first_plane: int) -> list[Bytes2D]:
    return [host[:, columns(plane, index)] for index, plane in enumerate(planes, first_plane)]


def _side(planes: Sequence[Bytes2D], pages: PageIndices) -> tuple[Addresses, Addresses]:
    """Addresses of the planes and offsets of the pages. Raises ProtocolError unless all planes are laid out alike."""
    strides = planes[0].strides
    if strides[1] != 1 or any(plane.strides != strides for plane in planes):
        raise ProtocolError(f"planes are not rows of bytes, strides {sorted({plane.strides for plane in planes})}")
    return np.array([plane.ctypes.data for plane in planes], np.int64), pages.astype(np.int64) * strides[0]
