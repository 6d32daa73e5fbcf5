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
        count = len(pages)
        if not count:
            return
        if not self._are_out(pages):
            raise ProtocolError(f"page freed that is not allocated: {pages[~self._owned[pages]][:8].tolist()}")
        if count > 1 and self._repeats(pages):
            raise ProtocolError("one call frees the same page twice")
        self._owned[pages] = False
        self._stack[self._top : self._top + count] = pages[::-1]
        self._top += count

    def _are_out(self, pages: PageIndices) -> bool:
        if len(pages) == 1:  # the most frequent call, and several times as fast
            return bool(self._owned[pages[0]])
        return bool(np.count_nonzero(self._owned[pages]) == len(pages))

    def _repeats(self, pages: PageIndices) -> bool:
        """Is one of `pages`, all of which are out, in it twice?"""
        if len(pages) > self.num_pages:
            return True
        order = self._numbers[: len(pages)]
        self._seen[pages] = order
        return bool(np.count_nonzero(self._seen[pages] != order))

    def free_list(self) -> PageIndices:
        """Copy of the free page numbers, in no particular order."""
        return self._stack[: self._top].copy()
