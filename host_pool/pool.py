"""The host tier's memory: page-first, so that one page is one contiguous, aligned piece."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from hicache.errors import ConfigError, ProtocolError
from hicache.host_pool.arena import allocate_aligned
from hicache.host_pool.budget import check_host_budget
from hicache.layout import KVLayout
from hicache.pages import PageAllocator
from hicache.types import PageIndices

POISON_BYTE = 0xDB
"""Fills pages that hold nothing, so that a read of them shows."""


class HostPool:
    """`num_pages` pages of `layout.page_stride` bytes, each starting at a multiple of 4 KiB.

    Raises CapacityError before anything is allocated if the memory is not to be had, and ConfigError
    if `pinned` is True, because memory is registered with CUDA only in a build that has CUDA streams.
    """

    def __init__(self, layout: KVLayout, num_pages: int, pinned: bool | Literal["auto"] = "auto") -> None:
        if pinned is True:
            raise ConfigError("pinned is true, but this build has no CUDA support: use pinned: auto")
        self.layout = layout
        self.num_pages = num_pages
        self.nbytes = num_pages * layout.page_stride
        check_host_budget(self.nbytes)
        self.allocator = PageAllocator(num_pages)
        self._array: npt.NDArray[np.uint8] | None = allocate_aligned(self.nbytes).reshape(num_pages, layout.page_stride)

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
        """Give the memory back, as soon as no view of it is left. Idempotent."""
        self._array = None
