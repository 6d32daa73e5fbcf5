"""Bytes of a device pool from and to host memory, for poison, checks and tools. Serving goes by the copy kernels.

All calls return when the bytes are there, and come after what the calling thread enqueued on its current stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from hicache.kernels.base import Bytes2D
from hicache.kernels.cuda_planes import CudaPlanes
from hicache.kernels.dispatch import Planes
from hicache.types import PageIndices


class PlaneAccess(ABC):
    """Pages of planes as bytes."""

    @abstractmethod
    def read(self, plane: int, pages: PageIndices, out: Bytes2D) -> None:
        """Copy `pages` of a plane to `out`, (pages, plane_bytes)."""

    @abstractmethod
    def write(self, plane: int, pages: PageIndices, data: Bytes2D) -> None:
        """Copy `data`, (pages, plane_bytes), to `pages` of a plane."""

    @abstractmethod
    def write_part(self, plane: int, page: int, start: int, data: Bytes2D) -> None:
        """Copy the bytes of `data`, of any shape, to one page of a plane from its byte `start` on."""

    @abstractmethod
    def fill(self, pages: PageIndices, byte: int) -> None:
        """Set every byte of `pages`, in all planes."""


class HostPlanes(PlaneAccess):
    """Planes in host memory, each uint8 (num_pages, plane_bytes)."""

    def __init__(self, planes: Sequence[Bytes2D]) -> None:
        self._planes = planes

    def read(self, plane: int, pages: PageIndices, out: Bytes2D) -> None:
        """See PlaneAccess."""
        # mode="raise" would gather into a temporary first; what is in another page is wrong anyway
        np.take(self._planes[plane], pages, axis=0, out=out, mode="clip")

    def write(self, plane: int, pages: PageIndices, data: Bytes2D) -> None:
        """See PlaneAccess."""
        self._planes[plane][pages] = data

    def write_part(self, plane: int, page: int, start: int, data: Bytes2D) -> None:
        """See PlaneAccess."""
        self._planes[plane][page, start : start + data.size] = data.reshape(-1)

    def fill(self, pages: PageIndices, byte: int) -> None:
        """See PlaneAccess."""
        for plane in self._planes:
            plane[pages] = byte


class GpuPlanes(PlaneAccess):
    """Planes on a GPU."""

    def __init__(self, planes: CudaPlanes) -> None:
        self._planes = planes

    def read(self, plane: int, pages: PageIndices, out: Bytes2D) -> None:
        """See PlaneAccess."""
        out[:] = self._planes.tensors[plane][self._on_device(pages)].cpu().numpy()

    def write(self, plane: int, pages: PageIndices, data: Bytes2D) -> None:
        """See PlaneAccess."""
        self._planes.tensors[plane][self._on_device(pages)] = self._on_device(data)
        self._finish()

    def write_part(self, plane: int, page: int, start: int, data: Bytes2D) -> None:
        """See PlaneAccess."""
        self._planes.tensors[plane][page, start : start + data.size] = self._on_device(data.reshape(-1))
        self._finish()

    def fill(self, pages: PageIndices, byte: int) -> None:
        """See PlaneAccess. Waits for the whole device first: other streams may still read what was freed."""
        torch.cuda.synchronize(self._planes.device)
        where = self._on_device(pages)
        for tensor in self._planes.tensors:
            tensor[where] = byte
        self._finish()

    def _on_device(self, array: PageIndices | Bytes2D) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._planes.device)

    def _finish(self) -> None:
        torch.cuda.current_stream(self._planes.device).synchronize()


def access(planes: Planes) -> PlaneAccess:
    """Access to planes wherever they lie."""
    return GpuPlanes(planes) if isinstance(planes, CudaPlanes) else HostPlanes(planes)
