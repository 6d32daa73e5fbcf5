"""What vLLM logs and serves at /metrics of the lower tiers."""

from __future__ import annotations

from collections import Counter as Count
from functools import partial
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hicache.integrations.vllm.connector import HiCacheConnector
from hicache.integrations.vllm.metrics import SchedulerMeter, TierStats, WorkerMeter


def test_a_scheduler_reports_what_is_new() -> None:
    meter, counters = SchedulerMeter(), Count({"stored_blocks": 3, "failed_loads": 1})
    first = meter.report(counters, used=3, total=8)
    assert first is not None
    assert first.data == {
        "blocks": {"stored": 3},
        "failures": {"copy_to_device": 1},
        "host": {"used": 3, "total": 8},
    }
    assert meter.report(counters, used=3, total=8) is None
    counters["stored_blocks"] += 2
    second = meter.report(counters, used=5, total=8)
    assert second is not None and second.data == {"blocks": {"stored": 2}, "host": {"used": 5, "total": 8}}


def test_a_rank_reports_failures_and_when_its_disk_stops() -> None:
    meter = WorkerMeter()
    first = meter.report(True, True)
    assert first is not None and first.data == {"disk": {"loads": 1, "stores": 1}}
    assert meter.report(True, True) is None
    meter.failed({"store_disk_full": 2})
    second = meter.report(True, False)
    assert second is not None
    assert second.data == {"failures": {"store_disk_full": 2}, "disk": {"loads": 1, "stores": 0}}
    assert meter.report(True, False) is None


def test_counts_of_ranks_add_up_and_the_worst_disk_shows() -> None:
    one = TierStats({"failures": {"store_timeout": 1}, "disk": {"loads": 0, "stores": 1}, "host": {"used": 4}})
    two = TierStats({"failures": {"store_timeout": 2}, "disk": {"loads": 1, "stores": 0}, "host": {"used": 6}})
    both = one.aggregate(two)
    assert both.reduce() == {"failures_store_timeout": 3, "disk_loads": 0, "disk_stores": 0, "host_used": 6}
    assert not both.is_empty() and TierStats().is_empty()
    both.reset()
    assert both.is_empty()


def test_what_is_reported_can_be_scraped() -> None:
    """Over the way that vLLM takes: as plain data to another process, then by engine."""
    registry = CollectorRegistry()

    def bound(kind: Any) -> Any:
        return partial(kind, registry=registry)

    class Config:
        kv_transfer_config = None

    stats = TierStats({"blocks": {"stored": 3}, "host": {"used": 3, "total": 8}, "disk": {"loads": 0}})
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    again = HiCacheConnector.build_kv_connector_stats(sent)
    assert again is not None and again.reduce() == stats.reduce()
    config: Any = Config()
    kinds = {kind: bound(kind) for kind in (Counter, Gauge, Histogram)}
    metrics = HiCacheConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
    metrics.observe(sent)
    metrics.observe(sent)
    page = generate_latest(registry).decode()
    assert 'vllm:hicache_blocks_total{engine="0",event="stored"} 6.0' in page
    assert 'vllm:hicache_host{blocks="used",engine="0"} 3.0' in page
    assert 'vllm:hicache_disk{engine="0",way="loads"} 0.0' in page
