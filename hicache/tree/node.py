"""One edge of the radix tree: a run of whole pages, and where their copies are."""

from __future__ import annotations

from collections.abc import Iterator

from hicache.errors import ProtocolError
from hicache.policies.retention import Retention
from hicache.tree.residency import RESIDENT, Residency
from hicache.types import PageIndices


class Node:
    """Tokens, pages and access history of one run of pages.

    Arrays are owned copies, never views, so that a node keeps nothing else alive. Only the tree
    writes to a node; policies read the history fields.
    """

    __slots__ = (
        "alive",
        "awaited",
        "children",
        "created",
        "device_children",
        "device_pages",
        "digests",
        "from_storage",
        "hits",
        "host_pages",
        "key",
        "listed",
        "lock_ref",
        "parent",
        "priority",
        "residency",
        "retention",
        "start",
        "tick",
    )

    def __init__(self, parent: Node | None, key: bytes, tick: int, start: int = 0) -> None:
        self.parent = parent
        self.key = key
        self.start = start  # tokens before it
        self.children: dict[bytes, Node] | None = None
        self.device_children = 0  # children with a copy on the device, arriving or there
        self.device_pages: PageIndices | None = None
        self.host_pages: PageIndices | None = None
        self.digests: bytes | None = None  # of its pages on storage, 32 bytes each, once they were needed
        self.residency = Residency()
        self.lock_ref = 0
        self.tick = tick
        self.created = tick
        self.hits = 0
        self.priority = 0
        self.awaited = 0  # requests that wait and will hit it
        self.retention: Retention | None = None
        self.from_storage = False  # its host copy came from storage and has not been counted as a hit yet
        self.listed = 0  # what the ledger counted it as, see tree.ledger
        self.alive = True

    @property
    def lowest(self) -> int:
        """The lowest tier with a copy that is readable; the device if none is."""
        states = self.residency.states
        return 2 if states[2] is RESIDENT else int(states[1] is RESIDENT)

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def child(self, first_page: bytes) -> Node | None:
        return self.children.get(first_page) if self.children else None

    def path(self) -> list[Node]:
        """Nodes from below the root down to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def subtree(self) -> Iterator[Node]:
        """This node and everything below it, parents first."""
        todo = [self]
        while todo:
            node = todo.pop()
            yield node
            if node.children:
                todo.extend(node.children.values())


def parent_of(node: Node) -> Node:
    """Raises ProtocolError for a root, which has none."""
    if node.parent is None:
        raise ProtocolError("the root of a namespace has no pages")
    return node.parent
