"""What the tree answers: immutable descriptions of a match, an insertion, a lock, a copy in flight."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hicache.tree.node import Node
from hicache.types import PageIndices, PrefixKey, Tier, no_pages


class PrefixMatch(NamedTuple):
    """Longest cached prefix of a key. Valid until the tree next evicts; lock it to keep it."""

    key: PrefixKey
    path: tuple[Node, ...]
    device_nodes: int  # leading nodes of `path` that are readable on the device
    device_len: int  # tokens readable on the device
    host_hit_len: int  # tokens after those that are in host memory, or on their way from there

    @property
    def last_device_node(self) -> Node | None:
        return self.path[self.device_nodes - 1] if self.device_nodes else None

    def device_pages(self) -> PageIndices:
        return joined([node.device_pages for node in self.path[: self.device_nodes]])


class InsertResult(NamedTuple):
    """What became of the pages offered to the tree."""

    node: Node | None  # where the inserted prefix ends; None if nothing of it is in the tree
    path: tuple[Node, ...]  # nodes of the inserted prefix
    num_pages: int  # leading pages of the key that are now the tree's, readable on the device
    duplicates: PageIndices  # offered pages that the tree does not need: the caller frees them
    adopted: tuple[Node, ...]  # nodes whose device copy is new, parents first


class LockReceipt:
    """Proof of one lock of a path, to be given back exactly once."""

    __slots__ = ("node", "released")

    def __init__(self, node: Node | None) -> None:
        self.node = node
        self.released = False


class Fill:
    """One copy in flight into `tier`, over `nodes` in path order. Splits extend the list."""

    __slots__ = ("doomed", "nodes", "tier")

    def __init__(self, tier: Tier, nodes: list[Node]) -> None:
        self.tier = tier
        self.nodes = nodes
        self.doomed = False  # what it continues has failed: it will be aborted when it completes

    @property
    def num_pages(self) -> int:
        return sum(map(page_count, self.nodes))


def page_count(node: Node) -> int:
    pages = node.device_pages if node.device_pages is not None else node.host_pages
    return 0 if pages is None else len(pages)


def joined(arrays: list[PageIndices | None]) -> PageIndices:
    present = [array for array in arrays if array is not None]
    if len(present) == 1:
        return present[0]
    return np.concatenate(present) if present else no_pages()
