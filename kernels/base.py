"""The interface of the copy kernels, and the checks that all of them make.

Kernels are bound to two pools once; then each batch of pages is a `PageCopy`:

    copier = bind(planes, host)                   pools checked, kernels chosen (dispatch)
    copy = copier.copy(device_pages, host_pages)  pages checked and remembered
    copy.gather()                                 device to host, or
    copy.scatter(first_plane, count)              host to device, a layer at a time
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.errors import ProtocolError
from hicache.types import PageIndices

Bytes2D: TypeAlias = npt.NDArray[np.uint8]
"""Pages by bytes: a device plane (num_device_pages, plane_bytes) or the host pool (num_host_pages, page_stride)."""


class PageCopy(Protocol):
    """One batch of pages between two pools. Both methods are work for a stream, any number of times."""

    def gather(self) -> None:
        """Device to host, all planes."""
        ...

    def scatter(self, first_plane: int, count: int) -> None:
        """Host to device, `count` planes from `first_plane` on. Raises ProtocolError for planes there are not."""
        ...


class PageCopier(Protocol):
    """Copies pages between layer-first device planes and the page-first host pool that it was bound to."""

    def copy(self, device_pages: PageIndices, host_pages: PageIndices) -> PageCopy:
        """Page `device_pages[i]` is paired with `host_pages[i]`; pages that are written must all be different.

        The arrays are copied. Raises ProtocolError for pages that are outside the pools or do not pair up.
        """
        ...


def check_pools(planes: Sequence[Bytes2D], host: Bytes2D) -> None:
    """Raise ProtocolError unless all planes have one shape and fit into a host page, one after the other."""
    check_same_shape(planes)
    check_width(len(planes), planes[0].shape[1], host.shape[1])


def check_same_shape(planes: Sequence[Bytes2D]) -> None:
    """Raise ProtocolError unless there are planes, all of one shape."""
    shapes = {plane.shape for plane in planes}
    if len(shapes) != 1:
        raise ProtocolError(f"planes differ in shape: {sorted(shapes)}" if shapes else "there are no planes")


def check_width(num_planes: int, plane_bytes: int, page_stride: int) -> None:
    """Raise ProtocolError if the planes of a page leave the host page."""
    if num_planes * plane_bytes > page_stride:
        raise ProtocolError(f"{num_planes} planes of {plane_bytes} bytes leave the {page_stride} byte page")


def check_planes(first_plane: int, count: int, num_planes: int) -> None:
    """Raise ProtocolError unless first_plane .. first_plane + count - 1 are planes."""
    if first_plane < 0 or count < 0 or first_plane + count > num_planes:
        raise ProtocolError(f"planes {first_plane} .. {first_plane + count - 1} leave the {num_planes} planes")


def checked_pairs(
    device_pages: PageIndices, num_device_pages: int, host_pages: PageIndices, num_host_pages: int
) -> tuple[PageIndices, PageIndices]:
    """Copies of both arrays as int32. Raises ProtocolError if a copy of them would touch bytes outside the pools."""
    if len(device_pages) != len(host_pages):
        raise ProtocolError(f"{len(device_pages)} device pages are paired with {len(host_pages)} host pages")
    _check_pages("device", device_pages, num_device_pages)
    _check_pages("host", host_pages, num_host_pages)
    return np.array(device_pages, np.int32), np.array(host_pages, np.int32)


def columns(plane_bytes: int, index: int) -> slice:
    """Where the bytes of plane number `index` lie in a host page."""
    return slice(index * plane_bytes, (index + 1) * plane_bytes)


def _check_pages(side: str, pages: PageIndices, count: int) -> None:
    if len(pages) and not (pages.min() >= 0 and pages.max() < count):
        outside = pages[(pages < 0) | (pages >= count)]
        raise ProtocolError(f"{side} page outside 0 .. {count - 1}: {outside[:8].tolist()}")
