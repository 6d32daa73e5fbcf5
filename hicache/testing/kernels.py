"""Conformance of copy kernels: every implementation must move exactly the bytes that the reference moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hicache.kernels.base import Bytes2D, PageCopier
from hicache.kernels.reference import ReferenceCopier
from hicache.types import PageIndices


@dataclass(frozen=True)
class CopyCase:
    """Sizes of two pools and a batch of page pairs."""

    num_planes: int
    plane_bytes: int
    page_stride: int
    num_device_pages: int
    num_host_pages: int
    device_pages: PageIndices
    host_pages: PageIndices

    def pools(self) -> tuple[list[Bytes2D], Bytes2D]:
        """Planes and host pool with the same random bytes at every call."""
        random = np.random.default_rng(self.num_planes)
        shape = (self.num_planes, self.num_device_pages, self.plane_bytes)
        planes = random.integers(0, 256, shape, np.uint8)
        return list(planes), random.integers(0, 256, (self.num_host_pages, self.page_stride), np.uint8)


class Bind(Protocol):
    """The implementation under test: a copier between pools.

    `fetch` is called after a copy. Where the copier worked on other memory than the given arrays, as on a GPU, it
    waits for the copy and brings all bytes of both pools back into them.
    """

    def __call__(self, planes: Sequence[Bytes2D], host: Bytes2D) -> tuple[PageCopier, Callable[[], None]]: ...


def in_place(make: Callable[[Sequence[Bytes2D], Bytes2D], PageCopier]) -> Bind:
    """The `Bind` of a copier that works on the arrays it is given."""
    return lambda planes, host: (make(planes, host), lambda: None)


def check_gather(bind: Bind, case: CopyCase) -> None:
    """Raise AssertionError if any byte of either pool differs from the reference after a gather."""
    results = []
    for implementation in (bind, in_place(ReferenceCopier)):
        planes, host = case.pools()
        copier, fetch = implementation(planes, host)
        copier.copy(case.device_pages, case.host_pages).gather()
        fetch()
        results.append((planes, host))
    _expect_equal(*results)


def check_scatter(bind: Bind, case: CopyCase, first_plane: int, count: int) -> None:
    """The same for a scatter of `count` planes from `first_plane` on."""
    results = []
    for implementation in (bind, in_place(ReferenceCopier)):
        planes, host = case.pools()
        copier, fetch = implementation(planes, host)
        copier.copy(case.device_pages, case.host_pages).scatter(first_plane, count)
        fetch()
        results.append((planes, host))
    _expect_equal(*results)


def _expect_equal(actual: tuple[list[Bytes2D], Bytes2D], expected: tuple[list[Bytes2D], Bytes2D]) -> None:
    np.testing.assert_array_equal(actual[1], expected[1], "host pool")
    for index, (plane, wanted) in enumerate(zip(actual[0], expected[0])):
        np.testing.assert_array_equal(plane, wanted, f"plane {index}")
