from __future__ import annotations

import random

from hicache.sim.trie import BlockTrie


def test_paths_and_depths_follow_the_runs() -> None:
    trie = BlockTrie()
    assert trie.add(-1, 3) == 2
    assert trie.add(1, 2) == 4
    assert trie.path(2).tolist() == [0, 1, 2]
    assert trie.path(4).tolist() == [0, 1, 3, 4]
    assert trie.path(3).tolist() == [0, 1, 3]
    assert trie.path(-1).tolist() == []
    assert [trie.depth(block) for block in range(5)] == [1, 2, 3, 3, 4]


def test_adding_nothing_is_the_attachment_itself() -> None:
    trie = BlockTrie()
    trie.add(-1, 2)
    assert trie.add(1, 0) == 1
    assert trie.num_blocks == 2


def test_random_tries_agree_with_a_parent_table() -> None:
    rng = random.Random(1)
    trie, parents = BlockTrie(), list[int]()
    for _ in range(300):
        attach, count = rng.randrange(-1, len(parents)), rng.randrange(4)
        trie.add(attach, count)
        for number in range(count):
            parents.append(attach if number == 0 else len(parents) - 1)
        path, block = [], rng.randrange(-1, len(parents))
        deepest = block
        while block >= 0:
            path.append(block)
            block = parents[block]
        assert trie.path(deepest).tolist() == path[::-1]
