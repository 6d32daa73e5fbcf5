"""Copies between planes on a GPU and host memory that is not pinned: through a small pinned buffer, on the CPU.

The explicit way for machines that do not allow pinning. It blocks the calling thread, so it belongs onto a worker
thread's stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hicache.kernels.base import Bytes2D, PageCopy, check_planes, checked_pairs
from hicache.kernels.cuda_copier import CudaCopier
from hicache.kernels.cuda_planes import CudaPlanes
from hicache.layout import HostFormat
from hicache.streams import create_stream
from hicache.types import PageIndices

BOUNCE_BYTES = 16 << 20


class _Bounce:
    """A pinned buffer of a few pages; one thread at a time may use it. It has a stream of its own."""

    def __init__(self, planes: CudaPlanes, page_stride: int, form: HostFormat | None) -> None:
        self.num_pages = max(1, BOUNCE_BYTES // page_stride)
        self.pages: Bytes2D = torch.empty(self.num_pages, page_stride, dtype=torch.uint8, pin_memory=True).numpy()
        self._copier = CudaCopier(planes, self.pages, path="kernel", form=form)
        self._stream = create_stream(str(planes.device), "bounce")

    def run(self, device_pages: PageIndices, work: Callable[[PageCopy], None]) -> None:
        """Do `work` with a copy between `device_pages` and the first pages of the buffer, and wait for it."""
        slots = np.arange(len(device_pages), dtype=np.int32)
        self._stream.submit(lambda: work(self._copier.copy(device_pages, slots)))
        try:
            self._stream.synchronize()
        finally:
            self._stream.clear_error()


@dataclass(frozen=True)
class BouncingCopy:
    """One batch, a bufferful at a time. Both methods return when the bytes are there; TransferError if they fail."""

    copier: BouncingCopier
    device_pages: PageIndices
    host_pages: PageIndices

    def gather(self) -> None:
        """See PageCopy."""
        bounce = self.copier.down
        for device, host in self._parts(bounce.num_pages):
            bounce.run(device, lambda copy: copy.gather())
            for columns in self.copier.columns(0, self.copier.num_planes):
                self.copier.host[host, columns] = bounce.pages[: len(host), columns]

    def scatter(self, first_plane: int, count: int) -> None:
        """See PageCopy."""
        check_planes(first_plane, count, self.copier.num_planes)
        bounce = self.copier.up
        for device, host in self._parts(bounce.num_pages):
            for columns in self.copier.columns(first_plane, count):
                bounce.pages[: len(host), columns] = self.copier.host[host, columns]
            bounce.run(device, lambda copy: copy.scatter(first_plane, count))

    def _parts(self, step: int) -> list[tuple[PageIndices, PageIndices]]:
        starts = range(0, len(self.device_pages), step)
        return [(self.device_pages[at : at + step], self.host_pages[at : at + step]) for at in starts]


class BouncingCopier:
    """See PageCopier. Gathers go on one thread, scatters on one, which may be another.

    With `form`, host pages are quantised.
    """

    def __init__(self, planes: CudaPlanes, host: Bytes2D, form: HostFormat | None = None) -> None:
        self.host = host
        self.num_planes = len(planes)
        self._plane_bytes = planes.plane_bytes
        self._form = form
        self._num_device_pages = planes.num_pages
        self.down, self.up = (_Bounce(planes, host.shape[1], form) for _ in range(2))

    def columns(self, first_plane: int, count: int) -> list[slice]:
        """Where some planes lie in a host page."""
        if self._form is None:
            return [slice(first_plane * self._plane_bytes, (first_plane + count) * self._plane_bytes)]
        return self._form.columns(first_plane, count)

    def copy(self, device_pages: PageIndices, host_pages: PageIndices) -> BouncingCopy:
        """See PageCopier."""
        return BouncingCopy(self, *checked_pairs(device_pages, self._num_device_pages, host_pages, len(self.host)))
