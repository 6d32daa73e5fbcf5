"""The learned order: what it counts, what it makes of it, and that it goes the way that pays."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.policies.adaptive import MAX_GHOSTS, HitDensity
from hicache.policies.cohorts import Cohorts
from hicache.policies.lifetimes import BUCKETS, Lifetimes, age_of, bucket_of
from hicache.sim.page_policies import BlockCache, BlockRequest
from hicache.testing.policies import Entry
from hicache.tree.radix_tree import RadixTree
from hicache.types import PrefixKey, Tier


def test_buckets_are_half_octaves_without_gaps() -> None:
    assert [age_of(bucket) >> 6 for bucket in range(10)] == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24]
    for bucket in range(BUCKETS):
        assert bucket_of(age_of(bucket)) == bucket
        assert bucket_of(max(age_of(bucket) - 1, 0)) == max(bucket - 1, 0)
    assert bucket_of(1 << 60) == BUCKETS - 1


def test_with_nothing_known_the_least_recently_used_is_worth_least() -> None:
    density = Lifetimes().densities(1e6)
    assert (np.diff(density, axis=1) <= 0).all() and density[0, 20] > density[0, 40] > 0
    assert (density == density[0]).all()


def test_worth_is_the_best_ratio_of_hits_to_time() -> None:
    """All of class 1 is used in bucket 30, none of class 0: until then 1 is worth ever more, afterwards nothing."""
    lifetimes = Lifetimes()
    for bucket in range(BUCKETS):
        lifetimes.exposed[bucket] += 10**9
        if bucket <= 30:
            lifetimes.exposed[BUCKETS + bucket] += 10**9
    lifetimes.reused[BUCKETS + 30] += 10**9
    density = lifetimes.densities(1e4)
    assert density[1, 25] > density[1, 15] > 100 * density[0, 15]
    expected = 1 / (age_of(30) - age_of(25) + (age_of(31) - age_of(30)) / 2)
    assert density[1, 25] * age_of(25) ** 0.02 == pytest.approx(expected, rel=0.35)  # neighbours are mixed


def test_old_counts_fade() -> None:
    lifetimes = Lifetimes()
    lifetimes.exposed[2 * BUCKETS + 10] = lifetimes.reused[2 * BUCKETS + 10] = 1000.0
    before = lifetimes.densities(1000.0)[2, 9]
    for _ in range(2000):
        lifetimes.decay()
    assert lifetimes.densities(1000.0)[2, 9] < before / 5


def test_cohorts_count_everybody_once_in_every_bucket() -> None:
    lifetimes = Lifetimes()
    cohorts = Cohorts[str](lifetimes)
    cohorts.put("old", 0, stamp=0, size=64, hits=0, now=0)
    cohorts.put("new", 0, stamp=256, size=128, hits=0, now=256)
    cohorts.grow(1024)
    old, new = cohorts.get("old"), cohorts.get("new")
    assert old is not None and old.bucket == bucket_of(1024)
    assert new is not None and new.bucket == bucket_of(768)
    exposed = lifetimes.exposed
    assert exposed[: bucket_of(768) + 1] == [192.0] * (bucket_of(768) + 1)
    assert exposed[bucket_of(1024)] == 64.0 and not any(exposed[bucket_of(1024) + 1 :])
    assert cohorts.size == 192 and cohorts.head(old.cohort) == "old"
    assert cohorts.pop("old") == old and cohorts.pop("old") is None and cohorts.size == 128
    assert lifetimes.exposed[old.bucket] == 0.0  # it left early: nothing is known of the rest of this bucket


def test_what_was_evicted_is_recalled_part_by_part() -> None:
    order = HitDensity[Entry]()
    head, tail = Entry(1, 1, hits=3, key=b"h" * 128), Entry(1, 1, hits=0, key=b"t" * 64)
    for entry in (head, tail):
        order.entered(entry)
        order.add(entry)
    order.evicted(tail)
    order.evicted(head)
    again = Entry(5, 5, key=head.key + tail.key + b"n" * 64)
    assert [tuple(part) for part in order.entered(again)] == [(128, 4), (64, 1)]
    assert not order.entered(Entry(6, 6, key=head.key)), "a ghost comes back once"


def test_a_lock_is_no_use_and_a_hit_is_one() -> None:
    order, entry = HitDensity[Entry](), Entry(1, 1)
    order.entered(entry)
    order.add(entry)
    order.discard(entry)
    order.add(entry)
    assert sum(order._lifetimes.reused) == 0
    order.discard(entry)
    entry.hits, entry.tick = 1, 2
    order.add(entry)
    assert sum(order._lifetimes.reused) == len(entry.key)


def test_uses_of_all_chunks_of_long_prompts_are_counted() -> None:
    """Twenty prompts of seven chunks each: only their last nodes are tracked, the others have a child."""
    order, chunks, leaves = HitDensity[Entry](), [Entry(1, 1) for _ in range(120)], [Entry(1, 1) for _ in range(20)]
    for entry in leaves + chunks:
        order.entered(entry)
        order.add(entry)
    for entry in chunks:
        order.discard(entry)
    for entry in chunks:
        entry.hits, entry.tick = 1, 2
        order.add(entry)
    assert sum(order._lifetimes.reused) == sum(len(entry.key) for entry in chunks)


def test_ghosts_are_bounded() -> None:
    order = HitDensity[Entry]()
    for at in range(MAX_GHOSTS + 500):
        entry = Entry(at, at)
        order.add(entry)
        order.evicted(entry)
    assert len(order._ghosts) == MAX_GHOSTS and not len(order)


def requests_of(chains: list[list[int]]) -> list[BlockRequest]:
    return [BlockRequest(np.array(chain, np.int32), len(chain), len(chain)) for chain in chains]


def test_it_keeps_part_of_a_loop_that_does_not_fit() -> None:
    """Thirty prompts in turn and room for ten: lru hits nothing, ever."""
    loop = requests_of([[10 * turn + block for block in range(4)] for turn in range(30)]) * 60
    lru, learned = (BlockCache(44, policy).run(loop).hits for policy in ("lru", "adaptive"))
    assert lru == 0 and learned > 0.15 * sum(len(request.blocks) for request in loop)


def test_it_is_lru_where_reuse_is_soon() -> None:
    """Each prompt comes twice in a row but one, and never again."""
    pairs = [[4 * at + block for block in range(4)] for at in range(1500)]
    stream = requests_of([chain for one, two in zip(pairs[::2], pairs[1::2], strict=True) for chain in (one, two) * 2])
    lru, learned = (BlockCache(12, policy).run(stream).hits for policy in ("lru", "adaptive"))
    assert lru == 4 * 1500 and learned > 0.97 * lru


def test_the_tree_tells_what_was_evicted_and_cuts_what_comes_back() -> None:
    tree = RadixTree(16, "adaptive", "adaptive")
    first = tree.insert(PrefixKey.of(list(range(64))), np.arange(4, dtype=np.int32)).node
    assert first is not None
    tree.drop_device(first)
    again = tree.insert(PrefixKey.of(list(range(128))), np.arange(8, dtype=np.int32))
    assert [(node.start, node.hits) for node in again.path] == [(0, 1), (64, 0)]
    assert again.adopted == again.path and again.num_pages == 8


def test_a_host_copy_that_goes_is_a_ghost_of_the_host_and_not_of_the_device() -> None:
    tree = RadixTree(16, "adaptive", "adaptive")
    node = tree.insert(PrefixKey.of(list(range(64))), np.arange(4, dtype=np.int32)).node
    assert node is not None
    tree.fills.commit(tree.fills.begin(Tier.HOST, [node], np.arange(4, dtype=np.int32)))
    tree.drop_host(node)
    mirrors, device = tree.ledger.mirrors, tree.ledger.device
    assert isinstance(mirrors, HitDensity) and isinstance(device, HitDensity)
    assert len(mirrors._ghosts) == 1 and not len(device._ghosts) and node in device
