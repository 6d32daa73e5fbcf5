"""The radix tree: longest cached prefix, insertion, locks, cuts, and what leaves it. Copies in flight: `fills`.

Token ids are kept once, as int32 bytes. A child is found by the bytes of its first page; a whole
node is compared by one memcmp without copying; only a partial match looks for the diverging page.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from hicache.errors import ProtocolError
from hicache.hashing import DIGEST_BYTES, page_digests
from hicache.policies.base import Remembered
from hicache.tree.fills import Fills
from hicache.tree.ledger import IN_AN_ORDER, Ledger
from hicache.tree.node import Node, parent_of
from hicache.tree.plans import InsertResult, LockReceipt, PrefixMatch, page_count
from hicache.tree.residency import ABSENT, FILLING, RESIDENT
from hicache.types import TOKEN_BYTES, PageIndices, PrefixKey, Tier, no_pages


class RadixTree:
    """Who has which pages, for which tokens, on which tiers. Single-threaded by contract.

    The tree never allocates or frees a page: callers hand pages in, and get back what is no longer needed.
    """

    def __init__(
        self,
        page_size: int,
        device_eviction: str = "lru",
        host_eviction: str = "lru",
        queue_aware: Collection[Tier] = (),
    ) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.queue_aware = frozenset(queue_aware)
        self.ledger = Ledger(device_eviction, host_eviction, queue_aware)
        self._roots: dict[bytes, Node] = {}
        self.fills = Fills(self.ledger, self.split)
        self._tick = 0

    # ---- lookup -----------------------------------------------------------------------------

    def match(self, key: PrefixKey, hit: bool = True) -> PrefixMatch:
        """Longest cached prefix of `key`, in whole pages. Splits the node in which the match ends.

        With `hit` it counts as a use of these pages; without, use `count_hit` when they are used.
        """
        self._tick += 1
        root = self._roots.get(key.namespace)
        if root is None:
            return PrefixMatch(key, (), 0, 0, 0)
        path, matched = self._walk(root, key.data, hit)
        device_nodes = device_bytes = 0
        for node in path:
            if node.residency.states[0] is not RESIDENT:
                break
            device_nodes += 1
            device_bytes += len(node.key)
        device_len = device_bytes // TOKEN_BYTES
        return PrefixMatch(key, tuple(path), device_nodes, device_len, matched // TOKEN_BYTES - device_len)

    def count_hit(self, node: Node | None) -> None:
        """The prefix that ends with `node` is used."""
        for step in node.path() if node is not None else ():
            step.hits += 1
            if step.listed & IN_AN_ORDER:
                self.ledger.touch(step)

    def _walk(self, node: Node, data: bytes, hit: int = 0) -> tuple[list[Node], int]:
        """Nodes whose keys make up the longest known prefix of `data`, touched; and its bytes."""
        page_bytes, tick, touch = self.page_bytes, self._tick, self.ledger.touch
        end = len(data) // page_bytes * page_bytes
        offset = 0
        path: list[Node] = []
        while offset < end and node.children:
            child = node.children.get(data[offset : offset + page_bytes])
            if child is None:
                break
            whole = data.startswith(child.key, offset)
            if not whole:
                child = self.split(child, self._common_pages(child.key, data, offset, end))
            child.tick = tick
            child.hits += hit
            if child.listed & IN_AN_ORDER:
                touch(child)
            path.append(child)
            offset += len(child.key)
            if not whole:
                break
            node = child
        return path, offset

    def _common_pages(self, have: bytes, data: bytes, offset: int, end: int) -> int:
        count = min(len(have), end - offset) // TOKEN_BYTES
        differs = np.frombuffer(have, np.int32, count) != np.frombuffer(data, np.int32, count, offset)
        first = int(differs.argmax()) if differs.any() else count
        return first // self.page_size

    def nodes(self) -> Iterator[Node]:
        """Every node below the roots, parents first."""
        for root in self._roots.values():
            for node in root.subtree():
                if node is not root:
                    yield node

    @property
    def roots(self) -> dict[bytes, Node]:
        return self._roots

    @property
    def tick(self) -> int:
        """The logical clock: one tick per match or insertion."""
        return self._tick

    def namespace_of(self, node: Node) -> bytes:
        while node.parent is not None:
            node = node.parent
        return node.key

    # ---- insertion --------------------------------------------------------------------------

    def insert(self, key: PrefixKey, pages: PageIndices, owned_from: int = 0, priority: int = 0) -> InsertResult:
        """Give the tree the device pages of a computed prefix.

        `pages[i]` holds page i of `key`; those before page `owned_from` are the tree's already, the
        others are the caller's. Of the caller's pages the tree adopts those it lacks on the device;
        where it has its own, the caller's come back as duplicates. Insertion stops where a device copy is
        still arriving: from there on, and from `owned_from` on at least, the caller keeps its pages.
        """
        self._tick += 1
        root = self._root(key.namespace)
        path, matched = self._walk(root, key.data)
        page_bytes, at = self.page_bytes, 0
        spare: list[PageIndices] = []
        adopted: list[Node] = []
        for index, node in enumerate(path):
            upto = at + len(node.key) // page_bytes
            state = node.residency.states[0]
            if state is RESIDENT:
                if upto > owned_from:
                    spare.append(pages[max(at, owned_from) : upto])
            elif state is FILLING:
                known = path[:index] if at >= owned_from else self._head(path, owned_from)
                return self._inserted(root, known, max(at, owned_from), spare, adopted)
            else:
                if at < owned_from:
                    raise ProtocolError(f"page {at} was said to be the tree's, but it has left the device")
                self.ledger.entered(node, Tier.DEVICE)
                self._adopt_device(node, pages[at:upto].copy())
                adopted.append(node)
            if priority > node.priority:
                self._raise_priority(node, priority)
            at = upto
        end = len(key.data) // page_bytes * page_bytes
        if matched < end:
            leaf = self._add_child(path[-1] if path else root, key.data[matched:end], matched)
            leaf.priority = priority
            at = end // page_bytes
            recalled = self.ledger.entered(leaf, Tier.DEVICE)
            if recalled and sum(part.size for part in recalled) >= len(leaf.key):
                leaf.hits = recalled[-1].hits
            self._adopt_device(leaf, pages[matched // page_bytes : at].copy())
            new = self._cut_known(leaf, recalled) if recalled else [leaf]
            path += new
            adopted += new
        return self._inserted(root, path, at, spare, adopted)

    def _head(self, path: list[Node], num_pages: int) -> list[Node]:
        """The leading nodes of `path` that make up `num_pages` pages."""
        end = 0
        for index, node in enumerate(path):
            if end == num_pages * self.page_bytes:
                return path[:index]
            end += len(node.key)
        return path

    def _raise_priority(self, node: Node, priority: int) -> None:
        node.priority = priority
        if node.listed & IN_AN_ORDER:
            self.ledger.touch(node)

    def _inserted(
        self, root: Node, path: list[Node], num_pages: int, spare: list[PageIndices], adopted: list[Node]
    ) -> InsertResult:
        self._prune_root(root)
        duplicates = np.concatenate(spare) if spare else no_pages()
        return InsertResult(path[-1] if path else None, tuple(path), num_pages, duplicates, tuple(adopted))

    def insert_host(self, key: PrefixKey, first_page: int, host_pages: PageIndices) -> PageIndices:
        """Give the tree host pages read from storage: pages `first_page`, ... of `key`.

        Returns those it does not need (already there), or all of them if the prefix before
        `first_page` is gone: a page without its ancestors could never be reached.
        """
        self._tick += 1
        stop = first_page + len(host_pages)
        data = key.data[: stop * self.page_bytes]
        root = self._root(key.namespace)
        path, matched = self._walk(root, data)
        if matched < first_page * self.page_bytes:
            self._prune_root(root)
            return host_pages
        at, spare = 0, list[PageIndices]()
        for node in path:
            upto = at + page_count(node)
            if upto > first_page:
                mine = host_pages[max(at - first_page, 0) : upto - first_page]
                if at >= first_page and node.residency[Tier.HOST] is ABSENT:
                    self._adopt_host(node, mine.copy())
                else:
                    spare.append(mine)
            at = upto
        if matched < len(data):
            leaf = self._add_child(path[-1] if path else root, data[matched:], matched)
            self._adopt_host(leaf, host_pages[matched // self.page_bytes - first_page :].copy())
            leaf.from_storage = True
        self._prune_root(root)
        return np.concatenate(spare) if spare else no_pages()

    def _add_child(self, parent: Node, key: bytes, offset: int) -> Node:
        node = Node(parent, key, self._tick, offset // TOKEN_BYTES)
        if parent.children is None:
            parent.children = {}
        parent.children[key[: self.page_bytes]] = node
        return node

    def _cut_known(self, leaf: Node, known: Sequence[Remembered]) -> list[Node]:
        """Cut a new leaf where what is remembered of its content changes; the hits of each part go on from there."""
        nodes, size = list[Node](), 0
        for index, (more, hits) in enumerate(known):
            size += more
            if index + 1 < len(known) and known[index + 1].hits == hits:
                continue
            if 0 < size < len(leaf.key):
                nodes.append(self.split(leaf, size // self.page_bytes))
                nodes[-1].hits = hits
            size = 0
        return [*nodes, leaf]

    def _adopt_device(self, node: Node, pages: PageIndices) -> None:
        parent = parent_of(node)
        node.device_pages = pages
        node.residency.adopt(Tier.DEVICE)
        parent.device_children += 1
        self.ledger.refresh(node)
        if not parent.is_root:
            self.ledger.refresh(parent)

    def _adopt_host(self, node: Node, pages: PageIndices) -> None:
        self.ledger.entered(node, Tier.HOST)
        node.host_pages = pages
        node.residency.adopt(Tier.HOST)
        if node.residency[Tier.STORAGE] is ABSENT:
            node.residency.adopt(Tier.STORAGE)
        self.ledger.refresh(node)
        self.ledger.refresh_parent(node)

    def _root(self, namespace: bytes) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, namespace, self._tick)
        return root

    def _prune_root(self, root: Node) -> None:
        if not root.children:
            self._roots.pop(root.key, None)

    # ---- locks ------------------------------------------------------------------------------

    def lock(self, node: Node | None) -> LockReceipt:
        """Keep the device copies from `node` up to the root; None locks nothing."""
        if node is not None and not node.alive:
            raise ProtocolError("the match was evicted before it was locked")
        self._add_lock(node, 1)
        return LockReceipt(node)

    def unlock(self, receipt: LockReceipt) -> None:
        if receipt.released:
            raise ProtocolError("a lock receipt was given back twice")
        receipt.released = True
        self._add_lock(receipt.node, -1)

    def _add_lock(self, node: Node | None, by: int) -> None:
        refresh = self.ledger.refresh
        while node is not None and node.parent is not None:
            was = node.lock_ref
            node.lock_ref = was + by
            if not was or not node.lock_ref:
                refresh(node)
            node = node.parent

    # ---- splitting --------------------------------------------------------------------------

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut `node` after `num_pages` pages; returns the new upper half. `node` becomes the lower one.

        Both halves inherit the state on every tier, pins, locks, history, and the copies in flight.
        """
        cut = num_pages * self.page_bytes
        if not 0 < cut < len(node.key):
            raise ProtocolError(f"a node of {len(node.key) // self.page_bytes} pages cannot be cut at {num_pages}")
        self.ledger.forget(node)
        parent = parent_of(node)
        upper = Node(parent, node.key[:cut], node.tick, node.start)
        upper.created, upper.hits, upper.priority = node.created, node.hits, node.priority
        upper.lock_ref, upper.from_storage = node.lock_ref, node.from_storage
        upper.awaited, upper.retention = node.awaited, node.retention
        upper.residency = node.residency.split()
        _assert_children(parent)[upper.key[: self.page_bytes]] = upper
        node.key, node.parent = node.key[cut:], upper
        node.start += cut // TOKEN_BYTES
        upper.children = {node.key[: self.page_bytes]: node}
        upper.device_children = int(node.residency.states[0] is not ABSENT)
        upper.device_pages, node.device_pages = _cut(node.device_pages, num_pages)
        upper.host_pages, node.host_pages = _cut(node.host_pages, num_pages)
        if node.digests is not None:
            at = num_pages * DIGEST_BYTES
            upper.digests, node.digests = node.digests[:at], node.digests[at:]
        self.fills.was_split(upper, node)
        self.ledger.refresh(upper)
        self.ledger.refresh(node)
        return upper

    def coalesce(self, nodes: Sequence[Node]) -> None:
        """Undo splits above `nodes` that no longer matter: halves with the same history and the same copies."""
        for node in nodes:
            while node.alive and node.parent is not None and self._are_one(node.parent, node):
                self._merge(node.parent, node)

    def _are_one(self, upper: Node, lower: Node) -> bool:
        return (
            not upper.is_root
            and len(upper.children or ()) == 1
            and upper.tick == lower.tick
            and upper.lock_ref == lower.lock_ref  # so no receipt ends at the upper one
            and upper.priority == lower.priority
            and upper.awaited == lower.awaited  # so no waiting request's match ends at the upper one
            and upper.retention == lower.retention
            and upper.from_storage == lower.from_storage
            and upper.residency.is_settled_like(lower.residency)
        )

    def _merge(self, upper: Node, lower: Node) -> None:
        """`lower` takes over its only parent's pages and place; `upper` leaves the tree."""
        self.ledger.forget(upper)
        self.ledger.forget(lower)
        parent = parent_of(upper)
        _assert_children(parent)[upper.key[: self.page_bytes]] = lower
        upper.alive = False
        lower.parent, lower.key, lower.start = parent, upper.key + lower.key, upper.start
        lower.device_pages = _glued(upper.device_pages, lower.device_pages)
        lower.host_pages = _glued(upper.host_pages, lower.host_pages)
        both = upper.digests is not None and lower.digests is not None
        lower.digests = (upper.digests or b"") + (lower.digests or b"") if both else None
        lower.created = min(upper.created, lower.created)
        self.ledger.refresh(lower)

    # ---- pins -------------------------------------------------------------------------------

    def pin_host(self, nodes: Sequence[Node], by: int) -> None:
        """Keep (+1) or release (-1) the host copies of `nodes` while room is made for their load."""
        for node in nodes:
            if by > 0:
                node.residency.pin(Tier.HOST)
            else:
                node.residency.unpin(Tier.HOST)
            self.ledger.refresh(node)

    # ---- dropping ---------------------------------------------------------------------------

    def drop_device(self, node: Node) -> PageIndices:
        """Take the device copy of an unlocked node without copies below it; returns its pages.

        Without a host copy the node leaves the tree, so nothing may be below it.
        """
        if node.lock_ref or node.device_children or (node.children and not node.residency.on_host):
            raise ProtocolError("a device copy that others need cannot be dropped")
        node.residency.drop(Tier.DEVICE)
        self.ledger.dropped(node, Tier.DEVICE)
        pages, node.device_pages = node.device_pages, None
        parent_of(node).device_children -= 1
        self._settle(node)
        return no_pages() if pages is None else pages

    def drop_host(self, node: Node) -> PageIndices:
        """Take the host copy of a node; returns its pages. Without a device copy the node leaves the tree."""
        if not node.residency.on_device and (node.children or node.lock_ref):
            raise ProtocolError("a host copy that others need cannot be dropped")
        node.residency.drop(Tier.HOST)
        self.ledger.dropped(node, Tier.HOST)
        pages, node.host_pages = node.host_pages, None
        self._settle(node)
        return no_pages() if pages is None else pages

    def drop_storage(self, node: Node) -> None:
        """Forget that storage has the pages."""
        node.residency.drop(Tier.STORAGE)

    def _settle(self, node: Node) -> None:
        """Recount a node that lost a copy, or unlink it if it was the last one."""
        parent = parent_of(node)
        if node.device_pages is None and node.host_pages is None:
            del _assert_children(parent)[node.key[: self.page_bytes]]
            node.alive = False
            if parent.is_root:
                self._prune_root(parent)
        else:
            self.ledger.refresh(node)
        self.ledger.refresh_parent(node)

    # ---- names on storage -------------------------------------------------------------------

    def digests(self, node: Node, seed: bytes) -> bytes:
        """Digests of the node's pages, 32 bytes each; computed once per page. `seed` starts the chain."""
        missing = []
        at: Node | None = node
        while at is not None and at.parent is not None and at.digests is None:
            missing.append(at)
            at = at.parent
        last = at.digests[-DIGEST_BYTES:] if at is not None and at.digests else seed
        for step in reversed(missing):
            step.digests = b"".join(page_digests(last, step.key, self.page_size))
            last = step.digests[-DIGEST_BYTES:]
        return node.digests or b""


def _assert_children(node: Node) -> dict[bytes, Node]:
    if node.children is None:
        raise ProtocolError("a parent without children")
    return node.children


def _cut(pages: PageIndices | None, at: int) -> tuple[PageIndices | None, PageIndices | None]:
    if pages is None:
        return None, None
    return pages[:at].copy(), pages[at:].copy()


def _glued(upper: PageIndices | None, lower: PageIndices | None) -> PageIndices | None:
    return None if upper is None or lower is None else np.concatenate([upper, lower])
