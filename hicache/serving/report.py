"""What a report says of a run besides its figures."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from hicache import __version__
from hicache.cache import HiCache
from hicache.serving.devices import device_name
from hicache.serving.executor import Model
from hicache.serving.scheduler import SchedulerOptions
from hicache.stats import CacheStats


def evidence(model: Model, cache: HiCache, options: SchedulerOptions, seed: int | None) -> dict[str, Any]:
    """Everything needed to run it again: model, policies, sizes (in tokens unless named otherwise), seed, commit."""
    tiers = cache.tiers
    sizes: dict[str, int | None] = {"device": tiers.device_allocator.num_pages * cache.page_size}
    policies = {"queue": options.policy, **{f"{tier}_eviction": name for tier, name in tiers.eviction.items()}}
    if tiers.host is not None:
        sizes["host"] = tiers.host.pool.num_pages * cache.page_size
        policies["host_write"] = tiers.host.write.mode
        policies["host_codec"] = tiers.host.pool.format.codec
    if tiers.storage is not None:
        policies["storage_write"] = tiers.storage.write.mode
        policies["storage_codec"] = tiers.identity.codec
        usage = tiers.storage.engine.usage()
        sizes["storage_bytes"] = usage.budget_bytes if usage is not None else None
    return {
        "model": model.name,
        "weights_digest": tiers.identity.weights_digest,
        "dtype": model.dtype,
        "policy": policies,
        "sizes": sizes,
        "page_size": cache.page_size,
        "scheduler": asdict(options),
        "seed": seed,
        "version": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "device": device_name(tiers.device_pool.device),
    }


@lru_cache(maxsize=1)
def commit() -> str | None:
    """The commit that this package was checked out from, with "+" if files differ from it; None outside of one."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        head, changes = (
            subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, timeout=10, check=True).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.strip() + ("+" if changes.strip() else "")


def cache_json(stats: CacheStats) -> dict[str, Any]:
    """A snapshot of the cache's counters as plain values."""
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in asdict(stats).items()}
