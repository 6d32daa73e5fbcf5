"""Copy kernels for pools that both lie in host memory.

Two ways, by the mean length of what is contiguous on both sides. Long runs: one slice copy each, which is
memcpy. Short ones: fancy indexing of whole pages as opaque items, so that thousands of small pages
are a few numpy calls; its temporary is kept within the cache by working in chunks. numpy releases the
GIL while it copies either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.kernels.reference import Bytes2D, check_copy, columns
from hicache.types import PageIndices

LONG_RUN_BYTES = 16 << 10
"""From this mean run length on, a slice copy of each run is faster than fancy indexing (bench: hicache.bench.copy)."""

CHUNK_BYTES = 1 << 20
"""Bytes that one fancy-indexed copy moves: its temporary should stay in cache."""

PageItems: TypeAlias = npt.NDArray[Any]
"""1-D view, one opaque item of plane_bytes bytes for each page."""

IndexPair: TypeAlias = "tuple[slice | PageIndices, slice | PageIndices]"
"""Where to read and where to write, in pages."""


class CpuKernels:
    """numpy copies."""

    def gather(
        self, planes: Sequence[Bytes2D], device_pages: PageIndices, host: Bytes2D, host_pages: PageIndices
    ) -> None:
        check_copy(planes, device_pages, host, host_pages)
        if not planes:
            return
        pairs = _pairs(device_pages, host_pages, planes[0].shape[1])
        for index, plane in enumerate(planes):
            _copy(_items(plane), _items(host[:, columns(plane, index)]), pairs)

    def scatter(
        self,
        planes: Sequence[Bytes2D],
        device_pages: PageIndices,
        host: Bytes2D,
        host_pages: PageIndices,
        first_plane: int,
    ) -> None:
        check_copy(planes, device_pages, host, host_pages, first_plane)
        if not planes:
            return
        pairs = _pairs(host_pages, device_pages, planes[0].shape[1])
        for index, plane in enumerate(planes, first_plane):
            _copy(_items(host[:, columns(plane, index)]), _items(plane), pairs)


def _copy(source: PageItems, target: PageItems, pairs: list[IndexPair]) -> None:
    for read, write in pairs:
        target[write] = source[read]


def _items(pages: Bytes2D) -> PageItems:
    return pages.view(np.dtype((np.void, pages.shape[1])))[:, 0]


def _pairs(sources: PageIndices, targets: PageIndices, plane_bytes: int) -> list[IndexPair]:
    """The copies of one plane; the same for all planes, so they are worked out once."""
    if not len(sources):
        return []
    starts = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
    if len(sources) * plane_bytes >= LONG_RUN_BYTES * (len(starts) + 1):
        return _run_pairs(sources, targets, starts)
    step = max(1, CHUNK_BYTES // plane_bytes)
    return [(sources[at : at + step], targets[at : at + step]) for at in range(0, len(sources), step)]


def _run_pairs(sources: PageIndices, targets: PageIndices, starts: npt.NDArray[np.intp]) -> list[IndexPair]:
    """`starts` are the places where a new run begins, but for the first."""
    firsts = np.concatenate(([0], starts))
    lengths = np.diff(np.concatenate((firsts, [len(sources)]))).tolist()
    runs = zip(sources[firsts].tolist(), targets[firsts].tolist(), lengths)
    return [(slice(source, source + size), slice(target, target + size)) for source, target, size in runs]
