"""A replay on a virtual clock: the real tree, policies, tiers and scheduler, and a model of how long everything takes.

    simulate(config, trace, costs) -> SimResult

Nothing of the cache is implemented twice. Replaced are: bytes (`sim.unbacked`), streams and time (`sim.virtual`),
the threads of the storage engine (`sim.storage_workers`), the index of the LMDB tier (`sim.store_model`) and the
model (`sim.modelled_compute`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from hicache.build import build_requests, prefetch_policy, wire_host, wire_storage, wire_tiers
from hicache.cache import HiCache
from hicache.config.models import CacheConfig
from hicache.costs import Costs
from hicache.device_pool import DevicePool
from hicache.errors import ConfigError
from hicache.host_pool.pool import POISON_BYTE, HostPool
from hicache.kernels.dispatch import bind
from hicache.requests import Request
from hicache.sim.compute import Compute, StandInCompute
from hicache.sim.driver import Progress, Replay, ignore_progress
from hicache.sim.modelled_compute import ModelledCompute
from hicache.sim.options import ReplayOptions, SimOptions
from hicache.sim.ports import ReplayTarget
from hicache.sim.result import ReplayResult, RequestTiming
from hicache.sim.standin import StandIn
from hicache.sim.storage_workers import VirtualWorkers
from hicache.sim.store_model import StoreModel, UnbackedMemory
from hicache.sim.timeline import VirtualTime
from hicache.sim.unbacked import TimedCopier, UnbackedDevicePool, UnbackedHostPool
from hicache.sim.virtual import VirtualClock, VirtualStream
from hicache.sim.workload import TraceRequest
from hicache.stats import CacheStats
from hicache.storage_backends.base import StorageBackend
from hicache.storage_backends.budget import BudgetPlan, page_cost
from hicache.storage_backends.codecs import quantiser_of
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.memory import MemoryBackend
from hicache.transfer.copy_engine import CopyEngine
from hicache.types import Tier


@dataclass(frozen=True)
class Distribution:
    """Of a duration over all requests, in seconds."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """All 0 without values."""
        array = np.array(values or [0.0])
        return cls(float(array.mean()), float(np.percentile(array, 50)), float(np.percentile(array, 99)))


@dataclass(frozen=True)
class SimResult:
    """What a simulation found. `virtual_seconds`: from the first arrival until the last request has finished; `busy`:
    seconds of it that compute and each edge between tiers worked. `timings` has every request."""

    replay: ReplayResult
    stats: CacheStats
    timings: Sequence[RequestTiming]
    ttft: Distribution
    queued: Distribution
    virtual_seconds: float
    busy: Mapping[str, float]

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens simulated in a second of the machine's time."""
        return self.replay.prompt_tokens / max(self.replay.seconds, 1e-9)


DEFAULTS = SimOptions()


def simulate(
    config: CacheConfig,
    trace: Iterable[TraceRequest],
    costs: Costs,
    options: SimOptions = DEFAULTS,
    progress: Progress = ignore_progress,
    observe: Callable[[HiCache], object] = lambda cache: None,
) -> SimResult:
    """Replay `trace` through the tiers of `config` on a virtual clock; `observe` gets the cache before it begins.

    The same arguments give the same result. Raises ConfigError for a storage backend that cannot be modelled,
    CapacityError if the device is too small for anything to move, IntegrityError as a replay does.
    """
    with ExitStack() as undo:
        simulation = _Simulation(config, costs, options, undo)
        observe(simulation.cache)
        return simulation.run(trace, progress)


