"""Paths in a trie of blocks whose blocks are numbered in order of appearance."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt


class BlockTrie:
    """Stores runs of consecutively numbered blocks, each run hanging below an earlier block.

    A run stands for all blocks one request adds, so a path costs one step per turn of a conversation
    rather than one per block.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._attach: list[int] = []
        self._depth: list[int] = []
        self.num_blocks = 0

    def add(self, attach: int, count: int) -> int:
        """Add a chain of `count` blocks below block `attach` (-1: the root); returns the deepest block."""
        if not count:
            return attach
        self._starts.append(self.num_blocks)
        self._attach.append(attach)
        self._depth.append(self.depth(attach))
        self.num_blocks += count
        return self.num_blocks - 1

    def depth(self, block: int) -> int:
        """Number of blocks from the root down to `block`, both ends included; 0 for the root (-1)."""
        if block < 0:
            return 0
        run = bisect_right(self._starts, block) - 1
        return self._depth[run] + block - self._starts[run] + 1

    def path(self, block: int) -> npt.NDArray[np.int32]:
        """Blocks from the root down to `block`, int32."""
        path = np.empty(self.depth(block), np.int32)
        end = len(path)
        while block >= 0:
            run = bisect_right(self._starts, block) - 1
            begin = self._depth[run]
            path[begin:end] = np.arange(self._starts[run], block + 1, dtype=np.int32)
            block, end = self._attach[run], begin
        return path
