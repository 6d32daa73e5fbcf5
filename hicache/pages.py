"""Ownership of the pages of one pool: a free list that refuses to hand out or take back a page twice."""

from __future__ import annotations

import numpy as np

from hicache.errors import ProtocolError
from hicache.types import PageIndices


class PageAllocator:
    """Hands out page numbers 0 .. num_pages-1, lowest first on a fresh pool so that runs stay contiguous."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._top = num_pages
        self._owned = np.zeros(num_pages, np.bool_)
        self._numbers = np.arange(num_pages, dtype=np.int32)
        self._seen = np.empty(num_pages, np.int32)  # scratch of `free`: where each page stands in the call

    @property
    def free_pages(self) -> int:
        return self._top

    def alloc(self, count: int) -> PageIndices | None:
        """`count` pages, or None (and nothing taken) if fewer are free."""
        if count > self._top:
            return None
        pages = self._stack[self._top - count : self._top][::-1].copy()
        self._top -= count
        self._owned[pages] = True
        return pages

    def free(self, pages: PageIndices) -> None:
        """Take pages back. Raises ProtocolError, changing nothing, if one of them is not out."""
        if not len(pages):
            return
        if not self._owned[pages].all():
            raise ProtocolError(f"page freed that is not allocated: {pages[~self._owned[pages]][:8].tolist()}")
        order = self._numbers[: len(pages)]
        if len(order) == len(pages):
            self._seen[pages] = order
        if len(order) < len(pages) or (self._seen[pages] != order).any():
            raise ProtocolError("one call frees the same page twice")
        self._owned[pages] = False
        self._stack[self._top : self._top + len(pages)] = pages[::-1]
        self._top += len(pages)

    def free_list(self) -> PageIndices:
        """Copy of the free page numbers, in no particular order."""
        return self._stack[: self._top].copy()
