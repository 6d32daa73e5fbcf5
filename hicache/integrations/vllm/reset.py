"""Remove all pages of an engine from the disk, from the scheduler's process."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hicache.config import CacheConfig
from hicache.errors import HiCacheError
from hicache.integrations.vllm.jobs import Hello
from hicache.storage_backends.registry import BackendSpec, create
from hicache.types import Tier

log = logging.getLogger("vllm.hicache")


def clear_stores(config: CacheConfig, hellos: Sequence[Hello]) -> bool:
    """Clear what each rank has on disk; False if one could not be cleared.

    The store is opened for that a second time, as other processes do: what a rank has not written yet was made for
    an older generation of it and is refused.
    """
    section, capacity = config.storage, config.capacity(Tier.STORAGE)
    assert section is not None and capacity is not None
    cleared = True
    for hello in hellos:
        spec = BackendSpec(hello.identity, capacity.budget_bytes, section.folder, config.storage_options())
        try:
            backend = create(section.backend, spec)
            try:
                backend.clear()
            finally:
                backend.close()
        except HiCacheError as error:
            cleared = False
            log.warning("hicache: the store of rank %d could not be cleared: %s", hello.identity.tp_rank, error)
    return cleared
