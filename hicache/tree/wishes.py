"""What requests wish of the tree beside their locks: pages they wait for, and ranges to be kept for a while.

Neither keeps a page for sure, and neither blocks anything: orders that look at them evict such pages later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hicache.errors import IntegrityError
from hicache.policies.retention import RetentionRange
from hicache.tree.ledger import IN_AN_ORDER
from hicache.tree.node import Node
from hicache.tree.radix_tree import RadixTree
from hicache.types import PrefixKey


class Expectations:
    """Which nodes waiting requests will hit, by request. Nodes that were evicted since count no more."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._last: dict[str, Node] = {}

    def expect(self, rid: str, key: PrefixKey) -> None:
        """Request `rid` waits and will ask for `key`; in place of what it was said to ask for before."""
        self.end(rid)
        path = self._tree.match(key, hit=False).path
        if path:
            self._last[rid] = path[-1]
            self._add(path[-1], 1)

    def end(self, rid: str) -> None:
        """Request `rid` waits no more; nothing if it did not."""
        node = self._last.pop(rid, None)
        if node is not None:
            self._add(node, -1)

    def _add(self, last: Node, by: int) -> None:
        touch = self._tree.ledger.touch
        for node in _path_of(last):
            node.awaited += by
            if node.listed & IN_AN_ORDER:
                touch(node)

    def check(self) -> None:
        """Raise IntegrityError if a node is not awaited by as many requests as will hit it."""
        awaited = Counter(node for last in self._last.values() for node in _path_of(last))
        for node in self._tree.nodes():
            if node.awaited != awaited[node]:
                counts = f"awaited by {node.awaited} requests, not {awaited[node]}"
                raise IntegrityError(f"a node from token {node.start} on is {counts}")

    def __len__(self) -> int:
        return len(self._last)


def _path_of(node: Node) -> Iterator[Node]:
    """From `node` up, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def retain(tree: RadixTree, key: PrefixKey, ranges: Sequence[RetentionRange]) -> None:
    """Wish that the cached pages of `key` within `ranges` be kept; a later range wins where two overlap.

    Only whole pages that lie in a range are meant. Nodes are cut at the ends of the ranges.
    """
    page = tree.page_size
    for start, stop, retention in ranges:
        first = -(-start // page) * page
        last = len(key) // page * page if stop is None else min(stop, len(key)) // page * page
        if first >= last:
            continue
        tree.match(key.head(first), hit=False)  # cuts the node in which the range begins,
        for node in tree.match(key.head(last), hit=False).path:  # and where it ends
            if node.start >= first:
                node.retention = retention
                if node.listed & IN_AN_ORDER:
                    tree.ledger.touch(node)
