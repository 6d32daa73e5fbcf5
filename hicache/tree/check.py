"""The tree's invariants, each a named function that raises IntegrityError with the node it broke on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hicache.errors import IntegrityError
from hicache.tree.ledger import Share, classify
from hicache.tree.node import Node
from hicache.tree.plans import page_count
from hicache.tree.radix_tree import RadixTree
from hicache.tree.residency import ABSENT, FILLING, RESIDENT, SOURCE
from hicache.types import Tier


def pins_are_resident(tree: RadixTree) -> None:
    for node in tree.nodes():
        for tier in Tier:
            pins = node.residency.pins[tier]
            _require(pins >= 0 and (not pins or node.residency[tier] is RESIDENT), "a pinned copy is not there", node)


def fills_are_in_flight(tree: RadixTree) -> None:
    """FILLING exactly while one live fill covers the node, and its source is pinned at least that often."""
    for node in tree.nodes():
        fills = tree.fills.of(node)
        filling = {tier for tier in Tier if node.residency[tier] is FILLING}
        _require(sorted(fill.tier for fill in fills) == sorted(filling), "fills and states differ", node)
        needed = Counter(SOURCE[tier] for tier in filling)
        for source, count in needed.items():
            _require(node.residency.pins[source] >= count, "the source of a copy is not pinned", node)
        for fill in fills:
            _require(fill.nodes.count(node) == 1, "a fill lists the node not exactly once", node)
    for node in tree.fills:
        _require(node.alive, "a copy in flight belongs to a dead node", node)


def device_is_prefix_closed(tree: RadixTree) -> None:
    for node in tree.nodes():
        parent = node.parent
        if parent is None or parent.is_root or node.residency[Tier.DEVICE] is ABSENT:
            continue
        doomed = any(fill.doomed for fill in tree.fills.of(node) if fill.tier is Tier.DEVICE)
        above = parent.residency[Tier.DEVICE]
        fine = above is RESIDENT or (node.residency[Tier.DEVICE] is FILLING and (above is FILLING or doomed))
        _require(fine, "a device copy has no device copy above it", node)


def copies_exist(tree: RadixTree) -> None:
    """Every node has a readable copy on the device or the host, so the union is prefix-closed."""
    for node in tree.nodes():
        _require(node.residency.on_device or node.residency.on_host, "a node without any copy", node)
        for tier, pages in ((Tier.DEVICE, node.device_pages), (Tier.HOST, node.host_pages)):
            _require((pages is None) == (node.residency[tier] is ABSENT), "pages and states differ", node)
            _require(pages is None or len(pages) * tree.page_bytes == len(node.key), "pages and key differ", node)
            _require(pages is None or pages.base is None, "a node holds a view of someone's array", node)


def locks_are_closed(tree: RadixTree) -> None:
    for node in tree.nodes():
        parent = node.parent
        _require(node.lock_ref >= 0, "a negative lock count", node)
        if parent is not None and not parent.is_root:
            _require(parent.lock_ref >= node.lock_ref, "a lock does not cover the ancestors", node)


def links_are_consistent(tree: RadixTree) -> None:
    for node in [*tree.roots.values(), *tree.nodes()]:
        children = list((node.children or {}).items())
        on_device = sum(child.residency[Tier.DEVICE] is not ABSENT for _, child in children)
        _require(node.device_children == on_device, "the count of device children is off", node)
        _require(node.is_root <= bool(children), "an empty root is kept", node)
        for first, child in children:
            linked = child.parent is node and child.alive and child.key.startswith(first)
            _require(linked and len(first) == tree.page_bytes, "a child is filed under another key", child)


def ledger_is_true(tree: RadixTree) -> None:
    """Counters and orders equal recomputed ones."""
    ledger, pages = tree.ledger, Counter[tuple[Tier, int]]()
    members: dict[int, int] = Counter()
    for node in tree.nodes():
        listed = classify(node)
        _require(node.listed == listed, f"counted as {node.listed}, is {listed}", node)
        pages[Tier.DEVICE, listed & 3] += page_count(node)
        pages[Tier.HOST, listed >> 2 & 3] += page_count(node)
        for flag, order in ledger.orders:
            members[flag] += bool(listed & flag)
            _require((node in order) == bool(listed & flag), "an eviction order is wrong about the node", node)
    for flag, order in ledger.orders:
        if len(order) != members[flag]:
            raise IntegrityError(f"an eviction order holds {len(order)} entries, {members[flag]} are evictable")
    for tier in (Tier.DEVICE, Tier.HOST):
        for share in (Share.EVICTABLE, Share.PROTECTED, Share.IN_FLIGHT):
            counted, real = ledger.pages(tier, share), pages[tier, share]
            if counted != real:
                raise IntegrityError(f"{tier.name} {share.name}: {counted} pages counted, {real} there")


INVARIANTS: tuple[Callable[[RadixTree], None], ...] = (
    pins_are_resident,
    fills_are_in_flight,
    device_is_prefix_closed,
    copies_exist,
    locks_are_closed,
    links_are_consistent,
    ledger_is_true,
)


def check_tree(tree: RadixTree) -> None:
    """Raise IntegrityError if any invariant of the tree does not hold. O(size of the tree)."""
    for invariant in INVARIANTS:
        invariant(tree)


def _require(holds: bool, what: str, node: Node) -> None:
    if not holds:
        states = "/".join(state.value for state in node.residency.states)
        raise IntegrityError(
            f"{what}: node of {page_count(node)} pages, {states}, lock_ref {node.lock_ref}, tick {node.tick}"
        )
