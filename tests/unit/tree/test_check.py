"""Every invariant notices the damage that it is there for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hicache.errors import IntegrityError
from hicache.tree.check import check_tree
from hicache.tree.node import Node
from hicache.tree.radix_tree import RadixTree
from hicache.tree.residency import ABSENT, FILLING, RESIDENT, Residency
from hicache.types import PrefixKey, Tier

PAGES = np.arange(8, dtype=np.int32)


def sound() -> tuple[RadixTree, Node, Node]:
    tree = RadixTree(1)
    lower = tree.insert(PrefixKey.of([1, 2, 3, 4]), PAGES[:4]).node
    assert lower is not None
    upper = tree.split(lower, 2)
    tree.fills.commit(tree.fills.begin(Tier.HOST, [upper, lower], PAGES[:4]))
    return tree, upper, lower


def become(node: Node, states: tuple[object, object, object], pins: tuple[int, int, int] = (0, 0, 0)) -> None:
    node.residency = Residency(states, pins)  # type: ignore[arg-type]


def lose_device_pages(tree: RadixTree, upper: Node, lower: Node) -> None:
    become(upper, (ABSENT, RESIDENT, ABSENT))
    upper.device_pages = None


def misfile(tree: RadixTree, upper: Node, lower: Node) -> None:
    upper.children = {b"\x09\0\0\0": lower}


def unlink(tree: RadixTree, upper: Node, lower: Node) -> None:
    lower.parent = None
    lower.parent = next(iter(tree.roots.values()))


def keep_an_empty_root(tree: RadixTree, upper: Node, lower: Node) -> None:
    tree.roots[b"x"] = Node(None, b"x", 0)


def a_view(tree: RadixTree, upper: Node, lower: Node) -> None:
    lower.device_pages = PAGES[:2]


def too_few_pages(tree: RadixTree, upper: Node, lower: Node) -> None:
    lower.device_pages = PAGES[:1].copy()


def dead_fill(tree: RadixTree, upper: Node, lower: Node) -> None:
    tree.fills.begin(Tier.STORAGE, [lower], PAGES[:0])
    dead = Node(None, b"", 0)
    dead.alive = False
    tree.fills.was_split(dead, lower)


DAMAGE: dict[str, tuple[str, Callable[[RadixTree, Node, Node], None]]] = {
    "pin": ("a pinned copy is not there", lambda t, u, n: become(n, (RESIDENT, ABSENT, ABSENT), (0, 1, 0))),
    "negative pin": ("a pinned copy is not there", lambda t, u, n: become(n, (RESIDENT,) * 3, (-1, 0, 0))),
    "no fill": ("fills and states differ", lambda t, u, n: become(n, (RESIDENT, FILLING, ABSENT), (1, 0, 0))),
    "dead fill": ("belongs to a dead node", dead_fill),
    "hole": ("no device copy above it", lose_device_pages),
    "view": ("a view of someone's array", a_view),
    "length": ("pages and key differ", too_few_pages),
    "no copy": ("pages and states differ", lambda t, u, n: become(n, (RESIDENT, ABSENT, ABSENT))),
    "negative lock": ("a negative lock count", lambda t, u, n: setattr(n, "lock_ref", -1)),
    "open lock": ("does not cover the ancestors", lambda t, u, n: setattr(n, "lock_ref", 1)),
    "children": ("count of device children", lambda t, u, n: setattr(u, "device_children", 2)),
    "empty root": ("an empty root is kept", keep_an_empty_root),
    "misfiled": ("filed under another key", misfile),
    "dead child": ("filed under another key", lambda t, u, n: setattr(n, "alive", False)),
    "wrong parent": ("filed under another key", unlink),
    "counted wrong": ("counted as", lambda t, u, n: setattr(n, "listed", 0)),
    "missing in an order": ("wrong about the node", lambda t, u, n: t.ledger.device.discard(n)),
    "ghost in an order": ("holds 2 entries, 1 are", lambda t, u, n: t.ledger.device.add(Node(None, b"", 0))),
}


def test_a_sound_tree_passes() -> None:
    tree, _, lower = sound()
    check_tree(tree)
    receipt = tree.lock(lower)
    tree.fills.begin(Tier.STORAGE, [lower], PAGES[:0])
    check_tree(tree)
    tree.unlock(receipt)
    check_tree(tree)
    check_tree(RadixTree(1))


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_noticed(name: str) -> None:
    message, damage = DAMAGE[name]
    tree, upper, lower = sound()
    damage(tree, upper, lower)
    with pytest.raises(IntegrityError, match=message):
        check_tree(tree)
