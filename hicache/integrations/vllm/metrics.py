"""What operators ask of the lower tiers: vLLM writes it to its log, and serves it at /metrics.

| metric                 | type    | label                                         | means                           |
|------------------------|---------|-----------------------------------------------|---------------------------------|
| vllm:hicache_blocks    | counter | event: stored, loaded, persisted, fetched,    | blocks to the host, from it, to |
|                        |         | demoted, discarded, no_room, chain_cut        | disk, from it, out of the host  |
| vllm:hicache_failures  | counter | kind: copy_to_device, copy_to_host,           | copies, and calls of the store  |
|                        |         | store_disk_full, load_timeout, ...            |                                 |
| vllm:hicache_host      | gauge   | blocks: used, total                           | host memory of a rank           |
| vllm:hicache_disk      | gauge   | way: loads, stores                            | 1, or 0 while they are stopped  |

Blocks are those of the whole engine; failures of the store are the sum over the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS = {
    "blocks": ("event", "Blocks moved between tiers, evicted or not kept."),
    "failures": ("kind", "Copies and calls of the store that failed."),
}
GAUGES = {
    "host": ("blocks", "Host memory of a rank, in blocks."),
    "disk": ("way", "1, or 0 while loads from or stores to the disk are stopped."),
}
_BLOCKS = ("stored", "loaded", "persisted", "fetched", "demoted", "discarded", "no_room", "chain_cut")
_COPIES = {"failed_loads": "copy_to_device", "failed_stores": "copy_to_host"}


class TierStats(KVConnectorStats):
    """Values by metric and label: counts since the last report, gauges that have changed since."""

    data: dict[str, dict[str, float]]

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def put(self, metric: str, values: Mapping[str, float]) -> None:
        """Add counts, or set gauges; nothing for no values."""
        if not values:
            return
        known = self.data.setdefault(metric, {})
        for label, value in values.items():
            if metric in COUNTERS:
                known[label] = known.get(label, 0) + value
            else:
                known[label] = value

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Of two ranks, of both sides, or of two intervals: later gauges count, but a disk is only as well as the
        worst."""
        for metric, values in other.data.items():
            if metric == "disk":
                known = self.data.get(metric, {})
                values = {label: min(value, known.get(label, value)) for label, value in values.items()}
            self.put(metric, values)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"{metric}_{label}": value for metric, values in self.data.items() for label, value in values.items()}


class SchedulerMeter:
    """Turns the scheduler's counters, which only grow, into reports."""

    def __init__(self) -> None:
        self._told: Counter[str] = Counter()
        self._used = -1

    def report(self, counters: Counter[str], used: int, total: int) -> TierStats | None:
        """None if nothing has changed. `used` and `total` are blocks of the host."""
        if counters == self._told and used == self._used:
            return None
        new = counters - self._told
        self._told, self._used = counters.copy(), used
        stats = TierStats()
        stats.put("blocks", {name: new[f"{name}_blocks"] for name in _BLOCKS if new[f"{name}_blocks"]})
        stats.put("failures", {label: new[name] for name, label in _COPIES.items() if new[name]})
        stats.put("host", {"used": used, "total": total})
        return stats


class WorkerMeter:
    """A rank's view of its disk."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()
        self._told: tuple[bool, bool] | None = None

    def failed(self, failures: Mapping[str, int]) -> None:
        self._failures.update(failures)

    def report(self, loads_work: bool, stores_work: bool) -> TierStats | None:
        """None if nothing has changed."""
        state = (loads_work, stores_work)
        if not self._failures and state == self._told:
            return None
        stats = TierStats()
        stats.put("failures", self._failures)
        if state != self._told:
            stats.put("disk", {"loads": int(loads_work), "stores": int(stores_work)})
        self._failures, self._told = Counter(), state
        return stats


class TierMetrics(KVConnectorPromMetrics):
    """The metrics of the table above, with vLLM's own labels before theirs."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: kind(name=f"vllm:hicache_{name}", documentation=text, labelnames=[*labelnames, label])
            for kind, table in ((self._counter_cls, COUNTERS), (self._gauge_cls, GAUGES))
            for name, (label, text) in table.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, values in transfer_stats_data.items():
            for label, value in values.items():
                metric = self._metrics[name].labels(*labels, label)
                if name in COUNTERS:
                    metric.inc(value)
                else:
                    metric.set(value)
