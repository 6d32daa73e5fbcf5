"""Requests that wait to be admitted, and the orders in which they are.

    fcfs         first come, first served
    lpm          longest cached prefix first: what is in memory is used before it is evicted
    dfs_weight   depth first through the tree, the branch with most waiting requests first: requests of one prefix
                 run together, whether it is cached yet down to their end or not

Priorities come before any order. A request that has waited for `max_wait` seconds comes before the others of its
priority, so that none starves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Literal, NamedTuple

import numpy as np

from hicache.serving.generation import Generation
from hicache.tiers import Tiers
from hicache.tree.node import Node
from hicache.tree.plans import page_count
from hicache.tree.residency import RESIDENT
from hicache.types import TOKEN_BYTES, PrefixKey, Tier

QueuePolicy = Literal["fcfs", "lpm", "dfs_weight"]

ORDERED_WINDOW = 128
"""Requests that are looked up in the tree each step; a longer queue is ordered by its beginning."""


class Peek(NamedTuple):
    """The cached prefix of a key, looked at without using it: no node is touched, counted or cut.

    Pages on the device; those of them that eviction could take now; and pages in host memory after them, or on
    their way from there.
    """

    path: tuple[Node, ...]
    device_pages: int
    unlocked_pages: int
    host_pages: int

    @property
    def pages(self) -> int:
        return self.device_pages + self.host_pages


def peek_prefix(tiers: Tiers, key: PrefixKey) -> Peek:
    """What the cache has of `key`, as `HiCache.match_prefix` would find it."""
    page_bytes = tiers.tree.page_bytes
    node, end = tiers.tree.roots.get(key.namespace), len(key.data) // page_bytes * page_bytes
    path, offset = list[Node](), 0
    device = unlocked = host = 0
    while node is not None and offset < end:
        node = node.child(key.data[offset : offset + page_bytes])
        if node is None:
            break
        on_device = not host and node.residency[Tier.DEVICE] is RESIDENT
        if not on_device and tiers.usable_host is None:
            break
        pages = _common_pages(node, key.data, offset, page_bytes)
        path.append(node)
        device += pages * on_device
        unlocked += pages * (on_device and not node.lock_ref)
        host += pages * (not on_device)
        offset += len(node.key)
        if pages < page_count(node):
            break
    return Peek(tuple(path), device, unlocked, host)


def common_pages(first: PrefixKey, second: PrefixKey, page_size: int) -> int:
    """Leading whole pages that two keys share."""
    if first.namespace != second.namespace:
        return 0
    return _shared_bytes(first.data, second.data) // (page_size * TOKEN_BYTES)


def _common_pages(node: Node, data: bytes, offset: int, page_bytes: int) -> int:
    """Leading pages of a node that `data` has at `offset`."""
    if data.startswith(node.key, offset):
        return page_count(node)
    return _shared_bytes(node.key, data[offset : offset + len(node.key)]) // page_bytes


def _shared_bytes(first: bytes, second: bytes) -> int:
    """Length of the common beginning, in whole tokens."""
    tokens = min(len(first), len(second)) // TOKEN_BYTES
    differs = np.frombuffer(first, np.int32, tokens) != np.frombuffer(second, np.int32, tokens)
    return (int(differs.argmax()) if differs.any() else tokens) * TOKEN_BYTES


class WaitingQueue:
    """Requests that wait, in the order of `policy`."""

    def __init__(self, tiers: Tiers, policy: QueuePolicy = "fcfs", max_wait: float = 10.0) -> None:
        self._tiers = tiers
        self._policy = policy
        self._max_wait = max_wait
        self._waiting: dict[str, Generation] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, generation: Generation) -> bool:
        return self._waiting.get(generation.rid) is generation

    def add(self, generation: Generation) -> None:
        """Put in a new or a retracted request."""
        self._waiting[generation.rid] = generation

    def remove(self, generation: Generation) -> None:
        """Take out a request that was admitted or aborted."""
        del self._waiting[generation.rid]

    def all(self) -> list[Generation]:
        """Those that wait, highest priority and earliest arrival first."""
        return sorted(self._waiting.values(), key=lambda generation: generation.rank)

    def ordered(self, now: float) -> list[Generation]:
        """Those that wait, in the order in which they are to be admitted."""
        waiting = self.all()
        if self._policy == "fcfs" or len(waiting) < 2:
            return waiting
        head, tail = waiting[:ORDERED_WINDOW], waiting[ORDERED_WINDOW:]
        peeks = {generation.rid: self._peek(generation) for generation in head}
        places = _longest_first(head, peeks) if self._policy == "lpm" else _depth_first(head, peeks)
        head.sort(key=lambda generation: self._place(generation, places[generation.rid], now))
        return head + tail

    def _place(self, generation: Generation, place: int, now: float) -> tuple[int, int, int]:
        priority, number = generation.rank
        if now - generation.arrival >= self._max_wait:
            return priority, -1, number
        return priority, place, number

    def _peek(self, generation: Generation) -> Peek:
        return peek_prefix(self._tiers, generation.kv.key(generation.length - 1))


def _longest_first(waiting: Sequence[Generation], peeks: dict[str, Peek]) -> dict[str, int]:
    return {generation.rid: (1 << 40) - peeks[generation.rid].pages for generation in waiting}


def _depth_first(waiting: Sequence[Generation], peeks: dict[str, Peek]) -> dict[str, int]:
    """The place of each request in a walk through the tree.

    A node weighs as much as requests wait below it. Children go heaviest first, of equal ones the one that was
    asked for first; requests whose prefix ends at a node come after those below it, which extend it.
    """
    weights = Counter(node for peek in peeks.values() for node in peek.path)
    numbers, asked = count(), dict[Node, int]()
    for generation in waiting:
        for node in peeks[generation.rid].path:
            if node not in asked:
                asked[node] = next(numbers)

    def walk(generation: Generation) -> list[tuple[int, int]]:
        steps = [(-weights[node], asked[node]) for node in peeks[generation.rid].path]
        return [*steps, (1, generation.number)]

    walked = sorted(waiting, key=walk)
    return {generation.rid: place for place, generation in enumerate(walked)}
