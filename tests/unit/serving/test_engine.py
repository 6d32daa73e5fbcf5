"""Requests through the whole engine: what comes out, aborts, failed loads, tenants; caching changes nothing."""

from __future__ import annotations

import math
import random
import threading
from pathlib import Path

import pytest
import torch
from serving_engines import PAGE, TINY, ask, reference, run, standin_engine, tiers_of, tiny_engine

from hicache.errors import BadInput, CapacityError, IntegrityError, TransferError
from hicache.hashing import RequestNamespace
from hicache.serving.engine import Engine, Surroundings
from hicache.serving.faults import break_copies
from hicache.serving.outputs import EngineStopped, GenerationRequest, TokenOutput
from hicache.serving.sampling import SamplingParams
from hicache.serving.scheduler import SchedulerOptions
from hicache.types import Tier

PROMPT = list(b"Once upon a time there was a cache")


# ---- what comes out -----------------------------------------------------------------------------


def test_tokens_come_one_by_one_and_the_handle_has_them_all() -> None:
    engine = tiny_engine(tiers_of(40))
    handle = engine.add_request(ask(PROMPT, 3, rid="a"))
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step()
    assert [output.finish_reason for output in outputs] == [None, None, "length"]
    assert [output.token for output in outputs] == handle.token_ids == reference([ask(PROMPT, 3)])[0]
    assert "".join(output.text for output in outputs) == handle.text
    assert handle.metrics is outputs[-1].metrics and handle.metrics is not None
    assert handle.metrics.computed_tokens == len(PROMPT) + 2


def test_a_stop_token_ends_the_answer_and_is_no_text() -> None:
    expected = reference([ask(PROMPT, 6)])[0]
    engine, stop = tiny_engine(tiers_of(40)), expected[3]
    count = expected.index(stop) + 1
    handle = engine.generate([ask(PROMPT, 6, sampling=SamplingParams(stop_ids=frozenset({stop})))])[0]
    assert (handle.finish_reason, handle.token_ids) == ("stop", expected[:count])
    assert handle.text == bytes(token for token in expected[: count - 1] if token < 256).decode("utf-8", "replace")


def test_end_tokens_of_the_model_end_the_answer_unless_they_are_ignored() -> None:
    engine = tiny_engine(tiers_of(40))
    token = engine.generate([ask(PROMPT, 1)])[0].token_ids[0]
    engine.model.eos_ids = (token,)
    assert engine.generate([GenerationRequest(PROMPT, 5)])[0].finish_reason == "stop"
    assert len(engine.generate([ask(PROMPT, 5)])[0].token_ids) == 5


def test_a_stop_string_ends_the_answer_and_is_left_out() -> None:
    engine = tiny_engine(tiers_of(60))
    text = engine.generate([ask(PROMPT, 12)])[0].text
    stop = text[4:6]
    handle = engine.generate([ask(PROMPT, 12, stop=(stop,))])[0]
    assert (handle.finish_reason, handle.text) == ("stop", text[: text.index(stop)])


def test_sampling_depends_on_the_seed_alone() -> None:
    engine = tiny_engine(tiers_of(60))
    warm = [ask(PROMPT, 8, sampling=SamplingParams(1.0, seed=seed)) for seed in (1, 2, 1)]
    first, second, third = (handle.token_ids for handle in engine.generate(warm))
    assert first == third != second


def test_logprobs_on_request() -> None:
    engine = tiny_engine(tiers_of(60))
    plain, chosen, top = engine.generate([ask(PROMPT, 2, top_logprobs=wanted) for wanted in (None, 0, 3)])
    assert plain.logprobs == [] and [found.top for found in chosen.logprobs] == [(), ()]
    assert [found.top[0][0] for found in top.logprobs] == top.token_ids  # greedy
    assert all(found.chosen == pytest.approx(found.top[0][1]) for found in top.logprobs)
    assert math.exp(top.logprobs[0].chosen) <= 1 and len(top.logprobs[0].top) == 3


# ---- what is refused ----------------------------------------------------------------------------


def test_requests_that_can_never_run_are_refused() -> None:
    engine = tiny_engine(tiers_of(10))
    with pytest.raises(CapacityError, match="room for 40"):
        engine.add_request(ask(PROMPT, 40 - len(PROMPT) + 1))
    with pytest.raises(BadInput, match="context"):
        engine.add_request(ask([1], TINY.context))
    for prompt in ([TINY.vocab], [-1]):
        with pytest.raises(BadInput, match="vocabulary"):
            engine.add_request(ask(prompt))
    engine.add_request(ask([1], rid="a"))
    with pytest.raises(BadInput, match="already"):
        engine.add_request(ask([1], rid="a"))
    run(engine)
    engine.add_request(ask([1], rid="a"))
    with pytest.raises(BadInput, match="tokenizer"):
        standin_engine(tiers_of(10)).add_request(ask([1], stop=("x",)))


