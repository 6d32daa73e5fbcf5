"""The host tier's memory: page-first, so that one page is one contiguous, aligned piece."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.errors import ProtocolError
from hicache.host_pool.arena import ANYWHERE, Placement, allocate_aligned, prefault
from hicache.host_pool.budget import check_host_budget
from hicache.host_pool.pinning import CudaRegistrar, Registrar, Registration
from hicache.layout import HostFormat, KVLayout
from hicache.pages import PageAllocator
from hicache.types import PageIndices

POISON_BYTE = 0xDB
"""Fills pages that hold nothing, so that a read of them shows."""


@dataclass(frozen=True)
class ArenaStartup:
    """What making an arena took, and what came of it."""

    allocate_seconds: float
    pin_seconds: float
    pinned_bytes: int
    huge_pages: bool
    numa_node: int | None


class HostPool:
    """`num_pages` pages of `page_stride` bytes, each starting at a multiple of 4 KiB.

    `codec` says how they hold the pages of `layout`, see `HostFormat` (`format`).

    `pinned` registers them with CUDA, by `registrar` (the default is a `CudaRegistrar`), in pieces of
    `pages_per_registration` pages: a copy must not go over the end of one. What a configuration's "auto" comes to say
    `resolve_pinned` and `resolve_numa`.

    Raises CapacityError if the memory is not to be had, before anything is allocated where that can be known, or if
    CUDA refuses to pin it; ConfigError if the kernel refuses the placement, or if the codec does not suit the layout.
    Nothing is left behind.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        pinned: bool = False,
        placement: Placement = ANYWHERE,
        registrar: Registrar | None = None,
        codec: str = "none",
    ) -> None:
        self.format = HostFormat(layout, codec)
        self.page_stride = self.format.page_stride
        self.num_pages = num_pages
        self.nbytes = num_pages * self.page_stride
        self.pinned = pinned
        check_host_budget(self.nbytes)
        if pinned and registrar is None:
            registrar = CudaRegistrar()
        self.allocator = PageAllocator(num_pages)
        begun = time.perf_counter()
        # A fork would make the pages copy-on-write: this process's next write could go to a new page, while the
        # GPU still copies from and to the old one.
        arena = allocate_aligned(self.nbytes, placement, fork=not pinned)
        if pinned or placement.populate:
            prefault(arena)
        allocated = time.perf_counter()
        registration = Registration(arena, self.page_stride, registrar) if pinned and registrar else None
        self.pages_per_registration = registration.pages if registration else max(1, num_pages)
        # Also at exit and for a pool that was never closed: memory must not be unmapped while it is registered.
        self._unpin = weakref.finalize(self, registration.release) if registration else None
        self.startup = ArenaStartup(
            allocate_seconds=allocated - begun,
            pin_seconds=time.perf_counter() - allocated,
            pinned_bytes=registration.nbytes if registration else 0,
            huge_pages=placement.huge_pages,
            numa_node=placement.numa_node,
        )
        self._array: npt.NDArray[np.uint8] | None = arena.reshape(num_pages, self.page_stride)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All pages, uint8 (num_pages, page_stride)."""
        if self._array is None:
            raise ProtocolError("the host pool is closed")
        return self._array

    def page(self, index: int) -> memoryview:
        """The page_stride bytes of one page, writable and fit for O_DIRECT."""
        if not 0 <= index < self.num_pages:
            raise ProtocolError(f"host page {index} is outside 0 .. {self.num_pages - 1}")
        return memoryview(self.array[index])

    def poison(self, pages: PageIndices) -> None:
        """Fill `pages` with POISON_BYTE."""
        self.array[pages] = POISON_BYTE

    def close(self) -> None:
        """Unpin the memory, and give it back as soon as no view of it is left. Idempotent.

        No copy may be in flight.
        """
        if self._unpin is not None:
            self._unpin()
        self._array = None
