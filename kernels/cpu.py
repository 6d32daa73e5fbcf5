"""Copy kernels for pools that both lie in host memory.

Two ways, by the mean length of what is contiguous on both sides. Long runs: one slice copy each, which is
memcpy. Short ones: fancy indexing of whole pages as opaque items, so that thousands of small pages
are a few numpy calls; its temporary is kept within the cache by working in chunks. numpy releases the
GIL while it copies either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.kernels.base import Bytes2D, check_planes, check_pools, checked_pairs, columns
from hicache.types import PageIndices

LONG_RUN_BYTES = 16 << 10
"""From this mean run length on, a slice copy of each run is faster than fancy indexing (bench: hicache.bench.copy)."""

CHUNK_BYTES = 1 << 20
"""Bytes that one fancy-indexed copy moves: its temporary should stay in cache."""

PageItems: TypeAlias = npt.NDArray[Any]
"""1-D view, one opaque item of plane_bytes bytes for each page."""

Span: TypeAlias = "slice | PageIndices"
"""Pages of one pool."""


class CpuCopy:
    """numpy copies."""

    def __init__(
        self, planes: Sequence[PageItems], host: Sequence[PageItems], device_pages: PageIndices, host_pages: PageIndices
    ) -> None:
        self._planes = planes
        self._host = host  # the same planes in the host's pages
        self._device_pages = device_pages
        self._host_pages = host_pages

    def gather(self) -> None:
        """See PageCopy."""
        for plane, host in zip(self._planes, self._host):
            for device_span, host_span in self._spans:
                host[host_span] = plane[device_span]

    def scatter(self, first_plane: int, count: int) -> None:
        """See PageCopy."""
        check_planes(first_plane, count, len(self._planes))
        for index in range(first_plane, first_plane + count):
            for device_span, host_span in self._spans:
                self._planes[index][device_span] = self._host[index][host_span]

    @cached_property
    def _spans(self) -> list[tuple[Span, Span]]:
        """The copies of one plane, the same for all: worked out once, by the stream's worker."""
        return _spans(self._device_pages, self._host_pages, self._planes[0].itemsize)


class CpuCopier:
    """See PageCopier."""

    def __init__(self, planes: Sequence[Bytes2D], host: Bytes2D) -> None:
        check_pools(planes, host)
        width = planes[0].shape[1]
        self._planes = [_items(plane) for plane in planes]
        self._host = [_items(host[:, columns(width, index)]) for index in range(len(planes))]

    def copy(self, device_pages: PageIndices, host_pages: PageIndices) -> CpuCopy:
        """See PageCopier."""
        pairs = checked_pairs(device_pages, len(self._planes[0]), host_pages, len(self._host[0]))
        return CpuCopy(self._planes, self._host, *pairs)


def _items(pages: Bytes2D) -> PageItems:
    return pages.view(np.dtype((np.void, pages.shape[1])))[:, 0]


def _spans(device_pages: PageIndices, host_pages: PageIndices, plane_bytes: int) -> list[tuple[Span, Span]]:
    """Pages to copy at a time: runs that are contiguous on both sides, or lists of pages."""
    if not len(device_pages):
        return []
    starts = np.flatnonzero((np.diff(device_pages) != 1) | (np.diff(host_pages) != 1)) + 1
    if len(device_pages) * plane_bytes >= LONG_RUN_BYTES * (len(starts) + 1):
        return _runs(device_pages, host_pages, starts)
    step = max(1, CHUNK_BYTES // plane_bytes)
    return [(device_pages[at : at + step], host_pages[at : at + step]) for at in range(0, len(device_pages), step)]


def _runs(device_pages: PageIndices, host_pages: PageIndices, starts: npt.NDArray[np.intp]) -> list[tuple[Span, Span]]:
    """`starts` are the places where a new run begins, but for the first."""
    firsts = np.concatenate(([0], starts))
    lengths = np.diff(np.concatenate((firsts, [len(device_pages)]))).tolist()
    runs = zip(device_pages[firsts].tolist(), host_pages[firsts].tolist(), lengths)
    return [(slice(device, device + size), slice(host, host + size)) for device, host, size in runs]
