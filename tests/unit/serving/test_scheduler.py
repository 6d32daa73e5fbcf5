"""What a step computes, who is admitted, and who gives way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from serving_engines import PAGE, ask, run, standin_engine, tiers_of

from hicache.errors import ConfigError
from hicache.serving.engine import Engine
from hicache.serving.generation import Slice
from hicache.serving.scheduler import SchedulerOptions

Spans = list[tuple[str, int, int]]


def watched(engine: Engine) -> list[Spans]:
    """What each step computes from now on: name, first and last token."""
    steps, forward = list[Spans](), engine.model.forward

    def record(batch: Sequence[Slice], *rest: object) -> object:
        steps.append([(part.generation.rid, part.start, part.stop) for part in batch])
        return forward(batch, *rest)  # type: ignore[arg-type]

    engine.model.forward = record  # type: ignore[method-assign, assignment]
    return steps


def numbers(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_options_out_of_range() -> None:
    for options in ({"policy": "best"}, {"max_running": 0}, {"step_tokens": 0}, {"chunk_tokens": 0}, {"reserve": 1.5}):
        with pytest.raises(ConfigError):
            SchedulerOptions(**options)  # type: ignore[arg-type]


def test_decoding_goes_first_and_prompts_get_the_rest_of_the_budget() -> None:
    engine = standin_engine(tiers_of(40), SchedulerOptions(step_tokens=10, chunk_tokens=8))
    steps = watched(engine)
    engine.add_request(ask(numbers(0, 6), 4, rid="a"))
    engine.add_request(ask(numbers(50, 20), 2, rid="b"))
    run(engine)
    assert steps[:4] == [
        [("a", 0, 6), ("b", 0, 4)],
        [("a", 6, 7), ("b", 4, 12)],
        [("a", 7, 8), ("b", 12, 20)],
        [("a", 8, 9), ("b", 20, 21)],
    ]


def test_chunks_end_with_pages() -> None:
    engine = standin_engine(tiers_of(40), SchedulerOptions(step_tokens=7, chunk_tokens=7))
    steps = watched(engine)
    engine.add_request(ask(numbers(0, 14), 1, rid="a"))
    run(engine)
    assert steps == [[("a", 0, 4)], [("a", 4, 8)], [("a", 8, 14)]]


def test_a_budget_below_a_page_still_advances() -> None:
    engine = standin_engine(tiers_of(40), SchedulerOptions(step_tokens=3))
    engine.add_request(ask(numbers(0, 10), 1, rid="a"))
    run(engine)
    assert engine.metrics.steps == 4


def test_a_prompt_that_is_cached_computes_its_last_token() -> None:
    engine = standin_engine(tiers_of(40))
    steps = watched(engine)
    for rid, length in (("a", 8), ("b", 8), ("c", 9)):
        engine.add_request(ask(numbers(0, length), 1, rid=rid))
        run(engine)
    assert steps == [[("a", 0, 8)], [("b", 4, 8)], [("c", 8, 9)]]


def test_equal_beginnings_that_arrive_together_are_computed_once() -> None:
    engine = standin_engine(tiers_of(60), SchedulerOptions(step_tokens=64, chunk_tokens=8))
    steps = watched(engine)
    for rid, tail in (("a", 100), ("b", 200), ("c", 300)):
        engine.add_request(ask(numbers(0, 16) + numbers(tail, 6), 1, rid=rid))
    run(engine)
    assert steps == [[("a", 0, 8)], [("a", 8, 16)], [("a", 16, 22), ("b", 16, 22), ("c", 16, 22)]]


def test_waiting_for_a_prefill_can_be_turned_off() -> None:
    engine = standin_engine(tiers_of(60), SchedulerOptions(share_prefills=False))
    for rid in "ab":
        engine.add_request(ask(numbers(0, 20), 1, rid=rid))
    run(engine)
    assert engine.metrics.steps == 1 and engine.metrics.reused_tokens.total() == 0


def test_others_overtake_who_waits_for_a_prefill() -> None:
    engine = standin_engine(tiers_of(60), SchedulerOptions(step_tokens=64, chunk_tokens=8))
    steps = watched(engine)
    for rid, first in (("a", 0), ("b", 0), ("c", 100)):
        engine.add_request(ask(numbers(first, 20), 1, rid=rid))
    run(engine)
    assert steps[0] == [("a", 0, 8), ("c", 0, 8)]


def test_who_waited_goes_on_alone_if_the_prefill_is_aborted() -> None:
    engine = standin_engine(tiers_of(60), SchedulerOptions(chunk_tokens=8))
    steps = watched(engine)
    for rid in "ab":
        engine.add_request(ask(numbers(0, 20), 1, rid=rid))
    engine.step()
    engine.abort("a")
    run(engine)
    assert steps == [[("a", 0, 8)], [("b", 8, 16)], [("b", 16, 20)]]


def test_a_request_is_admitted_when_its_prompt_and_its_share_of_the_answer_fit() -> None:
    engine = standin_engine(tiers_of(10), SchedulerOptions(reserve=0.5))
    engine.add_request(ask(numbers(0, 8), 16))  # promised 4 pages, in the end 6
    engine.add_request(ask(numbers(100, 8), 32))  # promised 6 pages: 10 of 10
    engine.add_request(ask(numbers(200, 1), 1))
    engine.step()
    assert (engine.running, engine.waiting) == (2, 1)


def test_evictable_pages_count_as_room() -> None:
    engine = standin_engine(tiers_of(10))
    engine.add_request(ask(numbers(0, 36), 1))
    run(engine)
    for first in (100, 200):
        engine.add_request(ask(numbers(first, 15), 1))
    engine.step()
    assert engine.metrics.finished["length"] == 3


def test_the_own_prefix_is_not_room() -> None:
    engine = standin_engine(tiers_of(10), SchedulerOptions(reserve=0.0))
    engine.add_request(ask(numbers(0, 24), 1))
    run(engine)
    engine.add_request(ask(numbers(100, 20), 4))  # 5 pages: 4 free, 1 evicted; 5 of the first stay
    engine.add_request(ask(numbers(0, 24), 4))  # 5 pages of 6 are cached, but nothing else is left to evict
    engine.step()
    assert (engine.running, engine.waiting) == (1, 1)
    run(engine)


def test_the_large_is_not_overtaken_by_the_small() -> None:
    engine = standin_engine(tiers_of(10))
    handles = [engine.add_request(ask(numbers(first, size), 4)) for first, size in ((0, 12), (100, 32), (200, 2))]
    done = []
    while engine.has_work:
        done += [output.rid for output in engine.step() if output.finished]
    assert done == [handle.rid for handle in handles]


@pytest.mark.parametrize("host", [0, 6])
def test_the_last_one_gives_way_when_the_device_is_full(host: int) -> None:
    engine = standin_engine(tiers_of(8, host), SchedulerOptions(reserve=0.0, patience=2))
    handles = [engine.add_request(ask(numbers(first, 8), 20, rid=str(first))) for first in (0, 100, 200)]
    run(engine)
    assert engine.metrics.retractions > 0
    assert handles[0].metrics.retractions == 0
    assert all(len(handle.token_ids) == 20 for handle in handles)
    assert engine.model.wrong_pages == 0
    engine.settle()


def test_after_a_retraction_room_is_kept_for_whole_answers_for_a_while() -> None:
    engine = standin_engine(tiers_of(8), SchedulerOptions(reserve=0.0))
    for first in (0, 100):
        engine.add_request(ask(numbers(first, 8), 22))
    run(engine)
    assert engine.metrics.retractions == 1


def test_a_higher_priority_pushes_out_a_lower_one() -> None:
    engine = standin_engine(tiers_of(8), SchedulerOptions(max_running=2))
    low = [engine.add_request(ask(numbers(first, 8), 8)) for first in (0, 100)]
    engine.step()
    high = engine.add_request(ask(numbers(200, 8), 8, priority=1))
    engine.step()
    assert (engine.running, engine.waiting) == (2, 1) and len(high.token_ids) == 1
    run(engine)
    assert [handle.metrics.retractions for handle in (*low, high)] == [0, 1, 0]


def test_an_equal_priority_does_not() -> None:
    engine = standin_engine(tiers_of(8), SchedulerOptions(max_running=1))
    engine.add_request(ask(numbers(0, 8), 8, priority=1))
    engine.step()
    engine.add_request(ask(numbers(100, 8), 8, priority=1))
    engine.step()
    assert (engine.running, engine.waiting, engine.metrics.retractions) == (1, 1, 0)


def test_nobody_is_pushed_out_in_vain() -> None:
    engine = standin_engine(tiers_of(10), SchedulerOptions(reserve=1.0))
    for first, priority in ((0, 2), (100, 0)):
        engine.add_request(ask(numbers(first, 12), 8, priority=priority))
    engine.step()
    engine.add_request(ask(numbers(200, 20), 8, priority=1))  # 7 pages; without the lower one there are 5
    engine.step()
    assert (engine.running, engine.waiting) == (2, 1)


def test_no_request_is_lost_in_the_narrowest_device() -> None:
    """Each request alone fills the device."""
    engine = standin_engine(tiers_of(6), SchedulerOptions(reserve=0.0))
    handles = [engine.add_request(ask(numbers(100 * number, 4), 6 * PAGE - 4)) for number in range(4)]
    run(engine)
    assert all(handle.finish_reason == "length" for handle in handles)
