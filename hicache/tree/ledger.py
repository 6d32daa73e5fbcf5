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

from enum import IntEnum

from hicache.policies.eviction import EvictionOrder, eviction_order
from hicache.tree.node import Node
from hicache.tree.plans import page_count
from hicache.tree.residency import ABSENT, RESIDENT
from hicache.types import Tier


class Share(IntEnum):
    """What the pages of a copy are to the pool."""

    NONE = 0
    EVICTABLE = 1
    PROTECTED = 2
    IN_FLIGHT = 3


_HOST_SHIFT = 2
_IN_DEVICE, _IN_MIRRORS, _IN_HOST_LEAVES = 16, 32, 64
IN_AN_ORDER = _IN_DEVICE | _IN_MIRRORS | _IN_HOST_LEAVES


class Ledger:
    """Counters and eviction orders of one tree."""

    def __init__(self, device_eviction: str, host_eviction: str) -> None:
        self.device: EvictionOrder[Node] = eviction_order(device_eviction)
        self.mirrors: EvictionOrder[Node] = eviction_order(host_eviction)
        self.host_leaves: EvictionOrder[Node] = eviction_order(host_eviction)
        self._pages = {Tier.DEVICE: [0, 0, 0, 0], Tier.HOST: [0, 0, 0, 0]}
        self.orders = ((_IN_DEVICE, self.device), (_IN_MIRRORS, self.mirrors), (_IN_HOST_LEAVES, self.host_leaves))

    def pages(self, tier: Tier, share: Share) -> int:
        return self._pages[tier][share]

    def refresh(self, node: Node) -> None:
        now = classify(node)
        if now != node.listed:
            self._move(node, now)

    def forget(self, node: Node) -> None:
        """Uncount a node that is about to change its length or to leave the tree."""
        if node.listed:
            self._move(node, 0)

    def touch(self, node: Node) -> None:
        for flag, order in self.orders:
            if node.listed & flag:
                order.touch(node)

    def _move(self, node: Node, now: int) -> None:
        was, node.listed = node.listed, now
        count = page_count(node)
        device, host = self._pages[Tier.DEVICE], self._pages[Tier.HOST]
        device[was & 3] -= count
        device[now & 3] += count
        host[was >> _HOST_SHIFT & 3] -= count
        host[now >> _HOST_SHIFT & 3] += count
        for flag, order in self.orders if (was | now) & IN_AN_ORDER else ():
            if was & ~now & flag:
                order.discard(node)
            elif now & ~was & flag:
                order.add(node)


def classify(node: Node) -> int:
    """What `node` is to be counted as: shares and order membership, packed into one integer."""
    residency = node.residency
    device, host, _ = residency.states
    flags = 0
    if device is RESIDENT:
        if node.lock_ref:
            flags = Share.PROTECTED.value
        elif residency.pins(Tier.DEVICE):
            flags = Share.IN_FLIGHT.value
        else:
            flags = Share.EVICTABLE.value if node.device_children else Share.EVICTABLE.value | _IN_DEVICE
    elif device is not ABSENT:
        flags = Share.IN_FLIGHT.value
    if host is ABSENT:
        return flags
    return flags | _classify_host(node)


def _classify_host(node: Node) -> int:
    residency = node.residency
    if not residency.on_host or residency.pins(Tier.HOST):
        return Share.IN_FLIGHT << _HOST_SHIFT
    if residency.on_device:
        return Share.EVICTABLE << _HOST_SHIFT | _IN_MIRRORS
    if node.lock_ref:
        return Share.PROTECTED << _HOST_SHIFT
    return Share.EVICTABLE << _HOST_SHIFT | (0 if node.children else _IN_HOST_LEAVES)
