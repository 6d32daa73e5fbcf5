"""From a configuration to a running cache."""

from __future__ import annotations

from contextlib import ExitStack

from hicache.cache import HiCache
from hicache.config.machine import check_machine
from hicache.config.models import CacheConfig
from hicache.device_pool import DevicePool, ReqToTokenPool, TokenToKVPoolAllocator, resolve_device
from hicache.errors import BadInput, CapacityError, ConfigError, StorageError
from hicache.host_pool.arena import Placement
from hicache.host_pool.numa import resolve_numa
from hicache.host_pool.pinning import CudaRegistrar, resolve_pinned
from hicache.host_pool.pool import HostPool
from hicache.policies.admission import AdmissionPolicy
from hicache.policies.write import WritePolicy
from hicache.prefetch import PrefetchPolicy
from hicache.requests import RequestManager
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
        storage = _storage(config)
        if storage is not None:
            undo.callback(storage.engine.close, _CLOSE_SECONDS)
        pool = DevicePool(layout, capacity.num_pages, device)
        tiers = Tiers(
            identity=config.identity(),
            tree=RadixTree(layout.page_size, config.device.eviction, config.host.eviction if config.host else "lru"),
            device_pool=pool,
            device_allocator=TokenToKVPoolAllocator(capacity.num_pages, layout.page_size),
            poison=config.poison,
            storage=storage,
            eviction=_eviction(config),
        )
        tiers.host = _host(config, pool, undo)
        undo.pop_all()  # all is made: nothing to undo
    prefetch = config.storage.prefetch if config.storage is not None else None
    policy = PrefetchPolicy(prefetch.policy, prefetch.deadline, prefetch.min_pages) if prefetch else None
    return HiCache(tiers, prefetch=policy)


def _host(config: CacheConfig, pool: DevicePool, undo: ExitStack) -> HostTier | None:
    section, capacity, index = config.host, config.capacity(Tier.HOST), config.index_of(Tier.HOST)
    if section is None or capacity is None or index is None:
        return None
    pinned = resolve_pinned(section.pinned, pool.device)
    placement = Placement(section.huge_pages, resolve_numa(section.numa, pool.device))
    registrar = CudaRegistrar(pool.device) if pinned else None
    try:
        host_pool = HostPool(pool.layout, capacity.num_pages, pinned, placement, registrar)
        undo.callback(host_pool.close)
        copies = CopyEngine.between(pool, host_pool)
    except (ConfigError, CapacityError) as error:
        raise type(error)(f"{config.where('tiers', index)}: {error}") from error
    return HostTier(host_pool, copies, WritePolicy(section.write, section.selective_hits))


def _eviction(config: CacheConfig) -> dict[str, str]:
    names = {"device": config.device.eviction}
    if config.host is not None:
        names["host"] = config.host.eviction
    if config.storage is not None and config.storage.backend == "lmdb":  # others have a way of their own
        names["storage"] = config.storage.eviction
    return dict(names)


def _storage(config: CacheConfig) -> StorageTier | None:
    section = config.storage
    capacity = config.capacity(Tier.STORAGE)
    index = config.index_of(Tier.STORAGE)
    if section is None or capacity is None or index is None:
        return None
    options = config.storage_options()
    field = "path" if section.backend in names() else "backend"
    spec = BackendSpec(config.identity(), capacity.budget_bytes, section.folder, options)
    backend = RecoveringBackend(lambda: create(section.backend, spec))
    failure: StorageError | None = None
    try:
        backend.open()
    except BadInput as error:
        raise type(error)(f"{config.where('tiers', index, field)}: {error}") from error
    except StorageError as error:
        failure = error
    limits = EngineLimits(config.queue_bytes(), section.queue_time, section.load_deadline, section.store_deadline)
    engine = StorageEngine(backend, config.page_size, limits, section.threads)
    if failure is not None:
        engine.trip(failure)  # serving starts without it; it is tried again
    admission = section.admission
    policy = AdmissionPolicy(admission.policy, admission.min_hits, admission.min_priority)
    return StorageTier(engine, WritePolicy(section.write), policy)


def build_requests(cache: HiCache, max_requests: int = 256) -> RequestManager:
    """A request manager whose requests may be as long as the device pool."""
    num_pages = cache.tiers.device_allocator.num_pages
    return RequestManager(cache, ReqToTokenPool(max_requests, num_pages * cache.page_size, cache.page_size))
