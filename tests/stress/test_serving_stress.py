"""Long chats through the engine while everything fails that can, compared with a run without cache.

Seconds of each run are in HICACHE_STRESS_SECONDS. By default both take a minute together: that is several
sessions, hundreds of answers, and each kind of fault. A long run:

    HICACHE_STRESS_SECONDS=600 pytest -s tests/stress/test_serving_stress.py --timeout 1500
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hicache.kernels.base import PageCopy
from hicache.serving.conversations import ConversationOptions
from hicache.serving.scheduler import SchedulerOptions
from hicache.serving.stress import StressOptions, StressReport, check, run_stress
from hicache.serving.weights import load_model

SECONDS = float(os.environ.get("HICACHE_STRESS_SECONDS", "30"))
FLAT = 48 << 20
"""Bytes by which memory may differ between the second session and the last: what allocators keep."""

pytestmark = pytest.mark.stress


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def verify(report: StressReport) -> None:
    check(report)
    run = report.metrics
    assert report.compared > 0 and report.compared_tokens > 0
    assert all(run.reused_tokens[tier] > 0 for tier in ("device", "host", "storage")), run.reused_tokens
    assert run.retractions > 0 and run.recomputed_tokens > 0
    assert run.finished["abort"] > 0 and run.finished["length"] > 0
    assert report.injected["copy"] > 0 and report.counted["copy"] > 0
    assert report.counted["load_unavailable"] > 0 and report.counted["store_unavailable"] > 0
    assert report.memory_growth < FLAT, report.memory_bytes


def test_the_stand_in_checks_every_page(tmp_path: Path) -> None:
    """Fast, so that many conversations pass; every page that is used is checked at every step."""
    options = StressOptions(seconds=SECONDS, sessions=3, session_requests=200)
    report = run_stress(tmp_path / "disk", options, progress=print)
    verify(report)
    assert report.metrics.failed_loads > 0


def test_a_model_gives_the_tokens_of_a_run_without_cache(tmp_path: Path) -> None:
    loaded = load_model("random:seed=3,layers=2,hidden=64,heads=4,kv_heads=2,ffn=96")
    talk = ConversationOptions(
        seed=1, conversations=40, turns=10, context=320, system_tokens=40, tool_tokens=80, user_tokens=20,
        answer_tokens=12,
    )  # fmt: skip
    options = StressOptions(
        seconds=SECONDS,
        sessions=3,
        session_requests=50,
        concurrent=12,
        aborts=0.03,
        device_tokens=640,
        host_tokens=1600,
        disk_tokens=65_536,
        copy_faults=0.01,
        scheduler=SchedulerOptions(policy="dfs_weight", reserve=0.0, patience=4),
        talk=talk,
    )
    verify(run_stress(tmp_path / "disk", options, loaded, progress=print))


def test_a_wrong_answer_is_noticed(tmp_path: Path) -> None:
    """The comparison itself: with KV that changes on its way, the run fails."""
    options = StressOptions(
        seconds=0, sessions=2, session_requests=60, aborts=0.0, disk_faults=0.0, copy_faults=0.0,
        talk=ConversationOptions(conversations=20, turns=5),
    )  # fmt: skip
    broken = replace(options, device_tokens=1552, host_tokens=65_536)
    from hicache.serving import faults

    scatter = faults.FaultyCopier.scatter

    def without_a_layer(self: faults.FaultyCopier, copy: PageCopy, first_plane: int, count: int) -> None:
        if first_plane:  # the first layer stays what it was before
            scatter(self, copy, first_plane, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults.FaultyCopier, "scatter", without_a_layer)
        report = run_stress(tmp_path / "disk", broken)
    assert report.wrong_outputs > 0 and report.wrong_pages > 0 and report.examples
    assert len(report.failures) == 2
