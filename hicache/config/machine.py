"""Does a configuration fit this machine? Looks only: nothing is created, allocated or written."""

from __future__ import annotations

from collections.abc import Iterator

from hicache.config.models import CacheConfig, HostTier
from hicache.errors import CapacityError, ConfigError
from hicache.host_pool.arena import huge_page_problem
from hicache.host_pool.numa import node_problem
from hicache.host_pool.pinning import resolve_pinned
from hicache.types import Tier


def check_machine(config: CacheConfig, device: str | None = None) -> None:
    """Check memory, its placement and the store's folder.

    `device` is what `device: auto` turned out to be, where that is known.
    Raises ConfigError, one line with the place, the numbers and the mend.
    """
    device = device or config.device.device
    _check_memory(config, device)
    _check_placement(config, device)
    _check_store(config)


def host_memory_bytes(config: CacheConfig, device: str) -> int:
    """Bytes of machine memory that all pools of all local ranks take; a device pool that may be on the CPU counts."""
    host = config.capacity(Tier.HOST)
    pools = [host] if host else []
    if device in ("cpu", "auto") and (on_cpu := config.capacity(Tier.DEVICE)):
        pools.append(on_cpu)
    ranks = config.host.local_ranks if config.host else 1
    return ranks * sum(pool.nbytes for pool in pools)


def _check_memory(config: CacheConfig, device: str) -> None:
    from hicache.host_pool.budget import check_host_budget

    host, on_device = config.capacity(Tier.HOST), config.capacity(Tier.DEVICE)
    tier = Tier.HOST if host is not None else Tier.DEVICE
    if host is not None and on_device is not None and device in ("cpu", "auto") and on_device.nbytes > host.nbytes:
        tier = Tier.DEVICE  # the one to make smaller
    index = config.index_of(tier)
    assert index is not None
    try:
        check_host_budget(host_memory_bytes(config, device))
    except CapacityError as error:
        raise ConfigError(f"{config.where('tiers', index, 'size')}: {error}") from None


def _check_placement(config: CacheConfig, device: str) -> None:
    index = config.index_of(Tier.HOST)
    if index is None or config.host is None:
        return
    for key, problem in _placement_problems(config.host, device):
        raise ConfigError(f"{config.where('tiers', index, key)}: {problem}")


def _placement_problems(host: HostTier, device: str) -> Iterator[tuple[str, str]]:
    if device != "auto":  # then nobody has looked for a GPU yet
        try:
            resolve_pinned(host.pinned, device)
        except ConfigError as error:
            yield "pinned", str(error)
    if host.huge_pages and (problem := huge_page_problem()):
        yield "huge_pages", problem
    if isinstance(host.numa, int) and (problem := node_problem(host.numa)):
        yield "numa", problem


def _check_store(config: CacheConfig) -> None:
    from hicache.storage_backends.filesystem import access_problem, room_problem
    from hicache.storage_backends.lmdb_open import is_own

    index, plan = config.index_of(Tier.STORAGE), config.store_plan()
    folder = config.storage.folder if config.storage else None
    if index is None or folder is None:
        return
    if problem := access_problem(folder, is_own):
        raise ConfigError(f"{config.where('tiers', index, 'path')}: {problem}")
    if plan is not None and (problem := room_problem(folder, plan.budget_bytes, plan.file_bytes)):
        raise ConfigError(f"{config.where('tiers', index, 'size')}: {problem}")
