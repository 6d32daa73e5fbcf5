"""Orders of the waiting queue, and looking at the tree without using it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from serving_engines import PAGE, ask, run, standin_engine, tiers_of

from hicache.hashing import RequestNamespace
from hicache.requests import Request
from hicache.serving.engine import Engine
from hicache.serving.generation import Generation
from hicache.serving.queue import Peek, QueuePolicy, WaitingQueue, common_pages, peek_prefix
from hicache.types import PrefixKey, Tier

SYSTEM, TOOLS, OTHER = [1] * 8, [2] * 8, [3] * 8


def warm(*prompts: Sequence[int], host: int = 0) -> Engine:
    """An engine whose cache knows these prompts."""
    engine = standin_engine(tiers_of(40, host))
    for prompt in prompts:
        engine.add_request(ask(prompt, 1))
        run(engine)
    return engine


def queue_of(engine: Engine, policy: QueuePolicy, *prompts: Sequence[int], priorities: Sequence[int] = ()) -> list[int]:
    """The order in which requests of these prompts are admitted, by their place in the arguments."""
    queue = WaitingQueue(engine.cache.tiers, policy, max_wait=10.0)
    for number, prompt in enumerate(prompts):
        request = ask(prompt, priority=priorities[number] if priorities else 0)
        queue.add(Generation(request, Request(str(number), prompt), number, frozenset()))
    return [generation.number for generation in queue.ordered(now=0.0)]


def test_first_come_first_served() -> None:
    engine = warm(SYSTEM + OTHER)
    assert queue_of(engine, "fcfs", OTHER, SYSTEM + OTHER, SYSTEM) == [0, 1, 2]


def test_longest_cached_prefix_first() -> None:
    engine = warm(SYSTEM + TOOLS + OTHER, host=40)
    prompts = (OTHER, SYSTEM + OTHER, SYSTEM + TOOLS + [9], [*SYSTEM, 9], OTHER)
    assert queue_of(engine, "lpm", *prompts) == [2, 1, 3, 0, 4]


def test_pages_on_the_host_count_as_well() -> None:
    engine = warm(SYSTEM + OTHER, TOOLS, host=40)
    engine.settle()
    engine.cache.flush([Tier.DEVICE], timeout=5.0)
    assert queue_of(engine, "lpm", OTHER, [*TOOLS, 9], SYSTEM + OTHER) == [2, 1, 0]


def test_the_branch_with_most_waiting_requests_goes_first() -> None:
    engine = warm(SYSTEM + OTHER, TOOLS + OTHER, TOOLS + SYSTEM)
    prompts = ([*SYSTEM, 9], OTHER, TOOLS + OTHER + [9], [*TOOLS, 9], TOOLS + OTHER + [8], SYSTEM + OTHER + [9])
    # below TOOLS wait three, two of them below OTHER; then two in the one node of SYSTEM; what is not cached is last
    assert queue_of(engine, "dfs_weight", *prompts) == [2, 4, 3, 0, 5, 1]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs_weight"])
def test_priorities_come_first(policy: QueuePolicy) -> None:
    engine = warm(SYSTEM)
    assert queue_of(engine, policy, [*SYSTEM, 9], OTHER, OTHER, priorities=[0, 2, 1]) == [1, 2, 0]


@pytest.mark.parametrize("policy", ["lpm", "dfs_weight"])
def test_who_has_waited_too_long_comes_next(policy: QueuePolicy) -> None:
    engine = warm(SYSTEM)
    queue = WaitingQueue(engine.cache.tiers, policy, max_wait=10.0)
    for number, prompt in enumerate((OTHER, [*SYSTEM, 9])):
        generation = Generation(ask(prompt), Request(str(number), prompt), number, frozenset())
        generation.arrives(float(number))
        queue.add(generation)
    assert [generation.number for generation in queue.ordered(now=9.0)] == [1, 0]
    assert [generation.number for generation in queue.ordered(now=10.5)] == [0, 1]


def test_a_look_changes_nothing() -> None:
    engine = warm(SYSTEM + TOOLS)
    tree = engine.cache.tiers.tree
    before = [(node.key, node.tick, node.hits) for node in tree.nodes()]
    assert peek_prefix(engine.cache.tiers, PrefixKey.of(SYSTEM + [2] * PAGE + OTHER)) == Peek(
        tuple(tree.nodes()), device_pages=3, unlocked_pages=3, host_pages=0
    )
    assert [(node.key, node.tick, node.hits) for node in tree.nodes()] == before
    assert peek_prefix(engine.cache.tiers, PrefixKey.of(OTHER)).pages == 0
    assert peek_prefix(engine.cache.tiers, PrefixKey.of(SYSTEM, b"another")).pages == 0


def test_a_look_finds_what_a_match_finds() -> None:
    engine = warm(SYSTEM + TOOLS, SYSTEM + OTHER, host=40)
    engine.settle()
    engine.cache.flush([Tier.DEVICE], timeout=5.0)
    for prompt in (SYSTEM, SYSTEM + OTHER, SYSTEM + TOOLS[:4], SYSTEM[:5], OTHER):
        key = PrefixKey.of(prompt)
        peek, match = peek_prefix(engine.cache.tiers, key), engine.cache.match_prefix(key)
        assert (peek.device_pages * PAGE, peek.host_pages * PAGE) == (match.device_len, match.host_hit_len)


def test_common_pages() -> None:
    first = PrefixKey.of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert common_pages(first, PrefixKey.of([1, 2, 3, 4, 5, 6, 7, 9]), 4) == 1
    assert common_pages(first, first, 4) == 2
    assert common_pages(first, PrefixKey(first.data, RequestNamespace("a").encode()), 4) == 0
