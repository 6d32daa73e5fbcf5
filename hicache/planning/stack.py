"""Hits of an lru cache of every size at once: the stack algorithm (Mattson, Gecsei, Slutz and Traiger, "Evaluation
techniques for storage hierarchies", IBM Systems Journal 9(2), 1970) for prompts that are chains of pages.

Every page has a *reach*: the smallest capacity in pages whose cache would have it now. A request for the chain p_1,
p_2, ... hits p_1 .. p_h where h is the number of leading pages whose reach is at most the capacity. It needs `room`
pages in all while it runs, its answer's too, so afterwards

    reach(page of the chain)  = min(reach, room)
    reach(any other page)     = max(reach, its place among the others + room)

A page is used whenever one below it is, so chains lie in the stack root first. What one request has used stays
together: runs of pages, whose reach is max(flat, slope + offset in the run). A request costs O(runs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.planning.pages import Floats, Ints, PageTrace
from hicache.sim.page_policies import BlockRequest

_NEVER = -(2**60)


@dataclass(frozen=True)
class Reuse:
    """Every page of a prompt that was seen before: `reach` in pages, and `idle`, seconds since it was last used.

    Those of request i are at starts[i] .. starts[i + 1].
    """

    reach: Ints
    idle: Floats
    starts: Ints

    def hits(self, capacity: int) -> Ints:
        """Pages that each request hits in a cache of `capacity` pages."""
        lengths = np.diff(self.starts)
        hits = np.zeros(len(lengths), np.int64)
        some = lengths > 0
        if some.any():
            hits[some] = np.add.reduceat((self.reach <= capacity).view(np.int8), self.starts[:-1][some], dtype=np.int64)
        return hits


def reuse_of(pages: PageTrace) -> Reuse:
    """One pass over the trace."""
    stack = LruStack(pages.unique_pages)
    used = np.zeros(pages.unique_pages, np.float64)
    reach, idle, starts = list[Ints](), list[Floats](), [0]
    for request, now in zip(pages.requests, pages.arrivals.tolist(), strict=True):
        reach.append(stack.use(request))
        idle.append(now - used[request.blocks[: len(reach[-1])]])
        used[request.blocks] = now
        starts.append(starts[-1] + len(reach[-1]))
    return Reuse(np.concatenate(reach), np.concatenate(idle), np.array(starts, np.int64))


class LruStack:
    """Runs in the order of their last use. A run is pages that follow each other in a chain."""

    def __init__(self, num_pages: int) -> None:
        self._run_of: npt.NDArray[np.int32] = np.full(num_pages, -1, np.int32)
        self._offset: npt.NDArray[np.int32] = np.zeros(num_pages, np.int32)  # of a page in its run
        self._runs = np.zeros((4, 64), np.int64)  # flat, slope, offset of the first page left, pages left
        self._count = 0

    def use(self, request: BlockRequest) -> Ints:
        """Serve a request; returns the reach of its leading pages that may be hit and were seen before."""
        pages = request.blocks
        runs = self._run_of[pages]
        known = int(np.count_nonzero(runs >= 0))  # what was seen is a prefix
        usable = min(known, request.usable)
        reach = self._reach(pages[:usable], runs[:usable])
        heads = np.flatnonzero(np.diff(runs[:known], prepend=-1))
        kept = self._kept(request, pages, runs, reach, heads[heads < usable])
        self._take(runs[:usable])
        self._push_down(request.room)
        self._take(runs[usable:known])
        self._place(request, len(pages), kept)
        return reach

    def _reach(self, pages: npt.NDArray[np.int32], runs: npt.NDArray[np.int32]) -> Ints:
        flat, slope = self._runs[0, runs], self._runs[1, runs]
        reach: Ints = np.maximum(flat, slope + self._offset[pages])
        return reach

    def _kept(
        self,
        request: BlockRequest,
        pages: npt.NDArray[np.int32],
        runs: npt.NDArray[np.int32],
        reach: Ints,
        heads: npt.NDArray[np.intp],
    ) -> list[tuple[int, int, int, int]]:
        """Parts (start, stop, flat, slope) of the chain whose reach is less than its room: they keep it."""
        limit = int(np.searchsorted(reach, request.room))
        parts = []
        for head, following in zip(heads.tolist(), [*heads[1:].tolist(), limit]):
            if head >= limit:
                break
            flat, slope = self._runs[:2, runs[head]].tolist()
            parts.append((head, min(following, limit), flat, slope + int(self._offset[pages[head]])))
        return parts

    def _take(self, runs: npt.NDArray[np.int32]) -> None:
        """Take the leading pages of some runs out of them, as many as are named."""
        if len(runs):
            heads = np.flatnonzero(np.diff(runs, prepend=-1))
            counts = np.diff(heads, append=len(runs))
            self._runs[2, runs[heads]] += counts
            self._runs[3, runs[heads]] -= counts

    def _push_down(self, room: int) -> None:
        """What is left lies below the request's pages."""
        _, slope, first, left = self._runs[:, : self._count]
        above = left.sum() - np.cumsum(left)
        np.maximum(slope, above + 1 + room - first, out=slope)

    def _place(self, request: BlockRequest, length: int, kept: Sequence[tuple[int, int, int, int]]) -> None:
        """Put the chain on top, its root uppermost."""
        start = kept[-1][1] if kept else 0
        parts = [*kept, (start, length, request.room, _NEVER)] if start < length else kept
        self._reserve(len(parts))
        for begin, stop, flat, slope in reversed(parts):
            pages = request.blocks[begin:stop]
            self._run_of[pages] = self._count
            self._offset[pages] = np.arange(stop - begin, dtype=np.int32)
            self._runs[:, self._count] = flat, slope, 0, stop - begin
            self._count += 1

    def _reserve(self, more: int) -> None:
        """Room for `more` runs: empty ones go, then the table grows."""
        if self._count + more <= self._runs.shape[1]:
            return
        live = np.flatnonzero(self._runs[3, : self._count])
        number = np.zeros(self._count, np.int32)
        number[live] = np.arange(len(live), dtype=np.int32)
        placed = self._run_of >= 0
        self._run_of[placed] = number[self._run_of[placed]]
        table = np.zeros((4, 2 * (len(live) + more) + 64), np.int64)
        table[:, : len(live)] = self._runs[:, live]
        self._runs, self._count = table, len(live)
