"""Conformance of copy kernels: every implementation must move exactly the bytes that the reference moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hicache.kernels.dispatch import CopyKernels
from hicache.kernels.reference import Bytes2D, ReferenceKernels
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


def check_gather(kernels: CopyKernels, case: CopyCase) -> None:
    """Raise AssertionError if any byte of either pool differs from the reference after a gather."""
    results = []
    for implementation in (kernels, ReferenceKernels()):
        planes, host = case.pools()
        implementation.gather(planes, case.device_pages, host, case.host_pages)
        results.append((planes, host))
    _expect_equal(*results)


def check_scatter(kernels: CopyKernels, case: CopyCase, first_plane: int, count: int) -> None:
    """The same for a scatter of `count` planes from `first_plane` on."""
    results = []
    for implementation in (kernels, ReferenceKernels()):
        planes, host = case.pools()
        some = planes[first_plane : first_plane + count]
        implementation.scatter(some, case.device_pages, host, case.host_pages, first_plane)
        results.append((planes, host))
    _expect_equal(*results)


def _expect_equal(actual: tuple[list[Bytes2D], Bytes2D], expected: tuple[list[Bytes2D], Bytes2D]) -> None:
    np.testing.assert_array_equal(actual[1], expected[1], "host pool")
    for index, (plane, wanted) in enumerate(zip(actual[0], expected[0])):
        np.testing.assert_array_equal(plane, wanted, f"plane {index}")
