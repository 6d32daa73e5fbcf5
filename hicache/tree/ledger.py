"""Page counts per tier, and who may be evicted: kept up to date node by node, never by scanning.

Every change of a node ends in `refresh`, which compares what the node is now with what it was
counted as. Nothing else writes the counters or the eviction orders.

| device copy                     | counted as | in order `device` if                      |
|---------------------------------|------------|-------------------------------------------|
| RESIDENT, unlocked and unpinned | EVICTABLE  | no child has a copy on the device         |
| RESIDENT, locked                | PROTECTED  | -                                         |
| RESIDENT and pinned, or FILLING | IN_FLIGHT  | -                                         |

| host copy                          | counted as | in order                                   |
|------------------------------------|------------|--------------------------------------------|
| unpinned, device copy RESIDENT     | EVICTABLE  | `mirrors`                                  |
| unpinned, no device copy, unlocked | EVICTABLE  | `host_leaves` if it has no children        |
| unpinned, no device copy, locked   | PROTECTED  | -                                          |
| pinned, or FILLING                 | IN_FLIGHT  | -                                          |
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum

from hicache.policies.base import EvictionOrder, Remembered
from hicache.policies.eviction import eviction_order
from hicache.tree.node import Node, parent_of
from hicache.tree.plans import page_count
from hicache.tree.residency import ABSENT, RESIDENT, CopyState
from hicache.types import Tier


class Share(IntEnum):
    """What the pages of a copy are to the pool."""

    NONE = 0
    EVICTABLE = 1
    PROTECTED = 2
    IN_FLIGHT = 3


_EVICTABLE, _PROTECTED, _IN_FLIGHT = 1, 2, 3  # Share as plain integers: `classify` is called for every change
_HOST_SHIFT = 2
_IN_DEVICE, _IN_MIRRORS, _IN_HOST_LEAVES = 16, 32, 64
IN_AN_ORDER = _IN_DEVICE | _IN_MIRRORS | _IN_HOST_LEAVES
_OF_TIER = {Tier.DEVICE: _IN_DEVICE, Tier.HOST: _IN_MIRRORS | _IN_HOST_LEAVES}


class Ledger:
    """Counters and eviction orders of one tree."""

    def __init__(self, device_eviction: str, host_eviction: str, queue_aware: Collection[Tier] = ()) -> None:
        on_device, on_host = Tier.DEVICE in queue_aware, Tier.HOST in queue_aware
        self.device: EvictionOrder[Node] = eviction_order(device_eviction, Tier.DEVICE, on_device)
        self.mirrors: EvictionOrder[Node] = eviction_order(host_eviction, Tier.HOST, on_host)
        self.host_leaves: EvictionOrder[Node] = eviction_order(host_eviction, Tier.HOST, on_host)
        self._device_pages, self._host_pages = [0, 0, 0, 0], [0, 0, 0, 0]  # by share
        self.orders = ((_IN_DEVICE, self.device), (_IN_MIRRORS, self.mirrors), (_IN_HOST_LEAVES, self.host_leaves))

    def pages(self, tier: Tier, share: Share) -> int:
        return (self._device_pages if tier is Tier.DEVICE else self._host_pages)[share]

    def refresh(self, node: Node) -> None:
        now = classify(node)
        if now != node.listed:
            self._move(node, now)

    def refresh_parent(self, node: Node) -> None:
        parent = parent_of(node)
        if not parent.is_root:
            self.refresh(parent)

    def forget(self, node: Node) -> None:
        """Uncount a node that is about to change its length or to leave the tree."""
        if node.listed:
            self._move(node, 0)

    def entered(self, node: Node, tier: Tier) -> Sequence[Remembered]:
        """`node` is about to get a copy on `tier`; returns what the tier remembers of its content."""
        if tier is Tier.DEVICE:
            return self.device.entered(node)
        self.mirrors.entered(node)
        return self.host_leaves.entered(node)

    def dropped(self, node: Node, tier: Tier) -> None:
        """`node` has just lost its copy on `tier`; its pages are still listed."""
        for flag, order in self.orders:
            if node.listed & flag & _OF_TIER[tier]:
                order.evicted(node)
                node.listed &= ~flag
        self.refresh(node)

    def advance(self, now: float) -> None:
        """The clock shows `now`, in seconds."""
        for _, order in self.orders:
            order.advance(now)

    def touch(self, node: Node) -> None:
        for flag, order in self.orders:
            if node.listed & flag:
                order.touch(node)

    def _move(self, node: Node, now: int) -> None:
        was, node.listed = node.listed, now
        changed, count = was ^ now, page_count(node)
        if changed & 3:
            self._device_pages[was & 3] -= count
            self._device_pages[now & 3] += count
        if changed & 3 << _HOST_SHIFT:
            self._host_pages[was >> _HOST_SHIFT & 3] -= count
            self._host_pages[now >> _HOST_SHIFT & 3] += count
        if changed & IN_AN_ORDER:
            for flag, order in self.orders:
                if was & changed & flag:
                    order.discard(node)
                elif changed & flag:
                    order.add(node)


def classify(node: Node) -> int:
    """What `node` is to be counted as: shares and order membership, packed into one integer."""
    residency = node.residency
    device, host, _ = residency.states
    if host is ABSENT:
        return _classify_device(node, device) if device is not ABSENT else 0
    if host is not RESIDENT or residency.pins[1]:
        flags = _IN_FLIGHT << _HOST_SHIFT
    elif device is RESIDENT:
        flags = _EVICTABLE << _HOST_SHIFT | _IN_MIRRORS
    elif node.lock_ref:
        flags = _PROTECTED << _HOST_SHIFT
    else:
        flags = _EVICTABLE << _HOST_SHIFT | (0 if node.children else _IN_HOST_LEAVES)
    return flags | _classify_device(node, device) if device is not ABSENT else flags


def _classify_device(node: Node, state: CopyState) -> int:
    if state is not RESIDENT:
        return _IN_FLIGHT
    if node.lock_ref:
        return _PROTECTED
    if node.residency.pins[0]:
        return _IN_FLIGHT
    return _EVICTABLE if node.device_children else _EVICTABLE | _IN_DEVICE
