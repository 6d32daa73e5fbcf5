"""The plain form of the copy kernels: the oracle that the fast ones are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hicache.kernels.base import Bytes2D, check_planes, check_pools, checked_pairs, columns
from hicache.types import PageIndices


@dataclass(frozen=True)
class ReferenceCopy:
    """One page of one plane at a time."""

    planes: Sequence[Bytes2D]
    host: Bytes2D
    device_pages: PageIndices
    host_pages: PageIndices

    def gather(self) -> None:
        """See PageCopy."""
        for index, plane in enumerate(self.planes):
            for source, target in zip(self.device_pages, self.host_pages):
                self.host[target, columns(plane.shape[1], index)] = plane[source]

    def scatter(self, first_plane: int, count: int) -> None:
        """See PageCopy."""
        check_planes(first_plane, count, len(self.planes))
        for index in range(first_plane, first_plane + count):
            plane = self.planes[index]
            for source, target in zip(self.host_pages, self.device_pages):
                plane[target] = self.host[source, columns(plane.shape[1], index)]


class ReferenceCopier:
    """See PageCopier."""

    def __init__(self, planes: Sequence[Bytes2D], host: Bytes2D) -> None:
        check_pools(planes, host)
        self._planes = planes
        self._host = host

    def copy(self, device_pages: PageIndices, host_pages: PageIndices) -> ReferenceCopy:
        """See PageCopier."""
        pairs = checked_pairs(device_pages, len(self._planes[0]), host_pages, len(self._host))
        return ReferenceCopy(self._planes, self._host, *pairs)
