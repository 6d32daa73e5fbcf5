from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.sim.prefix_hash import Hashes, PrefixHasher

TOKENS = np.random.default_rng(0).integers(0, 2**31, 40_000, dtype=np.int32)


def hashes(tokens: list[int], namespace: bytes = b"") -> Hashes:
    return PrefixHasher(namespace).extend(np.array(tokens, np.int32))


@given(cuts=st.lists(st.integers(0, len(TOKENS)), max_size=6))
def test_incremental_equals_whole(cuts: list[int]) -> None:
    whole = PrefixHasher(b"n").extend(TOKENS)
    hasher = PrefixHasher(b"n")
    bounds = [0, *sorted(cuts), len(TOKENS)]
    parts = [hasher.extend(TOKENS[a:b]) for a, b in itertools.pairwise(bounds)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert hasher.position == len(TOKENS)


def test_a_fork_goes_its_own_way() -> None:
    hasher = PrefixHasher()
    hasher.extend(TOKENS[:100])
    twin = hasher.fork()
    hasher.extend(TOKENS[500:600])
    assert np.array_equal(twin.extend(TOKENS[100:200]), PrefixHasher().extend(TOKENS[:200])[100:])


@pytest.mark.parametrize("changed", [0, 1, 57, 99])
def test_a_changed_token_changes_everything_after_it_and_nothing_before(changed: int) -> None:
    other = TOKENS[:100].copy()
    other[changed] ^= 1
    same = PrefixHasher().extend(other) == PrefixHasher().extend(TOKENS[:100])
    assert same[:changed].all()
    assert not same[changed:].any()


def test_order_position_and_namespace_count() -> None:
    assert hashes([1, 2])[1] != hashes([2, 1])[1]
    assert hashes([0])[0] != hashes([0, 0])[1]
    assert len(set(hashes([7] * 1000).tolist())) == 1000
    namespaces = [b"", b"a", b"b", b"ab"]
    assert len({int(hashes([5, 6], namespace)[1]) for namespace in namespaces}) == 4


def test_values_are_the_same_in_every_process() -> None:
    assert hashes([1, 2, 3], b"tenant").tolist() == [4935068290303373174, 4284124846059772711, 9633011656382969604]
