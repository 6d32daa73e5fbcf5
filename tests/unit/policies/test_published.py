"""SIEVE, S3-FIFO, ARC, W-TinyLFU, GDSF, retention and queue-awareness: the moves that make each what it is."""

from __future__ import annotations

import pytest

from hicache.policies.arc import Arc
from hicache.policies.base import EvictionOrder
from hicache.policies.cost import ATTENTION_TOKENS, RELOAD_COST, CostAware
from hicache.policies.eviction import eviction_order
from hicache.policies.fifo_queues import S3Fifo, Sieve
from hicache.policies.memory import Recent, Timeline
from hicache.policies.tinylfu import FrequencySketch, WTinyLfu
from hicache.testing.policies import Entry
from hicache.types import Tier


def filled(order: EvictionOrder[Entry], count: int, since: int = 0) -> list[Entry]:
    entries = [Entry(at, at) for at in range(since, since + count)]
    for entry in entries:
        order.entered(entry)
        order.add(entry)
    return entries


def hit(order: EvictionOrder[Entry], entry: Entry, tick: int) -> None:
    """As a request does: the entry is locked, used, and comes back."""
    order.discard(entry)
    entry.tick, entry.hits = tick, entry.hits + 1
    order.add(entry)


def evicted(order: EvictionOrder[Entry], count: int) -> list[Entry]:
    gone = []
    for _ in range(count):
        victim = order.first()
        assert victim is not None
        order.evicted(victim)
        gone.append(victim)
    return gone


def test_sieve_passes_over_what_was_hit_and_goes_on_from_there() -> None:
    order = Sieve[Entry]()
    a, b, c, d = filled(order, 4)
    hit(order, a, 10)
    hit(order, c, 11)
    assert evicted(order, 1) == [b]
    e, *_ = filled(order, 1, since=20)
    assert evicted(order, 3) == [d, e, a], "the hand went past c; only after the newest it starts over"
    assert evicted(order, 1) == [c]


def test_a_hit_while_the_hand_is_elsewhere_counts_when_it_comes() -> None:
    order = Sieve[Entry]()
    a, b, c = filled(order, 3)
    hit(order, a, 5)
    assert evicted(order, 1) == [b]
    hit(order, a, 6)
    d, *_ = filled(order, 1, since=20)
    assert evicted(order, 2) == [c, d]
    assert evicted(order, 1) == [a]


def test_s3fifo_promotes_what_was_hit_twice_and_evicts_a_scan() -> None:
    order = S3Fifo[Entry]()
    hot, *cold = filled(order, 6)
    for tick in (10, 11):
        hit(order, hot, tick)
    assert evicted(order, 5) == cold and order.first() is hot


def test_s3fifo_takes_a_ghost_to_the_main_queue() -> None:
    order = S3Fifo[Entry]()
    filled(order, 3)
    ghost = evicted(order, 1)[0]
    again = Entry(30, 30, key=ghost.key)
    order.entered(again)
    order.add(again)
    rest = evicted(order, 2)
    assert again not in rest and order.first() is again


def test_s3fifo_lets_main_entries_go_round_once_for_each_hit() -> None:
    order = S3Fifo[Entry]()
    one, two = filled(order, 2)
    for entry in (one, two):
        hit(order, entry, 5)
        hit(order, entry, 6)
    order.first()  # both move to the main queue
    hit(order, one, 7)
    assert evicted(order, 2) == [two, one]


def test_arc_learns_from_ghosts_which_list_should_be_longer() -> None:
    """A ghost of what was never hit makes room for such entries, one of what was hit takes it back."""
    order = Arc[Entry]()
    filled(order, 3)
    gone = evicted(order, 1)[0]
    again = Entry(10, 10, key=gone.key)
    assert [part.hits for part in order.entered(again)] == [1]
    again.hits = 1
    order.add(again)
    assert order._target == len(gone.key)
    order.evicted(again)
    assert order.entered(Entry(20, 20, key=gone.key)) and order._target == 0


def test_arc_evicts_from_the_longer_list() -> None:
    order = Arc[Entry]()
    one, two, three = filled(order, 3)
    hit(order, one, 10)
    assert order.first() is two  # nothing is known: those never hit go first
    order._target = 1e9
    assert order.first() is one and order._target > 0
    assert {two, three} == {entry for entry in (one, two, three) if not entry.hits}


def test_the_sketch_counts_and_forgets() -> None:
    sketch = FrequencySketch()
    for _ in range(6):
        sketch.see(42)
    assert (sketch.count(42), sketch.count(43)) == (6, 0)
    for at in range(200_000):
        sketch.see(1000 + at % 20_000)
    assert sketch.count(42) < 6 + 15 and sketch.count(1000) <= 15


def test_wtinylfu_keeps_what_was_seen_more_often() -> None:
    order = WTinyLfu[Entry]()
    hot, cold = filled(order, 2)
    for tick in range(10, 14):
        hit(order, hot, tick)
    assert evicted(order, 1) == [cold]
    newcomers = filled(order, 3, since=20)
    assert evicted(order, 3) == newcomers and order.first() is hot


@pytest.mark.parametrize(
    ("entry", "tier", "value"),
    [
        (Entry(), Tier.DEVICE, 1 + 32 / ATTENTION_TOKENS),
        (Entry(hits=2), Tier.DEVICE, 3 * (1 + 32 / ATTENTION_TOKENS)),
        (Entry(start=ATTENTION_TOKENS), Tier.DEVICE, 2 + 32 / ATTENTION_TOKENS),
        (Entry(lowest=1, start=ATTENTION_TOKENS), Tier.DEVICE, RELOAD_COST),
        (Entry(lowest=1), Tier.HOST, 1 + 32 / ATTENTION_TOKENS),
        (Entry(lowest=2), Tier.HOST, RELOAD_COST),
    ],
)
def test_gdsf_prices_an_entry_by_what_having_it_again_costs(entry: Entry, tier: Tier, value: float) -> None:
    assert CostAware[Entry](tier).value(entry) == pytest.approx(value)


def test_gdsf_grows_older_with_each_victim() -> None:
    order = CostAware[Entry](Tier.DEVICE)
    once = Entry(1, 1, hits=1)
    order.add(once)
    filled(order, 5)
    assert order.first() is not once
    victims = evicted(order, 5)
    later = filled(order, 2, since=20)
    assert once not in victims and evicted(order, 1) == [once], "worth two uses then, one use and one round now"
    assert order.first() in later


def test_awaited_entries_go_after_all_others() -> None:
    order: EvictionOrder[Entry] = eviction_order("lru", queue_aware=True)
    a, b, c = filled(order, 3)
    a.awaited = 1
    order.touch(a)
    assert evicted(order, 2) == [b, c] and order.first() is a
    a.awaited = 0
    order.touch(a)
    (d,) = filled(order, 1, since=9)
    assert evicted(order, 2) == [a, d]


def test_a_recent_map_forgets_what_came_first() -> None:
    recent = Recent[str, int](2)
    for at, key in enumerate("abac"):
        recent.put(key, at)
    assert len(recent) == 2 and [recent.pop(key) for key in "abc"] == [2, None, 3]


def test_a_timeline_answers_for_every_tick_and_stays_small() -> None:
    line = Timeline()
    for tick in range(1, 20_000):
        line.note(tick, tick * 10.0)
    assert line.at(19_999) == 199_990 and line.at(0) == 0 and line.at(10**9) == 199_990
    assert 0 <= 150_000 - line.at(15_000) <= 160 and 0 <= line.at(500) <= 5_000
    assert len(line._ticks) <= 4_097
