"""The ledger's two tables, row by row."""

from __future__ import annotations

import numpy as np

from hicache.tree.ledger import Share
from hicache.tree.node import Node
from hicache.tree.radix_tree import RadixTree
from hicache.types import PageIndices, PrefixKey, Tier

PAGES = np.arange(10, dtype=np.int32)


def tree_of_two() -> tuple[RadixTree, Node, Node]:
    """Page size 1; a node of three pages with one of two pages below it, on the device."""
    tree = RadixTree(1)
    lower = tree.insert(PrefixKey.of([1, 2, 3, 4, 5]), PAGES[:5]).node
    assert lower is not None
    return tree, tree.split(lower, 3), lower


def backed(tree: RadixTree, node: Node, pages: PageIndices = PAGES) -> None:
    tree.fills.commit(tree.fills.begin(Tier.HOST, [node], pages[: len(node.key) // 4]))


def shares(tree: RadixTree, tier: Tier) -> tuple[int, int, int]:
    """Evictable, protected and in-flight pages."""
    evictable, protected, in_flight = (
        tree.ledger.pages(tier, share) for share in (Share.EVICTABLE, Share.PROTECTED, Share.IN_FLIGHT)
    )
    return evictable, protected, in_flight


def orders(tree: RadixTree, node: Node) -> tuple[bool, bool, bool]:
    ledger = tree.ledger
    return node in ledger.device, node in ledger.mirrors, node in ledger.host_leaves


def test_only_the_last_device_copy_of_a_path_may_go() -> None:
    tree, upper, lower = tree_of_two()
    assert shares(tree, Tier.DEVICE) == (5, 0, 0)
    assert orders(tree, upper) == (False, False, False) and orders(tree, lower) == (True, False, False)
    tree.drop_device(lower)
    assert orders(tree, upper) == (True, False, False) and shares(tree, Tier.DEVICE) == (3, 0, 0)


def test_locked_device_copies_are_protected() -> None:
    tree, upper, lower = tree_of_two()
    receipt = tree.lock(upper)
    assert shares(tree, Tier.DEVICE) == (2, 3, 0) and orders(tree, lower)[0]
    both = tree.lock(lower)
    assert shares(tree, Tier.DEVICE) == (0, 5, 0) and not orders(tree, lower)[0]
    tree.unlock(receipt)
    assert shares(tree, Tier.DEVICE) == (0, 5, 0)
    tree.unlock(both)
    assert shares(tree, Tier.DEVICE) == (5, 0, 0) and orders(tree, lower)[0]


def test_both_ends_of_a_backup_are_in_flight() -> None:
    tree, _, lower = tree_of_two()
    fill = tree.fills.begin(Tier.HOST, [lower], PAGES[:2])
    assert shares(tree, Tier.DEVICE) == (3, 0, 2) and shares(tree, Tier.HOST) == (0, 0, 2)
    assert orders(tree, lower) == (False, False, False)
    receipt = tree.lock(lower)
    assert shares(tree, Tier.DEVICE) == (0, 5, 0)
    tree.unlock(receipt)
    tree.fills.commit(fill)
    assert shares(tree, Tier.DEVICE) == (5, 0, 0) and shares(tree, Tier.HOST) == (2, 0, 0)
    assert orders(tree, lower) == (True, True, False)


def test_both_ends_of_a_load_are_in_flight_and_hold_the_parent() -> None:
    tree, upper, lower = tree_of_two()
    backed(tree, lower)
    tree.drop_device(lower)
    fill = tree.fills.begin(Tier.DEVICE, [lower], PAGES[:2])
    assert shares(tree, Tier.DEVICE) == (3, 0, 2) and shares(tree, Tier.HOST) == (0, 0, 2)
    assert not orders(tree, upper)[0]
    tree.fills.abort(fill)
    assert shares(tree, Tier.DEVICE) == (3, 0, 0) and orders(tree, upper)[0]
    assert orders(tree, lower) == (False, False, True)


def test_a_host_copy_without_device_copy_goes_only_from_a_leaf_and_unlocked() -> None:
    tree, upper, lower = tree_of_two()
    backed(tree, upper)
    backed(tree, lower)
    tree.drop_device(lower)
    tree.drop_device(upper)
    assert shares(tree, Tier.HOST) == (5, 0, 0)
    assert orders(tree, upper) == (False, False, False) and orders(tree, lower) == (False, False, True)
    receipt = tree.lock(lower)
    assert shares(tree, Tier.HOST) == (0, 5, 0) and orders(tree, lower) == (False, False, False)
    tree.unlock(receipt)
    tree.drop_host(lower)
    assert orders(tree, upper) == (False, False, True) and shares(tree, Tier.HOST) == (3, 0, 0)


def test_a_pinned_host_copy_is_in_flight() -> None:
    tree, _, lower = tree_of_two()
    backed(tree, lower)
    tree.pin_host([lower], 1)
    assert shares(tree, Tier.HOST) == (0, 0, 2) and orders(tree, lower) == (True, False, False)
    tree.pin_host([lower], -1)
    assert shares(tree, Tier.HOST) == (2, 0, 0) and orders(tree, lower) == (True, True, False)


def test_a_match_moves_a_node_to_the_recent_end() -> None:
    tree = RadixTree(1)
    for token in (1, 2, 3):
        tree.insert(PrefixKey.of([token]), PAGES[token : token + 1])
    tree.match(PrefixKey.of([1]))
    first = tree.ledger.device.first()
    assert first is not None and first.key == PrefixKey.of([2]).data