@pytest.mark.parametrize(
    "more", [{"prompt": []}, {"max_tokens": 0}, {"stop": ("",)}, {"top_logprobs": 21}, {"top_logprobs": -1}]
)
def test_requests_out_of_range(more: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        GenerationRequest(**{"prompt": [1], **more})  # type: ignore[arg-type]


def test_the_largest_request_that_is_taken_runs() -> None:
    engine = tiny_engine(tiers_of(10))
    handle = engine.generate([ask(PROMPT, engine.max_tokens - len(PROMPT))])[0]
    assert handle.finish_reason == "length"


def test_a_closed_engine_takes_nothing() -> None:
    engine = tiny_engine(tiers_of(10))
    handle = engine.add_request(ask([1]))
    assert [output.finish_reason for output in engine.close()] == ["abort"] == [handle.finish_reason]
    assert engine.close() == []
    with pytest.raises(EngineStopped):
        engine.add_request(ask([1]))


# ---- aborts -------------------------------------------------------------------------------------


def aborted(engine: Engine, rid: str) -> None:
    """Abort, see the end, and account for every page."""
    assert engine.abort(rid)
    assert not engine.abort(rid)
    ends = [output for output in engine.step() if output.rid == rid]
    assert [(output.token, output.finish_reason) for output in ends] == [(None, "abort")]
    run(engine)
    engine.settle()


def test_abort_of_an_unknown_request() -> None:
    assert not tiny_engine(tiers_of(10)).abort("nobody")


def test_abort_while_waiting() -> None:
    engine = tiny_engine(tiers_of(20), SchedulerOptions(max_running=1))
    other = engine.add_request(ask(PROMPT, 5))
    engine.add_request(ask(PROMPT, 5, rid="a"))
    engine.step()
    aborted(engine, "a")
    assert other.finish_reason == "length"


def test_abort_between_two_chunks() -> None:
    engine = tiny_engine(tiers_of(20), SchedulerOptions(chunk_tokens=8))
    engine.add_request(ask(PROMPT, 5, rid="a"))
    engine.step()
    aborted(engine, "a")
    assert engine.cache.stats().device.evictable == 2  # the first chunk stays of use


def test_abort_while_decoding() -> None:
    engine = tiny_engine(tiers_of(20))
    handle = engine.add_request(ask(PROMPT, 5, rid="a"))
    engine.step()
    engine.step()
    aborted(engine, "a")
    assert len(handle.token_ids) == 2


def test_an_answer_that_was_cut_off_keeps_its_pages() -> None:
    """The client goes away in mid-answer and comes back with what it has read: a chat that goes on."""
    engine = tiny_engine(tiers_of(40))
    handle = engine.add_request(ask(PROMPT, 30, rid="a"))
    while len(handle.token_ids) < 11:
        engine.step()
    aborted(engine, "a")
    known = [*PROMPT, *handle.token_ids]
    whole = (len(known) - 1) // PAGE * PAGE  # KV of the last token was never computed
    again = engine.generate([ask([*known, 7], 2)])[0]
    assert again.metrics is not None and again.metrics.cached_tokens["device"] == whole
    assert [again.token_ids] == reference([ask([*known, 7], 2)])


def test_abort_after_a_retraction() -> None:
    engine = tiny_engine(tiers_of(11), SchedulerOptions(reserve=0.0))
    for rid, prompt in (("a", PROMPT[:12]), ("b", PROMPT[12:24])):
        engine.add_request(ask(prompt, 20, rid=rid))
    while not engine.waiting or engine.running == 2 or not engine.metrics.steps:
        engine.step()
    aborted(engine, "b")


def test_abort_while_storage_is_read(tmp_path: Path) -> None:
    engine = tiny_engine(tiers_of(20, 20, tmp_path))
    engine.generate([ask(PROMPT, 5)])
    engine.close()
    engine = tiny_engine(tiers_of(20, 20, tmp_path))
    engine.add_request(ask(PROMPT, 5, rid="a"))
    aborted(engine, "a")
    assert engine.cache.stats().prefetches["cancelled"] == 1
    engine.close()


def test_abort_while_its_load_is_under_way() -> None:
    engine, gate = tiny_engine(tiers_of(20, 20)), threading.Event()
    kernels = break_copies(engine.cache, 0.0, 0)
    warm_host(engine)
    scatter = kernels.scatter

    def late(*arguments: object) -> None:
        assert gate.wait(10)
        scatter(*arguments)  # type: ignore[arg-type]

    kernels.scatter = late  # type: ignore[method-assign]
    engine.add_request(ask(PROMPT, 2, rid="a"))
    engine.cache.poll()
    assert engine._scheduler.schedule() and engine.cache.loading
    engine.abort("a")
    gate.set()
    run(engine)
    engine.settle()


# ---- loads that fail ----------------------------------------------------------------------------


def warm_host(engine: Engine) -> None:
    """PROMPT is in host memory, and there only."""
    engine.generate([ask(PROMPT, 1)])
    engine.settle()
    engine.cache.flush([Tier.DEVICE], timeout=5.0)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_request_whose_load_fails_is_computed_anew_and_no_other_is_harmed(times: int) -> None:
    engine = tiny_engine(tiers_of(40, 40))
    kernels = break_copies(engine.cache, 0.0, 0)
    warm_host(engine)
    scatter, left = kernels.scatter, times

    def failing(*arguments: object) -> None:
        nonlocal left
        if left:
            left -= 1
            raise OSError("injected")
        scatter(*arguments)  # type: ignore[arg-type]

    kernels.scatter = failing  # type: ignore[method-assign]
    other = engine.add_request(ask(PROMPT[::-1], 8))
    engine.step()
    requests = [ask(PROMPT, 4), ask(PROMPT[:20] + PROMPT, 4)]
    handles = [other, *engine.generate(requests)]
    run(engine)
    assert [handle.token_ids for handle in handles] == reference([ask(PROMPT[::-1], 8), *requests])
    assert engine.metrics.failed_loads >= 1 and other.metrics is not None and other.metrics.retractions == 0
    engine.settle()


def test_a_transfer_error_that_is_nobodys_load_is_raised() -> None:
    engine = tiny_engine(tiers_of(10))

    def broken(*arguments: object) -> torch.Tensor:
        raise TransferError("the device is gone")

    engine.model.forward = broken  # type: ignore[method-assign]
    engine.add_request(ask([1]))
    with pytest.raises(TransferError):
        engine.step()


def test_logits_that_are_no_numbers_end_the_request_and_are_not_shared() -> None:
    engine = tiny_engine(tiers_of(20))
    forward = engine.model.forward
    engine.model.forward = lambda *arguments: forward(*arguments) * math.nan  # type: ignore[method-assign]
    handle = engine.generate([ask(PROMPT[:3], 5)])[0]
    assert (handle.finish_reason, handle.token_ids) == ("error", []) and "not numbers" in str(handle.error)
    engine.settle()
    assert engine.cache.stats().device.free == 20


# ---- tenants ------------------------------------------------------------------------------------


def test_tenants_and_adapters_share_nothing_and_everything_within_one() -> None:
    engine = tiny_engine(tiers_of(100))
    whole = (len(PROMPT) - 1) // PAGE * PAGE
    spaces = [RequestNamespace("a"), RequestNamespace("b"), RequestNamespace("a", "lora"), RequestNamespace()]
    for cached in (0, whole):
        for space in spaces:
            handle = engine.generate([ask(PROMPT, 2, namespace=space)])[0]
            assert handle.metrics is not None and handle.metrics.cached_tokens["device"] == cached


def test_tenants_that_arrive_together_do_not_wait_for_each_other() -> None:
    engine = tiny_engine(tiers_of(100))
    for salt in ("a", "b"):
        engine.add_request(ask(PROMPT, 1, namespace=RequestNamespace(salt)))
    run(engine)
    assert engine.metrics.steps == 1


# ---- caching changes nothing but time -----------------------------------------------------------


def schedule(seed: int, count: int) -> list[GenerationRequest]:
    """Requests with common beginnings, some sampled, of two tenants."""
    draw = random.Random(seed)
    trunk = [draw.randrange(256) for _ in range(40)]
    requests = []
    for _ in range(count):
        head = trunk[: draw.choice([0, 8, 21, 40])]
        prompt = head + [draw.randrange(256) for _ in range(draw.randint(1, 12))]
        sampling = SamplingParams(draw.choice([0.0, 0.9]), seed=draw.randrange(99))
        space = RequestNamespace(draw.choice([None, None, "b"]))
        requests.append(
            ask(prompt, draw.randint(1, 12), sampling=sampling, namespace=space, priority=draw.choice([0, 0, 1]))
        )
    return requests


@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_gives_the_tokens_of_a_run_without_cache(seed: int, tmp_path: Path) -> None:
    draw, requests = random.Random(seed), schedule(seed, 14)
    options = SchedulerOptions(
        policy=draw.choice(["fcfs", "lpm", "dfs_weight"]),
        max_running=draw.choice([2, 6]),
        step_tokens=draw.choice([5, 32, 128]),
        chunk_tokens=draw.choice([3, 16, 64]),
        reserve=draw.choice([0.0, 0.5]),
        patience=draw.choice([0, 8]),
    )
    engine = tiny_engine(tiers_of(18, draw.choice([6, 12]), tmp_path), options)
    break_copies(engine.cache, 0.05, seed)
    handles, todo = [], list(requests)
    while todo or engine.has_work:
        if todo and draw.random() < 0.4:
            handles.append(engine.add_request(todo.pop(0)))
        engine.step()
    engine.settle()
    engine.close()
    assert [handle.token_ids for handle in handles] == reference(requests)
    for handle, request in zip(handles, requests):
        metrics = handle.metrics
        assert metrics is not None
        kept = sum(metrics.cached_tokens.values()) + metrics.computed_tokens - metrics.recomputed_tokens
        assert kept == len(request.prompt) + len(handle.token_ids) - 1


def test_the_same_calls_give_the_same_steps() -> None:
    seen = []
    for _ in range(2):
        engine = tiny_engine(tiers_of(18), SchedulerOptions(reserve=0.0, step_tokens=24))
        handles = [engine.add_request(request) for request in schedule(9, 10)]
        outputs = []
        while engine.has_work:
            outputs.append([(output.rid, output.token) for output in engine.step()])
        seen.append((outputs, [handle.text for handle in handles], engine.metrics.retractions))
    assert seen[0] == seen[1]


def test_without_reuse_nothing_is_found_or_kept() -> None:
    engine = tiny_engine(tiers_of(30), SchedulerOptions(reuse=False))
    for _ in range(2):
        handle = engine.generate([ask(PROMPT, 3)])[0]
        assert handle.metrics is not None and handle.metrics.computed_tokens == len(PROMPT) + 2
    stats = engine.cache.stats()
    assert (stats.device.free, stats.device.evictable) == (30, 0)


# ---- surroundings and reports -------------------------------------------------------------------


def test_times_come_from_the_clock_and_idle_steps_sleep() -> None:
    now, slept = [100.0], list[float]()
    engine = tiny_engine(tiers_of(20), around=Surroundings(clock=lambda: now[0], sleep=slept.append))
    handle = engine.add_request(ask(PROMPT, 3))
    for _ in range(3):
        now[0] += 2.0
        engine.step()
    engine.step()
    metrics = handle.metrics
    assert metrics is not None and (metrics.queued, metrics.ttft, metrics.tpot) == (2.0, 2.0, 2.0)
    assert len(slept) == 1


def test_a_run_in_which_nothing_moves_is_given_up() -> None:
    now = [0.0]

    def pass_time(seconds: float) -> None:
        now[0] += 10.0

    engine = tiny_engine(tiers_of(20), around=Surroundings(clock=lambda: now[0], sleep=pass_time))
    engine._scheduler.schedule = list  # type: ignore[method-assign, assignment]
    with pytest.raises(CapacityError, match="nothing moved"):
        engine.generate([ask([1])], stall_seconds=50.0)


def test_a_page_that_is_lost_is_noticed() -> None:
    engine = tiny_engine(tiers_of(20))
    engine.cache.alloc_pages(1)
    with pytest.raises(IntegrityError):
        engine.settle()


def test_the_report_has_evidence_figures_and_counters(tmp_path: Path) -> None:
    engine = tiny_engine(tiers_of(20, 10, tmp_path), around=Surroundings(seed=5))
    engine.generate([ask(PROMPT, 3)])
    report = engine.report()
    evidence = report["evidence"]
    assert (evidence["model"], evidence["dtype"], evidence["seed"]) == ("random", "float32", 5)
    assert evidence["sizes"] == {"device": 20 * PAGE, "host": 10 * PAGE, "storage_bytes": 16 << 20}
    assert evidence["policy"]["queue"] == "fcfs" and "commit" in evidence
    assert [evidence["policy"][f"{tier}_eviction"] for tier in ("device", "host", "storage")] == [
        "adaptive",
        "lru",
        "lru",
    ]
    assert report["run"]["output_tokens"] == 3 and report["cache"]["device"]["total"] == 20
    engine.close()


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_a_host_tier_that_quantises_serves_and_is_counted(tmp_path: Path, codec: str) -> None:
    """What was asked before comes back from the host, and after a restart from the disk."""
    tiers = tiers_of(16, 64, tmp_path)
    tiers[1]["codec"] = codec
    cached = []
    for prompts in ((0, 1, 2, 0), (0,)):
        engine = tiny_engine(tiers)
        for first in prompts:
            handle = engine.generate([ask([first, *PROMPT], 4)])[0]
            assert len(handle.token_ids) == 4 and handle.metrics is not None
            cached.append(dict(handle.metrics.cached_tokens))
        policies = engine.report()["evidence"]["policy"]
        assert (policies["host_codec"], policies["storage_codec"]) == (codec, codec)
        engine.close()
    nothing = {"device": 0, "host": 0, "storage": 0}
    whole = (len(PROMPT) + 1) // PAGE * PAGE
    assert cached == [nothing] * 3 + [nothing | {"host": whole}, nothing | {"storage": whole}]