class _Simulation:
    """The wired parts of one simulation."""

    def __init__(self, config: CacheConfig, costs: Costs, options: SimOptions, undo: ExitStack) -> None:
        self._config = config
        self._costs = costs
        self._options = options
        self._undo = undo
        self._clock = VirtualClock()
        self._compute, self._d2h, self._h2d = (VirtualStream(self._clock, name) for name in ("compute", "d2h", "h2d"))
        self._workers: VirtualWorkers | None = None
        self.cache = self._build()

    def run(self, trace: Iterable[TraceRequest], progress: Progress) -> SimResult:
        cache, options = self.cache, self._options
        allocator, pool = cache.tiers.device_allocator, cache.tiers.device_pool
        requests = build_requests(cache, options.replay.max_running)
        context = allocator.num_pages * cache.page_size
        target = ReplayTarget(cache, requests, Request, allocator, pool, self._compute, context)
        inner: Compute | None = None
        if options.bytes_in is not None:
            standin = StandIn(pool.layout, POISON_BYTE)
            stream = VirtualStream(self._clock, "bytes")
            inner = StandInCompute(requests, pool, stream, standin, options.replay.verify)
        compute = ModelledCompute(self._compute, self._costs, pool.layout.num_layers, inner)
        policy = prefetch_policy(self._config)
        deadline = policy.deadline if policy is not None and policy.mode != "best_effort" else None
        timeline = VirtualTime(self._clock, options.speed)
        replay = Replay(target, compute, timeline, self._scheduling(), progress, deadline)
        result = replay.run(trace)
        return self._result(result, replay.timings)

    def _scheduling(self) -> ReplayOptions:
        """Answers advance as far as the decode of a step is no longer than its prefill."""
        options, costs = self._options.replay, self._costs
        if options.mixed_decode_tokens is not None or not costs.decode_step:
            return options
        passes = int(costs.prefill.seconds(0, options.chunk_tokens) / costs.decode_step)
        return replace(options, mixed_decode_tokens=max(1, min(passes, options.decode_tokens)))

    def _result(self, result: ReplayResult, timings: Sequence[RequestTiming]) -> SimResult:
        busy = {"compute": self._compute.busy, "device_host": self._d2h.busy, "host_device": self._h2d.busy}
        if self._workers is not None:
            busy |= {"host_storage": self._workers.writes.busy, "storage_host": self._workers.reads.busy}
        begun = min((timing.arrived for timing in timings), default=0.0)
        ended = max((timing.finished for timing in timings), default=0.0)
        return SimResult(
            replay=result,
            stats=self.cache.stats(),
            timings=timings,
            ttft=Distribution.of([timing.ttft for timing in timings]),
            queued=Distribution.of([timing.queued for timing in timings]),
            virtual_seconds=ended - begun,
            busy=busy,
        )

    # ---- the tiers --------------------------------------------------------------------------

    def _build(self) -> HiCache:
        config, layout = self._config, self._config.layout()
        capacity = config.capacity(Tier.DEVICE)
        assert capacity is not None
        real = self._options.bytes_in is not None
        pool = DevicePool(layout, capacity.num_pages) if real else UnbackedDevicePool(layout, capacity.num_pages)
        tiers = wire_tiers(config, pool, self._costs)
        host = config.capacity(Tier.HOST)
        if host is not None:
            host_pool = self._host_pool(host.num_pages)
            inner = bind(pool.planes, host_pool.array, False, quantiser_of(host_pool.format)) if real else None
            copier = TimedCopier(host_pool.format, self._costs, self._d2h, self._h2d, inner)
            tiers.host = wire_host(config, host_pool, CopyEngine(host_pool.format, copier, self._d2h, self._h2d))
        if config.storage is not None:
            tiers.storage = wire_storage(config, self._backend(), 0, self._clock)
            self._workers = VirtualWorkers(
                tiers.storage.engine, self._clock, self._costs, self._stored_bytes(), config.storage.threads
            )
            self._clock.before_pause = self._workers.start
        return HiCache(tiers, prefetch=prefetch_policy(config), clock=self._clock)

    def _host_pool(self, num_pages: int) -> HostPool:
        form = self._config.host_format()
        if self._options.bytes_in is None:
            return UnbackedHostPool(form, num_pages)
        pool = HostPool(form.layout, num_pages, codec=form.codec)
        self._undo.callback(pool.close)
        return pool

    def _stored_bytes(self) -> int:
        storage = self._config.storage
        assert storage is not None
        if storage.backend != "lmdb":
            return self._config.host_format().page_stride
        return page_cost(self._config.layout(), self._config.stored_codec, storage.values)

    def _backend(self) -> StorageBackend:
        config, storage = self._config, self._config.storage
        capacity = config.capacity(Tier.STORAGE)
        assert storage is not None and capacity is not None
        if storage.backend not in ("lmdb", "memory"):
            index = config.index_of(Tier.STORAGE)
            assert index is not None
            raise ConfigError(
                f"{config.where('tiers', index, 'backend')}: a replay without bytes knows how lmdb and memory keep "
                f"pages, and not {storage.backend!r}: use one of these"
            )
        real = self._options.bytes_in
        if storage.backend == "memory":
            kind = UnbackedMemory if real is None else MemoryBackend
            return kind(config.identity(), capacity.budget_bytes)
        if real is None:
            options = {name: value for name, value in config.storage_options().items() if name in _STORE_RULES}
            plan = BudgetPlan(storage.values, capacity.budget_bytes, capacity.page_bytes)
            return StoreModel(plan, **options, clock=self._clock)
        backend = LmdbBackend(
            real, config.identity(), capacity.budget_bytes, **config.storage_options(), clock=self._clock
        )
        self._undo.callback(backend.close)
        return backend


_STORE_RULES = ("eviction", "ttl", "quota_bytes")
