"""Waiting requests and retention: what they wish is kept longer, through splits, merges and evictions."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.errors import ConfigError
from hicache.policies.retention import DEFAULT_PRIORITY, Retention, retention_range
from hicache.tree.node import Node
from hicache.tree.radix_tree import RadixTree
from hicache.tree.wishes import Expectations, retain
from hicache.types import PrefixKey, Tier


def tree_with(*prompts: list[int], eviction: str = "lru", queue_aware: bool = False) -> RadixTree:
    """Page size 1, everything on the device, in this order."""
    tree, page = RadixTree(1, eviction, "lru", [Tier.DEVICE] if queue_aware else []), 0
    for tokens in prompts:
        tree.insert(PrefixKey.of(tokens), np.arange(page, page + len(tokens), dtype=np.int32))
        page += len(tokens)
    return tree


def victims(tree: RadixTree) -> list[int]:
    """The first token of every node, as they go."""
    order, gone = tree.ledger.device, list[int]()
    while (victim := order.first()) is not None:
        gone.append(int(PrefixKey(victim.key).tokens()[0]))
        tree.drop_device(victim)
    return gone


def nodes(tree: RadixTree) -> list[Node]:
    return list(tree.nodes())


def test_what_is_awaited_goes_last() -> None:
    tree = tree_with([1, 2], [3, 4], [5, 6], queue_aware=True)
    expected = Expectations(tree)
    expected.expect("a", PrefixKey.of([1, 2, 9]))
    assert victims(tree) == [3, 5, 1]


def test_a_request_that_waits_no_more_leaves_no_trace() -> None:
    tree = tree_with([1, 2], [3, 4], queue_aware=True)
    expected = Expectations(tree)
    expected.expect("a", PrefixKey.of([1, 2]))
    expected.expect("a", PrefixKey.of([3, 4]))  # in place of the first
    assert [node.awaited for node in nodes(tree)] == [1, 0] and len(expected) == 1
    expected.end("a")
    expected.end("a")
    assert [node.awaited for node in nodes(tree)] == [0, 0] and not len(expected)
    assert victims(tree) == [1, 3]


def test_counts_survive_splits_and_evictions() -> None:
    tree = tree_with([1, 2, 3, 4], queue_aware=True)
    expected = Expectations(tree)
    expected.expect("a", PrefixKey.of([1, 2, 3, 4]))
    expected.expect("b", PrefixKey.of([1, 2]))  # cuts the node
    assert [(node.awaited, node.start) for node in nodes(tree)] == [(2, 0), (1, 2)]
    tree.match(PrefixKey.of([1, 2, 3, 4]), hit=False)  # the same last use for both
    tree.coalesce(nodes(tree))
    assert len(nodes(tree)) == 2, "b's match ends between them"
    victim = tree.ledger.device.first()
    assert victim is not None
    tree.drop_device(victim)
    expected.end("a")
    expected.end("b")
    assert [node.awaited for node in nodes(tree)] == [0]


def test_nothing_is_expected_of_what_is_not_there() -> None:
    tree = tree_with([1], queue_aware=True)
    expected = Expectations(tree)
    expected.expect("a", PrefixKey.of([7, 8]))
    assert not len(expected) and nodes(tree)[0].awaited == 0


def test_retention_cuts_nodes_and_keeps_the_range_longest() -> None:
    tree = tree_with([1, 2, 3, 4], [5, 6, 7], [8], eviction="retention")
    retain(tree, PrefixKey.of([1, 2, 3, 4]), [retention_range(0, 2, 90, 100.0)])
    retain(tree, PrefixKey.of([8]), [retention_range(0, None, 0, 100.0)])
    marked = {node.key: node.retention for node in nodes(tree)}
    assert marked[PrefixKey.of([1, 2]).data] == Retention(90, 100.0)
    assert marked[PrefixKey.of([3, 4]).data] is None
    assert victims(tree) == [8, 3, 5, 1]


def test_retention_decays_and_a_use_refreshes_it() -> None:
    tree = tree_with([1, 2], [3, 4], eviction="retention")
    ledger = tree.ledger
    retain(tree, PrefixKey.of([1, 2]), [retention_range(0, None, 100, 10.0)])
    ledger.advance(1.0)
    assert first_token(tree) == 3
    ledger.advance(20.0)
    tree.match(PrefixKey.of([3, 4]))
    assert first_token(tree) == 1, "its time is over, and the other was used later"
    tree.match(PrefixKey.of([1, 2]))
    assert first_token(tree) == 3, "a use starts the time anew"


def first_token(tree: RadixTree) -> int:
    victim = tree.ledger.device.first()
    assert victim is not None
    return int(PrefixKey(victim.key).tokens()[0])


def test_retention_falls_in_a_line_to_the_default() -> None:
    wish = Retention(95, 10.0)
    assert [wish.priority_at(age) for age in (0, 5, 10, 99)] == [95, 65, DEFAULT_PRIORITY, DEFAULT_PRIORITY]
    assert Retention(5, 10.0).priority_at(5) == 20


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((4, 4, 50, 1.0), "there are none, use 0 <= start < stop"),
        ((0, None, 101, 1.0), "priority 101 is not between 0 and 100"),
        ((0, None, 50, 0.0), "duration 0.0 is not a positive number of seconds"),
    ],
)
def test_a_wrong_range_is_refused(args: tuple[int, int | None, int, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        retention_range(*args)
