"""One tier at the granularity of blocks: the tree and its orders, one request at a time, no bytes and no time.

A block of the trace is a page, so a run of a trace of hours takes seconds, and policies can be compared. The tree,
the ledger, the order and the way a victim is cut are the product's; there is a device and nothing below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache.demotion import cut_victim
from hicache.pages import PageAllocator
from hicache.sim.workload import BlockPrompt, TraceRequest
from hicache.tree.radix_tree import RadixTree
from hicache.types import PrefixKey

PAGE_SIZE = 16
"""Tokens that stand for a block: as many as orders look at to know a content again (policies.base.identity)."""

Blocks = npt.NDArray[np.int32]


class BlockRequest(NamedTuple):
    """A prompt as its whole blocks, from the root down; of them `usable` may be hit: one token is left to compute.

    `room` blocks are needed for the prompt and its answer.
    """

    blocks: Blocks
    usable: int
    room: int


class HitCount(NamedTuple):
    """Blocks of all prompts, and those that were hit."""

    hits: int
    blocks: int

    def rate(self, block_size: int, prompt_tokens: int) -> float:
        return self.hits * block_size / prompt_tokens


def block_requests(requests: Iterable[TraceRequest]) -> list[BlockRequest]:
    """The requests of a trace of blocks. Raises TypeError for prompts that are not made of blocks."""
    found = []
    for request in requests:
        prompt = request.prompt
        if not isinstance(prompt, BlockPrompt):
            raise TypeError("only traces whose prompts are blocks can be run by blocks")
        size = prompt.block_size
        room = -(-(prompt.length + request.output_len) // size)
        found.append(BlockRequest(prompt.blocks[: prompt.length // size], (prompt.length - 1) // size, room))
    return found


def unique_blocks(requests: Sequence[BlockRequest]) -> int:
    return len(np.unique(np.concatenate([request.blocks for request in requests])))


class BlockCache:
    """A device tier of `capacity` blocks under one eviction policy."""

    def __init__(self, capacity: int, policy: str) -> None:
        self.tree = RadixTree(PAGE_SIZE, policy)
        self._allocator = PageAllocator(capacity)

    def run(self, requests: Iterable[BlockRequest]) -> HitCount:
        hits = blocks = 0
        for request in requests:
            hits += self.serve(request)
            blocks += len(request.blocks)
        return HitCount(hits, blocks)

    def serve(self, request: BlockRequest) -> int:
        """Serve one request; returns the blocks that it hit. One without room for it computes without the cache."""
        key = PrefixKey.of(np.repeat(request.blocks, PAGE_SIZE))
        match = self.tree.match(PrefixKey(key.data[: request.usable * self.tree.page_bytes], key.namespace))
        receipt = self.tree.lock(match.last_device_node)
        hits = match.device_len // PAGE_SIZE
        if self._make_room(request.room - hits):
            pages = np.concatenate([match.device_pages(), self._allocated(len(request.blocks) - hits)])
            self._allocator.free(self.tree.insert(key, pages, hits).duplicates)
        self.tree.unlock(receipt)
        return hits

    def _allocated(self, count: int) -> Blocks:
        pages = self._allocator.alloc(count)
        assert pages is not None  # room was made
        return pages

    def _make_room(self, wanted: int) -> bool:
        order = self.tree.ledger.device
        while (shortage := wanted - self._allocator.free_pages) > 0:
            victim = order.first()
            if victim is None:
                return False
            cut_victim(self.tree, victim, shortage)
            self._allocator.free(self.tree.drop_device(victim))
        return True
