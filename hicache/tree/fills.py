"""Copies in flight: which nodes are receiving one, on which tier, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hicache.errors import ProtocolError
from hicache.tree.ledger import Ledger
from hicache.tree.node import Node, parent_of
from hicache.tree.plans import Fill, joined, page_count
from hicache.tree.residency import ABSENT
from hicache.types import PageIndices, Tier


class Fills:
    """The fills of one tree; iterates over the nodes that have any. `split` is the tree's."""

    def __init__(self, ledger: Ledger, split: Callable[[Node, int], Node]) -> None:
        self._ledger = ledger
        self._split = split
        self._of: dict[Node, list[Fill]] = {}

    def begin(self, tier: Tier, nodes: Sequence[Node], pages: PageIndices) -> Fill:
        """Nodes start to receive a copy on `tier`. `pages` are the destination pages of all of them, in
        order (none for storage). Sources are pinned until the fill is committed or aborted."""
        fill = Fill(tier, list(nodes))
        at = 0
        for node in nodes:
            upto = at + page_count(node)
            if tier is Tier.DEVICE:
                self._begin_on_device(node, pages[at:upto].copy())
            else:
                node.residency.begin_fill(tier)
                if tier is Tier.HOST:
                    self._ledger.entered(node, tier)
                    node.host_pages = pages[at:upto].copy()
            self._of.setdefault(node, []).append(fill)
            self._ledger.refresh(node)
            at = upto
        return fill

    def _begin_on_device(self, node: Node, pages: PageIndices) -> None:
        parent = parent_of(node)
        if not parent.is_root and parent.residency[Tier.DEVICE] is ABSENT:
            raise ProtocolError("a page cannot be loaded before its ancestors")
        node.residency.begin_fill(Tier.DEVICE)
        self._ledger.entered(node, Tier.DEVICE)
        node.device_pages = pages
        parent.device_children += 1
        self._ledger.refresh_parent(node)

    def commit(self, fill: Fill) -> None:
        """The copy arrived, and what it continues did too (`fill.doomed` is not set)."""
        if fill.doomed:
            raise ProtocolError("the pages before this copy did not arrive: abort it")
        for node in fill.nodes:
            node.residency.commit_fill(fill.tier)
            self._end(node, fill)

    def commit_store(self, fill: Fill, stored_pages: int) -> None:
        """The first `stored_pages` pages of a storage fill are stored, the rest is not."""
        for node in list(fill.nodes):
            count = page_count(node)
            if 0 < stored_pages < count:
                upper = self._split(node, stored_pages)
                upper.residency.commit_fill(fill.tier)
                self._end(upper, fill)
                count, stored_pages = count - stored_pages, 0
            if stored_pages >= count:
                node.residency.commit_fill(fill.tier)
            else:
                node.residency.abort_fill(fill.tier)
            stored_pages = max(stored_pages - count, 0)
            self._end(node, fill)

    def abort(self, fill: Fill) -> PageIndices:
        """The copy did not arrive. Returns the destination pages, which nobody owns any more."""
        freed: list[PageIndices | None] = []
        for node in reversed(fill.nodes):
            node.residency.abort_fill(fill.tier)
            if fill.tier is Tier.DEVICE:
                freed.append(node.device_pages)
                node.device_pages = None
                parent_of(node).device_children -= 1
                self._doom_below(node, fill)
            elif fill.tier is Tier.HOST:
                freed.append(node.host_pages)
                node.host_pages = None
            self._end(node, fill)
            self._ledger.refresh_parent(node)
        return joined(freed)

    def _doom_below(self, node: Node, aborted: Fill) -> None:
        for child in (node.children or {}).values():
            for fill in self.of(child):
                if fill.tier is Tier.DEVICE and fill is not aborted:
                    fill.doomed = True

    def _end(self, node: Node, fill: Fill) -> None:
        fills = self._of[node]
        fills.remove(fill)
        if not fills:
            del self._of[node]
        self._ledger.refresh(node)

    def was_split(self, upper: Node, node: Node) -> None:
        """`upper` is a new node with the head of `node`: what `node` receives, both do."""
        for fill in self.of(node):
            fill.nodes.insert(fill.nodes.index(node), upper)
            self._of.setdefault(upper, []).append(fill)

    def of(self, node: Node) -> Sequence[Fill]:
        return self._of.get(node, ())

    def __iter__(self) -> Iterator[Node]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)
