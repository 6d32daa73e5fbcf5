"""The storage backend that SGLang's cache controller calls.

| method                            | called from                         |
|-----------------------------------|-------------------------------------|
| batch_exists, batch_exists_v2     | prefetch thread, scheduler          |
| batch_get*                        | io thread                           |
| batch_set*                        | backup thread                       |
| clear, get_stats, close           | scheduler                           |
| register_*, on_host_pools_registered | scheduler, at attach             |
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from hicache.errors import StorageError
from hicache.integrations.sglang.identity import identity_of
from hicache.integrations.sglang.metrics import TransferLog
from hicache.integrations.sglang.options import parse_options
from hicache.integrations.sglang.page_forms import PageBatch, flat_pages, form_of, pages_at
from hicache.integrations.sglang.pool_hits import restorable_prefixes
from hicache.integrations.sglang.pool_store import PoolStore
from hicache.storage_backends.budget import page_cost
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.recovering import RecoveringBackend

log = logging.getLogger(__name__)

KV = PoolName.KV.value


class HiCacheLMDBStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types
    """A `dynamic` HiCache storage backend: the pages of this rank in a store on disk, see docs/sglang.md.

    Raises ConfigError for a mapping that is not right. A disk that fails is a miss.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        self._config = storage_config
        self._options = parse_options(storage_config.extra_config)
        self._stores: dict[str, PoolStore] = {}
        self._transfers = TransferLog()
        self._closed = False
        self._told = False
        self._lock = threading.Lock()

    # ---- pools --------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._open(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._open(str(host_pool_name), host_pool)

    def _open(self, name: str, pool: Any) -> None:
        """Open the namespace of a pool. A store that cannot be opened now is tried again when it is used."""
        if name in self._stores:
            return
        options = self._options
        form = form_of(pool, name)
        identity = identity_of(self._config, options, pool, name, form)

        def open_backend() -> LmdbBackend:
            return LmdbBackend(
                options.folder,
                identity,
                options.size.amount,
                options.values,
                options.durability,
                options.eviction,
                options.ttl or 0.0,
            )

        backend = RecoveringBackend(open_backend, identity)
        try:
            backend.open()
        except StorageError as error:
            log.warning("the store cannot be opened now, SGLang goes on without it: %s", error)
        self._stores[name] = PoolStore(pool, form, identity, backend)
        cost = form.parts * page_cost(identity.layout, options.codec, options.values)
        log.info(
            "pool %r: pages of %d tokens in %s take %d bytes on disk, %s; at most %d of them in %s",
            name, pool.page_size, pool.layout, cost, "read and written in place" if form.in_place else "copied",
            options.size.amount // cost, options.folder,
        )  # fmt: skip

    # ---- single keys, and flat tensors (interface_v1: 0) ----------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location] if target_location is not None else None)[0]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._stores[KV].leading(keys) if KV in self._stores else 0

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Pages as flat tensors, those of `target_locations` if given; None from the first that is missing on."""
        store = self._stores[KV]
        size, dtype = store.form.page_bytes, store.form.dtype
        targets = target_locations or [torch.empty(size, dtype=torch.uint8).view(dtype) for _ in keys]
        if not all(_holds(target, size) for target in targets) or len(targets) != len(keys):
            log.error("batch_get: %d keys came with other than as many targets of %d bytes", len(keys), size)
            return [None] * len(keys)
        count = self._get(store, keys, flat_pages(store.form, store.scratch, targets))
        return [target if number < count else None for number, target in enumerate(targets)]

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        store = self._stores[KV]
        values = values or []
        if len(values) != len(keys) or not all(_holds(value, store.form.page_bytes) for value in values):
            log.error(
                "batch_set: %d keys came with other than as many pages of %d bytes", len(keys), store.form.page_bytes
            )
            return False
        return self._put(store, keys, flat_pages(store.form, store.scratch, values), None) == len(keys)

    # ---- pages in the host pool (interface_v1: 1) -----------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._move(self._get, KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        prefix = extra_info.prefix_keys if extra_info is not None else None
        if prefix is None and not self._told:
            self._told = True
            log.warning(
                "SGLang does not say which page comes before those it stores, so that a prefix may be evicted before "
                'what follows it: put "hicache_storage_pass_prefix_keys": true into the extra config'
            )
        return self._move(
            lambda store, keys, pages: self._put(store, keys, pages, prefix[-1] if prefix else None),
            KV, keys, host_indices,
        )  # fmt: skip

    # ---- several pools --------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        kv_pages = self.batch_exists(keys)
        hits: dict[str, int] = {KV: kv_pages} if kv_pages else {}
        usable = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            if not usable:
                break
            store = self._stores.get(str(transfer.name))
            stored = store.present(keys[:kv_pages]) if store is not None else [False] * kv_pages
            good = restorable_prefixes(stored, transfer)
            if good:
                hits[transfer.name] = max(good)
            usable &= good
        restorable = sorted(usable)
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {
            each.name: self._move(self._get, str(each.name), each.keys or [], each.host_indices) for each in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        def put(store: PoolStore, keys: Sequence[str], pages: PageBatch) -> int:
            return self._put(store, keys, pages, None)

        return {each.name: self._move(put, str(each.name), each.keys or [], each.host_indices) for each in transfers}

    # ---- the whole ------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove the pages of this rank, and of nobody else in the folder. Raises StorageError."""
        removed = sum(store.clear() for store in self._stores.values())
        log.info("cleared %d pages in %s", removed, self._options.folder)

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics of the transfers since the last call; None unless it collects them."""
        return self._transfers.take() if self._config.enable_storage_metrics else None

    def close(self) -> None:
        """Make everything durable and release the files. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for store in self._stores.values():
            try:
                store.close()
            except StorageError as error:
                log.warning("closing the store: %s", error)

    # ---- helpers --------------------------------------------------------------------------------

    def _move(
        self,
        move: Callable[[PoolStore, Sequence[str], PageBatch], int],
        name: str,
        keys: list[str],
        indices: torch.Tensor | None,
    ) -> list[bool]:
        """Which of the pages, at `indices` in the pool `name`, were moved: the leading ones."""
        store = self._stores.get(name)
        if store is None or indices is None or indices.numel() != len(keys) * store.pool.page_size:
            found = "is not registered" if store is None else f"has {0 if indices is None else indices.numel()} slots"
            log.error("%d pages were to be moved, and pool %r %s for them", len(keys), name, found)
            return [False] * len(keys)
        count = move(store, keys, pages_at(store.pool, store.form, store.scratch, indices)) if keys else 0
        return [number < count for number in range(len(keys))]

    def _get(self, store: PoolStore, keys: Sequence[str], pages: PageBatch) -> int:
        began = time.perf_counter()
        count = store.get(keys, pages)
        if self._config.enable_storage_metrics:
            self._transfers.read(count, count * store.form.page_bytes, time.perf_counter() - began)
        return count

    def _put(self, store: PoolStore, keys: Sequence[str], pages: PageBatch, parent: str | None) -> int:
        began = time.perf_counter()
        count = store.put(keys, pages, parent)
        if self._config.enable_storage_metrics:
            self._transfers.wrote(count, count * store.form.page_bytes, time.perf_counter() - began)
        return count


def _holds(tensor: Any, size: int) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.numel() * tensor.element_size() == size
