"""Conformance of copy kernels: every implementation must make exactly the bytes that its oracle makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from hicache.kernels.base import Bytes2D, PageCopier
from hicache.kernels.quantised import QuantisedCopier
from hicache.kernels.reference import ReferenceCopier
from hicache.layout import HostFormat
from hicache.storage_backends.codecs import create_quantiser
from hicache.types import PageIndices


class Bind(Protocol):
    """The implementation under test: a copier between pools.

    `fetch` is called after a copy. Where the copier worked on other memory than the given arrays, as on a GPU, it
    waits for the copy and brings all bytes of both pools back into them.
    """

    def __call__(self, planes: Sequence[Bytes2D], host: Bytes2D) -> tuple[PageCopier, Callable[[], None]]: ...


def in_place(make: Callable[[Sequence[Bytes2D], Bytes2D], PageCopier]) -> Bind:
    """The `Bind` of a copier that works on the arrays it is given."""
    return lambda planes, host: (make(planes, host), lambda: None)


class Case(Protocol):
    """What is copied, and the oracle that says what must come of it."""

    @property
    def device_pages(self) -> PageIndices: ...

    @property
    def host_pages(self) -> PageIndices: ...

    @property
    def oracle(self) -> Bind: ...

    def pools(self) -> tuple[list[Bytes2D], Bytes2D]:
        """Planes and host pool with the same bytes at every call."""
        ...


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

    @property
    def oracle(self) -> Bind:
        """The plain form of the kernels."""
        return in_place(ReferenceCopier)

    def pools(self) -> tuple[list[Bytes2D], Bytes2D]:
        """Planes and host pool with the same random bytes at every call."""
        random = np.random.default_rng(self.num_planes)
        shape = (self.num_planes, self.num_device_pages, self.plane_bytes)
        planes = random.integers(0, 256, shape, np.uint8)
        return list(planes), random.integers(0, 256, (self.num_host_pages, self.page_stride), np.uint8)


@dataclass(frozen=True)
class QuantisedCase:
    """A quantised host pool, a device pool, and a batch of page pairs. `seed` is for the values."""

    form: HostFormat
    num_device_pages: int
    num_host_pages: int
    device_pages: PageIndices
    host_pages: PageIndices
    seed: int = 0

    @property
    def oracle(self) -> Bind:
        """The codec of the disk tier, on the CPU."""
        quantiser = create_quantiser(self.form.codec, self.form.layout)
        return in_place(partial(QuantisedCopier, quantiser=quantiser))

    def pools(self) -> tuple[list[Bytes2D], Bytes2D]:
        """Device pages of finite values, some planes of zeros; host pages as the codec encodes others."""
        random = np.random.default_rng(self.seed)
        host = random.integers(0, 256, (self.num_host_pages, self.form.page_stride), np.uint8)
        codec = create_quantiser(self.form.codec, self.form.layout)
        for page in host:
            codec.encode(np.concatenate(self._planes(random, 1), axis=1)[0].data, page.data)
        return self._planes(random, self.num_device_pages), host

    def _planes(self, random: np.random.Generator, num_pages: int) -> list[Bytes2D]:
        return [self._plane(random, num_pages) for _ in range(self.form.layout.num_planes)]

    def _plane(self, random: np.random.Generator, num_pages: int) -> Bytes2D:
        shape = num_pages, self.form.plane_values
        scales = 2.0 ** random.integers(-8, 8, (num_pages, 1)) * (random.random((num_pages, 1)) < 0.9)
        values = (random.normal(0, 1, shape) * scales).astype(np.float32)
        if self.form.layout.dtype == "bfloat16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(self.form.layout.dtype).view(np.uint8)


def check_gather(bind: Bind, case: Case) -> None:
    """Raise AssertionError if any byte of either pool differs from the oracle after a gather."""
    results = []
    for implementation in (bind, case.oracle):
        planes, host = case.pools()
        copier, fetch = implementation(planes, host)
        copier.copy(case.device_pages, case.host_pages).gather()
        fetch()
        results.append((planes, host))
    _expect_equal(*results)


def check_scatter(bind: Bind, case: Case, first_plane: int, count: int) -> None:
    """The same for a scatter of `count` planes from `first_plane` on."""
    results = []
    for implementation in (bind, case.oracle):
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
