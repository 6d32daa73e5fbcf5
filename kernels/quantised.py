"""Copies that quantise on the way to host memory, on the CPU: by the codec of the disk tier itself.

The oracle of the GPU's kernels (cuda/quantise.cu), and what a device pool on the CPU uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hicache.errors import ProtocolError
from hicache.kernels.base import Bytes2D, check_planes, check_same_shape, checked_pairs
from hicache.layout import HostFormat
from hicache.types import PageIndices


class Quantiser(Protocol):
    """Makes quantised host pages: storage_backends/codecs_quantised.py."""

    @property
    def format(self) -> HostFormat: ...

    def encode(self, page: memoryview, out: memoryview, /) -> object:
        """Fill out[:page_bytes of the format] from a page: its planes, one after the other."""
        ...

    def decode_planes(self, data: memoryview, first_plane: int, planes: Sequence[npt.NDArray[np.uint8]], /) -> None:
        """Fill each of `planes`, uint8 (plane_bytes,), from an encoded page, from its plane `first_plane` on."""
        ...


@dataclass(frozen=True)
class QuantisedCopy:
    """One page at a time. A layer is read with its own scales and codes only."""

    planes: Sequence[Bytes2D]
    host: Bytes2D
    quantiser: Quantiser
    device_pages: PageIndices
    host_pages: PageIndices

    def gather(self) -> None:
        """See PageCopy."""
        page: Bytes2D = np.empty((len(self.planes), self.planes[0].shape[1]), np.uint8)
        for source, target in zip(self.device_pages, self.host_pages):
            for row, plane in zip(page, self.planes):
                row[:] = plane[source]
            self.quantiser.encode(page.reshape(-1).data, self.host[target].data)

    def scatter(self, first_plane: int, count: int) -> None:
        """See PageCopy."""
        check_planes(first_plane, count, len(self.planes))
        some = self.planes[first_plane : first_plane + count]
        for source, target in zip(self.host_pages, self.device_pages):
            data = self.host[source].data
            self.quantiser.decode_planes(data, first_plane, [plane[target] for plane in some])


class QuantisedCopier:
    """See PageCopier. `host` holds pages of the quantiser's format."""

    def __init__(self, planes: Sequence[Bytes2D], host: Bytes2D, quantiser: Quantiser) -> None:
        check_same_shape(planes)
        check_quantised(len(planes), planes[0].shape[1], host.shape[1], quantiser.format)
        self._planes = planes
        self._host = host
        self._quantiser = quantiser

    def copy(self, device_pages: PageIndices, host_pages: PageIndices) -> QuantisedCopy:
        """See PageCopier."""
        pairs = checked_pairs(device_pages, len(self._planes[0]), host_pages, len(self._host))
        return QuantisedCopy(self._planes, self._host, self._quantiser, *pairs)


def check_quantised(num_planes: int, plane_bytes: int, page_stride: int, form: HostFormat) -> None:
    """Raise ProtocolError unless the planes are those of the format, and a host page holds one of its pages."""
    layout = form.layout
    if (num_planes, plane_bytes) != (layout.num_planes, layout.plane_bytes):
        wanted = f"{layout.num_planes} of {layout.plane_bytes} bytes"
        raise ProtocolError(f"{num_planes} planes of {plane_bytes} bytes, the layout has {wanted}")
    if form.page_bytes > page_stride:
        raise ProtocolError(f"{form.codec} pages of {form.page_bytes} bytes leave the {page_stride} byte page")
