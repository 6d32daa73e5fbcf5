"""The connector with failures on demand: HICACHE_TEST_FAULTS is a list of words.

| word           | fails                                                                     |
|----------------|---------------------------------------------------------------------------|
| loads=N        | the first N loads to the device, when their first layer is there          |
| stores=N       | the first N stores to the host                                            |
| dead-disk=N    | every call of the disk after the first N                                  |
| hanging-disk=N | the same, but the calls take a minute                                     |
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from hicache.errors import StoreUnavailableError
from hicache.integrations.vllm import HiCacheConnector
from hicache.kernels.base import PageCopier, PageCopy
from hicache.storage_backends.base import PageRun, StorageBackend, StorageUsage
from hicache.types import PageIndices


def faults() -> dict[str, int]:
    words = os.environ.get("HICACHE_TEST_FAULTS", "").split()
    return {name: int(number) for name, number in (word.split("=") for word in words)}


class FaultyCopy:
    def __init__(self, inner: PageCopy, left: dict[str, int]) -> None:
        self._inner, self._left = inner, left

    def gather(self) -> None:
        self._fail("stores")
        self._inner.gather()

    def scatter(self, first_plane: int, count: int) -> None:
        if first_plane:
            self._fail("loads")  # the first layer has arrived by then
        self._inner.scatter(first_plane, count)

    def _fail(self, what: str) -> None:
        if self._left.get(what, 0) > 0:
            self._left[what] -= 1
            raise RuntimeError(f"{what} fail for a test")


class FaultyCopier:
    def __init__(self, inner: PageCopier, left: dict[str, int]) -> None:
        self._inner, self._left = inner, left

    def copy(self, device_pages: PageIndices, host_pages: PageIndices) -> FaultyCopy:
        return FaultyCopy(self._inner.copy(device_pages, host_pages), self._left)


class DyingDisk(StorageBackend):
    def __init__(self, inner: StorageBackend, good_calls: int, seconds: float) -> None:
        self._inner, self._good, self._seconds = inner, good_calls, seconds

    def _call(self) -> StorageBackend:
        self._good -= 1
        if self._good < 0:
            time.sleep(self._seconds)
            raise StoreUnavailableError("the disk died for a test", "io_error")
        return self._inner

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        return self._call().contains_prefix(keys)

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        return self._call().read_into(keys, buffers)

    def write(self, runs: Sequence[PageRun]) -> list[int]:
        return self._call().write(runs)

    def delete(self, keys: Sequence[bytes]) -> int:
        return self._call().delete(keys)

    def clear(self) -> int:
        return self._call().clear()

    def generation(self) -> int:
        return self._inner.generation()

    def usage(self) -> StorageUsage:
        return self._inner.usage()

    def close(self) -> None:
        self._inner.close()


class FaultyConnector(HiCacheConnector):
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        wanted = faults()
        worker: Any = self._worker
        worker._copies.wrap_copier(lambda copier: FaultyCopier(copier, wanted))
        for word, seconds in (("dead-disk", 0.0), ("hanging-disk", 60.0)):
            if word in wanted:
                engine = worker._storage.engine
                engine.backend = DyingDisk(engine.backend, wanted[word], seconds)
