"""Matching, inserting, locking, cutting and dropping, case by case; the invariants are checked after each."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.errors import ProtocolError
from hicache.hashing import page_digests
from hicache.tree.check import check_tree
from hicache.tree.node import Node
from hicache.tree.plans import InsertResult
from hicache.tree.radix_tree import RadixTree
from hicache.tree.residency import ABSENT, FILLING, RESIDENT
from hicache.types import PageIndices, PrefixKey, Tier, no_pages


def pages(start: int, count: int) -> PageIndices:
    return np.arange(start, start + count, dtype=np.int32)


def grown(tree: RadixTree, tokens: list[int], first: int = 0, namespace: bytes = b"") -> InsertResult:
    """`tokens` inserted with pages first, first+1, ..."""
    return tree.insert(PrefixKey.of(tokens, namespace), pages(first, len(tokens) // tree.page_size))


def one_node(count: int = 6) -> tuple[RadixTree, Node]:
    """A tree of page size 1 with one node: tokens 0 .. count-1 on pages 0 .. count-1."""
    tree = RadixTree(1)
    node = grown(tree, list(range(count))).node
    assert node is not None
    return tree, node


def backed(tree: RadixTree, node: Node, first: int = 100) -> None:
    count = len(node.key) // tree.page_bytes
    tree.fills.commit(tree.fills.begin(Tier.HOST, [node], pages(first, count)))


def host_chain() -> tuple[RadixTree, list[Node]]:
    """Three host-only nodes of two pages each, one below the other."""
    tree = RadixTree(1)
    assert not len(tree.insert_host(PrefixKey.of(list(range(6))), 0, pages(100, 6)))
    for length in (2, 4):
        tree.match(PrefixKey.of(list(range(length))))
    return tree, list(tree.match(PrefixKey.of(list(range(6)))).path)


# ---- whole pages ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 16, 64, 512])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_only_whole_pages_are_shared(size: int, k: int, off: int) -> None:
    tree, tokens = RadixTree(size), list(range(k * size + off))
    whole = len(tokens) // size
    result = grown(tree, tokens)
    assert result.num_pages == whole
    match = tree.match(PrefixKey.of([*tokens, *range(3 * size)]))
    assert (match.device_len, match.host_hit_len) == (whole * size, 0)
    assert match.device_pages().tolist() == list(range(whole))
    for asked in {0, size - 1, size, size + 1, len(tokens)}:
        expected = min(asked, len(tokens)) // size * size
        assert tree.match(PrefixKey.of(tokens[:asked])).device_len == expected
    check_tree(tree)


@pytest.mark.parametrize("size", [1, 2, 16, 64, 512])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_a_branch_starts_at_the_page_that_differs(size: int, off: int) -> None:
    tree, tokens, at = RadixTree(size), list(range(4 * size)), 2 * size + off
    other = [*tokens[:at], *(token + 10_000 for token in tokens[at:])]
    grown(tree, tokens)
    result = grown(tree, other, first=10)
    shared = at // size
    assert result.duplicates.tolist() == list(range(10, 10 + shared))
    assert tree.match(PrefixKey.of(tokens)).device_pages().tolist() == [0, 1, 2, 3]
    expected = [*range(shared), *range(10 + shared, 14)]
    assert tree.match(PrefixKey.of(other)).device_pages().tolist() == expected
    check_tree(tree)


# ---- insertion ------------------------------------------------------------------------------


def test_pages_that_the_tree_has_come_back_from_owned_from_on() -> None:
    tree, node = one_node(4)
    result = tree.insert(PrefixKey.of(list(range(6))), pages(10, 6), owned_from=2)
    assert result.duplicates.tolist() == [12, 13]
    assert result.num_pages == 6 and result.path[0] is node
    assert [page for part in result.adopted if part.device_pages is not None for page in part.device_pages] == [14, 15]
    check_tree(tree)


def test_a_recomputed_prefix_gives_a_demoted_node_its_device_copy() -> None:
    tree, node = one_node(4)
    backed(tree, node)
    assert tree.drop_device(node).tolist() == [0, 1, 2, 3]
    result = grown(tree, [0, 1, 2, 3], first=20)
    assert result.adopted == (node,) and not len(result.duplicates)
    assert node.device_pages is not None and node.device_pages.tolist() == [20, 21, 22, 23]
    assert node.host_pages is not None and node.host_pages.tolist() == [100, 101, 102, 103]
    check_tree(tree)


def test_insertion_stops_where_a_copy_is_arriving() -> None:
    tree, (a, b, _) = host_chain()
    tree.fills.commit(tree.fills.begin(Tier.DEVICE, [a], pages(0, 2)))
    tree.fills.begin(Tier.DEVICE, [b], pages(2, 2))
    result = grown(tree, list(range(7)), first=20)
    assert result.num_pages == 2 and result.node is a and result.path == (a,)
    assert result.duplicates.tolist() == [20, 21] and result.adopted == ()
    check_tree(tree)


def test_what_was_said_to_be_the_trees_must_be_there() -> None:
    tree, node = one_node(4)
    backed(tree, node)
    tree.drop_device(node)
    with pytest.raises(ProtocolError, match="left the device"):
        tree.insert(PrefixKey.of([0, 1, 2, 3]), pages(0, 4), owned_from=2)


def test_insertion_raises_priorities_and_never_lowers_them() -> None:
    tree = RadixTree(1)
    for priority in (3, 1, 5):
        result = tree.insert(PrefixKey.of([1]), pages(0, 1), owned_from=1 if priority != 3 else 0, priority=priority)
        assert result.node is not None and result.node.priority == max(3, priority)


# ---- locks ----------------------------------------------------------------------------------


def test_a_lock_survives_splits_and_ends_once() -> None:
    tree, node = one_node()
    receipt = tree.lock(node)
    tree.split(node, 4)
    tree.match(PrefixKey.of([0, 1]))
    assert [part.lock_ref for part in tree.nodes()] == [1, 1, 1]
    assert tree.ledger.device.first() is None
    tree.unlock(receipt)
    assert [part.lock_ref for part in tree.nodes()] == [0, 0, 0]
    check_tree(tree)
    with pytest.raises(ProtocolError, match="given back twice"):
        tree.unlock(receipt)
    assert [part.lock_ref for part in tree.nodes()] == [0, 0, 0]


def test_an_evicted_match_cannot_be_locked() -> None:
    tree, node = one_node()
    match = tree.match(PrefixKey.of(list(range(6))))
    tree.drop_device(node)
    with pytest.raises(ProtocolError, match="evicted before it was locked"):
        tree.lock(match.last_device_node)


def test_nothing_can_be_locked_but_not_unlocked_twice() -> None:
    tree = RadixTree(1)
    receipt = tree.lock(None)
    tree.unlock(receipt)
    with pytest.raises(ProtocolError):
        tree.unlock(receipt)


# ---- copies in flight -----------------------------------------------------------------------


def test_both_halves_inherit_a_fill() -> None:
    tree, node = one_node(9)
    fill = tree.fills.begin(Tier.HOST, [node], pages(100, 9))
    upper = tree.split(node, 5)
    assert fill.nodes == [upper, node] and fill.num_pages == 9
    check_tree(tree)
    tree.fills.commit(fill)
    for part, host in ((upper, range(100, 105)), (node, range(105, 109))):
        assert part.residency.states == (RESIDENT, RESIDENT, ABSENT) and part.residency.pins[Tier.DEVICE] == 0
        assert part.host_pages is not None and part.host_pages.tolist() == list(host)
    assert not tree.fills
    check_tree(tree)


def test_an_abort_dooms_what_continues_it() -> None:
    tree, (a, b, c) = host_chain()
    fills = [tree.fills.begin(Tier.DEVICE, [node], pages(2 * i, 2)) for i, node in enumerate((a, b, c))]
    assert tree.fills.abort(fills[0]).tolist() == [0, 1]
    assert [fill.doomed for fill in fills] == [False, True, False]
    check_tree(tree)
    with pytest.raises(ProtocolError, match="abort it"):
        tree.fills.commit(fills[1])
    assert b.residency[Tier.DEVICE] is FILLING
    tree.fills.abort(fills[1])
    assert fills[2].doomed
    tree.fills.abort(fills[2])
    assert not tree.fills and all(node.residency.can_drop(Tier.HOST) for node in (a, b, c))
    check_tree(tree)


def test_a_page_is_not_loaded_before_its_ancestors() -> None:
    tree, (_, b, _) = host_chain()
    with pytest.raises(ProtocolError, match="before its ancestors"):
        tree.fills.begin(Tier.DEVICE, [b], pages(0, 2))
    check_tree(tree)


@pytest.mark.parametrize("stored", range(7))
def test_a_partial_store_splits(stored: int) -> None:
    tree, node = one_node()
    backed(tree, node)
    tree.fills.commit_store(tree.fills.begin(Tier.STORAGE, [node], no_pages()), stored)
    states = [part.residency.on_storage for part in tree.nodes() for _ in range(len(part.key) // 4)]
    assert states == [True] * stored + [False] * (6 - stored)
    assert not tree.fills and all(part.residency.can_drop(Tier.HOST) for part in tree.nodes())
    check_tree(tree)


# ---- dropping -------------------------------------------------------------------------------


def test_a_node_that_loses_its_last_copy_leaves_the_tree() -> None:
    tree, node = one_node(2)
    backed(tree, node)
    assert tree.drop_host(node).tolist() == [100, 101] and node.alive
    assert tree.drop_device(node).tolist() == [0, 1] and not node.alive
    assert not tree.roots


def test_device_copies_that_others_need_stay() -> None:
    tree, node = one_node(4)
    upper = tree.split(node, 2)
    with pytest.raises(ProtocolError):
        tree.drop_device(upper)
    backed(tree, node)
    tree.drop_device(node)
    with pytest.raises(ProtocolError):
        tree.drop_device(upper)  # it has no host copy, and the node below would be cut off
    backed(tree, upper, 200)
    receipt = tree.lock(upper)
    with pytest.raises(ProtocolError):
        tree.drop_device(upper)
    tree.unlock(receipt)
    assert tree.drop_device(upper).tolist() == [0, 1]
    with pytest.raises(ProtocolError):
        tree.drop_host(upper)
    assert tree.drop_host(node).tolist() == [100, 101] and not node.alive
    check_tree(tree)


def test_the_ends_of_a_copy_cannot_be_dropped() -> None:
    tree, node = one_node(2)
    tree.fills.begin(Tier.HOST, [node], pages(0, 2))
    for drop in (tree.drop_device, tree.drop_host):
        with pytest.raises(ProtocolError):
            drop(node)
    check_tree(tree)


@pytest.mark.parametrize("at", [0, 6, 7, -1])
def test_a_cut_is_inside_of_a_node(at: int) -> None:
    tree, node = one_node()
    with pytest.raises(ProtocolError, match="cannot be cut"):
        tree.split(node, at)


# ---- namespaces and memory ------------------------------------------------------------------


def test_namespaces_share_nothing() -> None:
    tree = RadixTree(1)
    names = (b"", b"a", b"b")
    for index, name in enumerate(names):
        grown(tree, [1, 2], first=10 * index, namespace=name)
    for index, name in enumerate(names):
        match = tree.match(PrefixKey.of([1, 2], name))
        assert match.device_pages().tolist() == [10 * index, 10 * index + 1]
        assert tree.namespace_of(match.path[-1]) == name
    assert tree.match(PrefixKey.of([1, 2], b"c")).path == () and set(tree.roots) == set(names)


def test_cycles_leave_nothing_behind() -> None:
    tree = RadixTree(2)
    for cycle in range(300):
        result = grown(tree, [cycle, 1, 2, 3], namespace=b"%d" % (cycle % 7))
        node = result.node
        assert node is not None and node.device_pages is not None and node.device_pages.base is None
        upper = tree.split(node, 1)
        assert all(part.device_pages is not None and part.device_pages.base is None for part in (upper, node))
        tree.fills.abort(tree.fills.begin(Tier.HOST, [upper, node], pages(0, 2)))
        tree.drop_device(node)
        tree.drop_device(upper)
    assert not tree.roots and not tree.fills and not list(tree.nodes())
    assert not any(len(order) for _, order in tree.ledger.orders)


def test_an_empty_insertion_makes_no_root() -> None:
    tree = RadixTree(2)
    result = tree.insert(PrefixKey.of([1]), no_pages())
    assert result.node is None and not tree.roots


def test_an_empty_host_insertion_makes_no_root() -> None:
    tree = RadixTree(2)
    tree.insert_host(PrefixKey.of([1, 2]), 0, no_pages())
    assert not tree.roots


# ---- storage --------------------------------------------------------------------------------


def test_host_pages_of_a_vanished_prefix_all_come_back() -> None:
    tree = RadixTree(1)
    offered = pages(100, 3)
    assert tree.insert_host(PrefixKey.of(list(range(5))), 2, offered).tolist() == [100, 101, 102]
    assert not tree.roots and not list(tree.nodes())


def test_host_pages_continue_a_prefix_and_duplicates_come_back() -> None:
    tree, node = one_node(2)
    backed(tree, node, 50)
    spare = tree.insert_host(PrefixKey.of(list(range(5))), 1, pages(100, 4))
    assert spare.tolist() == [100]
    leaf = tree.match(PrefixKey.of(list(range(5)))).path[-1]
    assert leaf.host_pages is not None and leaf.host_pages.tolist() == [101, 102, 103]
    assert leaf.residency.states == (ABSENT, RESIDENT, RESIDENT) and leaf.from_storage
    check_tree(tree)


@pytest.mark.parametrize("early", [True, False])
def test_digests_through_splits_are_those_of_the_whole_key(early: bool) -> None:
    tree, seed, tokens = RadixTree(2), b"s" * 32, list(range(16))
    node = grown(tree, tokens).node
    assert node is not None
    expected = page_digests(seed, PrefixKey.of(tokens).data, 2)
    if early:
        assert tree.digests(node, seed) == b"".join(expected)
    for at in (5, 2):
        tree.match(PrefixKey.of(tokens[: 2 * at]))
    parts = tree.match(PrefixKey.of(tokens)).path
    assert [len(part.key) // 8 for part in parts] == [2, 3, 3]
    assert tree.digests(parts[-1], seed) == b"".join(expected[5:])
    assert b"".join(tree.digests(part, seed) for part in parts) == b"".join(expected)
