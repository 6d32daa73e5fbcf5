"""vLLM's connector interface: every call goes to the scheduler's or to the worker's side."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from hicache.config import CacheConfig
from hicache.integrations.vllm.events import EventLog
from hicache.integrations.vllm.identity import check_hashes, scheduler_facts, unsupported, worker_facts
from hicache.integrations.vllm.jobs import Hello, StepPlan, WorkerReport
from hicache.integrations.vllm.metrics import TierMetrics, TierStats
from hicache.integrations.vllm.reset import clear_stores
from hicache.integrations.vllm.scheduler import CacheScheduler
from hicache.integrations.vllm.settings import config_file, load_settings
from hicache.integrations.vllm.worker import RankWorker, block_views

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.hicache")


class HiCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """Host and disk tiers under vLLM's block pool.

    One object in the scheduler's process and one in each worker's; they talk through `StepPlan`, `WorkerReport`
    and `Hello` only. Loads are asynchronous: a request is scheduled when its blocks are there. Stores end with
    the step that computed them.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config  # type: ignore[union-attr]
        self._path = config_file(extra)
        self._config = vllm_config
        self._cache = kv_cache_config
        self._hellos: list[Hello] = []
        self._settings: CacheConfig | None = None
        self._scheduler: CacheScheduler | None = None
        self._worker: RankWorker | None = None
        problem = unsupported(vllm_config, kv_cache_config)
        self._off = problem is not None
        if problem is not None:
            if role is KVConnectorRole.SCHEDULER:
                log.warning("hicache: nothing is cached on lower tiers: %s", problem)
        elif role is KVConnectorRole.SCHEDULER:
            self._settings = load_settings(self._path, scheduler_facts(vllm_config, kv_cache_config))
            if self._settings.storage is not None:
                check_hashes(vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not stored is a miss later on."""
        return False

    # ---- worker's side ----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._off:
            return
        blocks = block_views(self._cache, kv_caches)
        facts = worker_facts(self._config, self._cache, str(blocks[0].device))
        self._worker = RankWorker(load_settings(self._path, facts), blocks)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.hello if self._worker is not None else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(self._bound_plan())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._bound_plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs when all of its layers are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing by layer: blocks are copied whole, at the end of the step."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.store(self._bound_plan())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        self._worker.rest(self._bound_plan())
        return None, self._worker.finished_loads()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.failed_blocks() if self._worker is not None else set()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Of this side."""
        side = self._worker or self._scheduler
        return side.stats() if side is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return TierStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return TierMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.report() if self._worker is not None else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _bound_plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    # ---- scheduler's side -------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All ranks are there: how many pages they have, and whose disk pages are theirs."""
        if self._settings is None:  # the model is not supported: the engine serves without lower tiers
            return
        self._hellos = [hello for hello in metadata.values() if isinstance(hello, Hello)]
        kv_events = self._config.kv_events_config
        enabled = kv_events is not None and kv_events.enable_kv_cache_events
        events = EventLog(enabled, self._settings.page_size)
        self._scheduler = CacheScheduler(self._settings, self._hellos, events)
        policy = self._config.kv_transfer_config.kv_load_failure_policy  # type: ignore[union-attr]
        if policy != "recompute":
            log.warning("hicache: kv_load_failure_policy is %s: with recompute no request fails by a load", policy)

    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.added(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        if self._scheduler is None or not num_external_tokens:
            return {}
        host, disk = self._scheduler.sources(request)
        counts = {CacheHitSource.HOST: host, CacheHitSource.DISK: disk}
        return {source: count for source, count in counts.items() if count}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.step(scheduler_output) if self._scheduler is not None else StepPlan()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(report, WorkerReport):
            self._scheduler.report(report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler.events.take() if self._scheduler is not None else ()

    def reset_cache(self) -> bool | None:
        """Forget everything on all lower tiers. False if the disk does not answer: it is not asked any more then,
        until a reset works."""
        if self._scheduler is None or self._settings is None:
            return True
        self._scheduler.reset()
        if self._settings.storage is None:
            return True
        self._scheduler.disk = clear_stores(self._settings, self._hellos)
        return self._scheduler.disk
