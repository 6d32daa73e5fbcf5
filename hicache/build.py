"""From a configuration to a running cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from hicache.cache import HiCache
from hicache.config.cost_model import costs_of
from hicache.config.machine import check_machine
from hicache.config.models import CacheConfig
from hicache.costs import Costs
from hicache.decisions import DecisionLog
from hicache.device_pool import DevicePool, ReqToTokenPool, TokenToKVPoolAllocator, resolve_device
from hicache.errors import BadInput, CapacityError, ConfigError, StorageError
from hicache.host_pool.arena import Placement
from hicache.host_pool.numa import resolve_numa
from hicache.host_pool.pinning import CudaRegistrar, resolve_pinned
from hicache.host_pool.pool import HostPool
from hicache.load_choice import LoadChoice, PageSizes
from hicache.policies.admission import AdmissionPolicy
from hicache.policies.write import WritePolicy
from hicache.prefetch import PrefetchPolicy
from hicache.requests import RequestManager
from hicache.storage_backends.base import StorageBackend
from hicache.storage_backends.recovering import RecoveringBackend
from hicache.storage_backends.registry import BackendSpec, create, names
from hicache.tiers import HostTier, StorageTier, Tiers
from hicache.transfer.copy_engine import CopyEngine
from hicache.transfer.storage_engine import EngineLimits, StorageEngine
from hicache.tree.radix_tree import RadixTree
from hicache.types import Tier

_CLOSE_SECONDS = 5.0
"""For a store that was opened for a cache that could not be made."""


def build_cache(config: CacheConfig) -> HiCache:
    """Allocate pools, start streams and open the store. Raises ConfigError with the place in the file.

    Nothing is left behind if a part cannot be made: the store is opened before memory is taken. A store that
    cannot be opened now, through no fault of the configuration, is tried again later.
    """
    device = resolve_device(config.device.device)
    check_machine(config, device)
    capacity = config.capacity(Tier.DEVICE)
    assert capacity is not None
    layout = config.layout()
    with ExitStack() as undo:
        storage = build_storage(config)
        if storage is not None:
            undo.callback(storage.engine.close, _CLOSE_SECONDS)
        pool = DevicePool(layout, capacity.num_pages, device)
        tiers = wire_tiers(config, pool)
        tiers.storage = storage
        tiers.host = _host(config, pool, undo)
        undo.pop_all()  # all is made: nothing to undo
    return HiCache(tiers, prefetch=prefetch_policy(config))


def wire_tiers(config: CacheConfig, pool: DevicePool, costs: Costs | None = None) -> Tiers:
    """The tree, and the device tier over `pool`; no lower tier yet. `costs` in place of the configuration's."""
    return Tiers(
        identity=config.identity(),
        tree=_tree(config),
        device_pool=pool,
        device_allocator=TokenToKVPoolAllocator(pool.num_pages, config.page_size),
        poison=config.poison,
        eviction=_eviction(config),
        loads=wire_loads(config, costs),
        decisions=DecisionLog(config.decision_log, config.page_size),
    )


def _tree(config: CacheConfig) -> RadixTree:
    host = config.host
    queue_aware = {Tier.DEVICE} if config.device.queue_aware else set()
    if host is not None and host.queue_aware:
        queue_aware.add(Tier.HOST)
    return RadixTree(config.page_size, config.device.eviction, host.eviction if host else "lru", queue_aware)


def wire_loads(config: CacheConfig, costs: Costs | None = None) -> LoadChoice:
    """What is loaded and what recomputed; `costs` in place of the configuration's.

    Raises ConfigError if that is to be weighed and the costs are not known.
    """
    load = config.load
    if costs is None and load.policy == "auto":
        costs = costs_of(config)
    form, storage = config.host_format(), config.capacity(Tier.STORAGE)
    stored = storage.page_bytes if storage is not None else 0
    pages = PageSizes(config.page_size, form.page_bytes, stored)
    return LoadChoice(load.policy, costs, pages, load.hysteresis)


def prefetch_policy(config: CacheConfig) -> PrefetchPolicy | None:
    """How requests wait for storage; None without a storage tier."""
    prefetch = config.storage.prefetch if config.storage is not None else None
    return PrefetchPolicy(prefetch.policy, prefetch.deadline, prefetch.min_pages) if prefetch else None


def wire_storage(
    config: CacheConfig, backend: StorageBackend, threads: int, clock: Callable[[], float] = time.monotonic
) -> StorageTier:
    """The storage tier over an open backend, which the configuration has."""
    section = config.storage
    assert section is not None
    limits = EngineLimits(config.queue_bytes(), section.queue_time, section.load_deadline, section.store_deadline)
    engine = StorageEngine(backend, config.page_size, limits, threads, clock)
    admission = section.admission
    policy = AdmissionPolicy(admission.policy, admission.min_hits, admission.min_priority)
    return StorageTier(engine, WritePolicy(section.write), policy)


def _host(config: CacheConfig, pool: DevicePool, undo: ExitStack) -> HostTier | None:
    section, capacity, index = config.host, config.capacity(Tier.HOST), config.index_of(Tier.HOST)
    if section is None or capacity is None or index is None:
        return None
    pinned = resolve_pinned(section.pinned, pool.device)
    placement = Placement(section.huge_pages, resolve_numa(section.numa, pool.device))
    registrar = CudaRegistrar(pool.device) if pinned else None
    try:
        host_pool = HostPool(pool.layout, capacity.num_pages, pinned, placement, registrar, section.codec)
        undo.callback(host_pool.close)
        copies = CopyEngine.between(pool, host_pool)
    except (ConfigError, CapacityError) as error:
        raise type(error)(f"{config.where('tiers', index)}: {error}") from error
    return wire_host(config, host_pool, copies)


def wire_host(config: CacheConfig, pool: HostPool, copies: CopyEngine) -> HostTier:
    """The host tier over its pool and the copies to and from it; the configuration has one."""
    section = config.host
    assert section is not None
    return HostTier(pool, copies, WritePolicy(section.write, section.selective_hits))


def _eviction(config: CacheConfig) -> dict[str, str]:
    names = {"device": config.device.eviction}
    if config.host is not None:
        names["host"] = config.host.eviction
    if config.storage is not None and config.storage.backend == "lmdb":  # others have a way of their own
        names["storage"] = config.storage.eviction
    return dict(names)


def build_storage(config: CacheConfig) -> StorageTier | None:
    """The storage tier of a configuration, opened; None without one. See `build_cache`."""
    section = config.storage
    capacity = config.capacity(Tier.STORAGE)
    index = config.index_of(Tier.STORAGE)
    if section is None or capacity is None or index is None:
        return None
    options = config.storage_options()
    field = "path" if section.backend in names() else "backend"
    spec = BackendSpec(config.identity(), capacity.budget_bytes, section.folder, options)
    backend = RecoveringBackend(lambda: create(section.backend, spec), spec.identity)
    failure: StorageError | None = None
    try:
        backend.open()
    except BadInput as error:
        raise type(error)(f"{config.where('tiers', index, field)}: {error}") from error
    except StorageError as error:
        failure = error
    tier = wire_storage(config, backend, section.threads)
    if failure is not None:
        tier.engine.trip(failure)  # serving starts without it; it is tried again
    return tier


def build_requests(cache: HiCache, max_requests: int = 256) -> RequestManager:
    """A request manager whose requests may be as long as the device pool."""
    num_pages = cache.tiers.device_allocator.num_pages
    return RequestManager(cache, ReqToTokenPool(max_requests, num_pages * cache.page_size, cache.page_size))
