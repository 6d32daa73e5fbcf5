"""The plain form of the copy kernels: the oracle that the fast ones are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.errors import ProtocolError
from hicache.types import PageIndices

Bytes2D: TypeAlias = npt.NDArray[np.uint8]
"""Pages by bytes: a device plane (num_device_pages, plane_bytes) or the host pool (num_host_pages, page_stride)."""


class ReferenceKernels:
    """One page of one plane at a time."""

    def gather(
        self, planes: Sequence[Bytes2D], device_pages: PageIndices, host: Bytes2D, host_pages: PageIndices
    ) -> None:
        check_copy(planes, device_pages, host, host_pages)
        for index, plane in enumerate(planes):
            for source, target in zip(device_pages, host_pages):
                host[target, columns(plane, index)] = plane[source]

    def scatter(
        self,
        planes: Sequence[Bytes2D],
        device_pages: PageIndices,
        host: Bytes2D,
        host_pages: PageIndices,
        first_plane: int,
    ) -> None:
        check_copy(planes, device_pages, host, host_pages, first_plane)
        for index, plane in enumerate(planes, first_plane):
            for source, target in zip(host_pages, device_pages):
                plane[target] = host[source, columns(plane, index)]


def columns(plane: Bytes2D, index: int) -> slice:
    """Where the bytes of plane number `index` lie in a host page."""
    plane_bytes = plane.shape[1]
    return slice(index * plane_bytes, (index + 1) * plane_bytes)


def check_copy(
    planes: Sequence[Bytes2D], device_pages: PageIndices, host: Bytes2D, host_pages: PageIndices, first_plane: int = 0
) -> None:
    """Raise ProtocolError, before anything is written, if a copy would touch a byte outside the pools."""
    if len(device_pages) != len(host_pages):
        raise ProtocolError(f"{len(device_pages)} device pages are paired with {len(host_pages)} host pages")
    check_pages("host", host_pages, len(host))
    if not planes:
        return
    shape = planes[0].shape
    if any(plane.shape != shape for plane in planes):
        raise ProtocolError(f"planes differ in shape: {sorted({plane.shape for plane in planes})}")
    if first_plane < 0 or (first_plane + len(planes)) * shape[1] > host.shape[1]:
        last = first_plane + len(planes) - 1
        raise ProtocolError(f"planes {first_plane} .. {last} of {shape[1]} bytes leave the {host.shape[1]} byte page")
    check_pages("device", device_pages, shape[0])


def check_pages(side: str, pages: PageIndices, count: int) -> None:
    """Raise ProtocolError if one of `pages` is not in a pool of `count` pages."""
    if len(pages) and not (pages.min() >= 0 and pages.max() < count):
        outside = pages[(pages < 0) | (pages >= count)]
        raise ProtocolError(f"{side} page outside 0 .. {count - 1}: {outside[:8].tolist()}")
