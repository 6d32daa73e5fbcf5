"""Times and token counts of requests and runs."""

from __future__ import annotations

import pytest

from hicache.serving.metrics import Distribution, RequestTimer, RunMetrics


def test_times_of_a_request() -> None:
    timer = RequestTimer(10.0)
    timer.admitted(11.0)
    timer.admitted(15.0)  # after a retraction
    for now in (12.0, 13.0, 16.0):
        timer.token(now)
    result = timer.result("r", 5, 3, 17.0)
    assert (result.queued, result.ttft, result.tpot, result.latency) == (1.0, 2.0, 2.0, 7.0)


def test_what_was_not_reached_has_no_time() -> None:
    result = RequestTimer(1.0).result("r", 5, 0, 3.0)
    assert (result.queued, result.ttft, result.tpot, result.latency) == (None, None, None, 2.0)


def test_hits_are_counted_by_tier_and_own_work_is_none() -> None:
    timer = RequestTimer(0.0)
    timer.served(8, 4, 4)
    timer.ran(16, 20)
    timer.served(4, 14, 4)  # readmitted: 20 were its own already
    timer.ran(22, 24)
    assert dict(timer.cached) == {"device": 8, "host": 4, "storage": 6}
    assert (timer.computed, timer.recomputed) == (6, 0)


def test_what_is_computed_twice_is_recomputed() -> None:
    timer = RequestTimer(0.0)
    timer.served(4, 0, 0)
    timer.ran(4, 20)
    timer.served(0, 8, 0)
    timer.ran(8, 24)
    assert (timer.cached.total(), timer.computed, timer.recomputed) == (4, 32, 12)


def test_percentiles_are_right_within_a_percent() -> None:
    values = Distribution()
    values.add(None)
    assert values.percentile(50) is None
    for number in range(1, 1001):
        values.add(number / 1000)
    assert values.percentile(50) == pytest.approx(0.5, rel=0.011)
    assert values.percentile(99) == pytest.approx(0.99, rel=0.011)
    values.add(0.0)
    assert values.percentile(0.01) == pytest.approx(1e-9, rel=0.011)


def test_a_run_sums_up_its_requests() -> None:
    timer, run = RequestTimer(0.0), RunMetrics(started=0.0, num_pages=10)
    timer.served(8, 0, 2)
    timer.ran(10, 21)
    timer.token(1.0)
    timer.token(3.0)
    run.ended(timer.result("r", 20, 2, 3.0), "length")
    run.step(used_pages=4, running=1)
    run.step(used_pages=8, running=2)
    report = run.to_json(now=4.0)
    assert report["reused_tokens"] == {"device": 8, "host": 0, "storage": 2}
    assert (report["hit_rate"], report["output_tokens_per_s"], report["tokens_per_s"]) == (0.5, 0.5, 5.5)
    assert report["block_use"] == {"peak": 0.8, "mean": 0.6}
    assert report["tpot_s"]["p99"] == pytest.approx(2.0, rel=0.011)
    assert report["requests"] == {"length": 1} and report["peak_memory_bytes"] > 1 << 20
