"""Backends around backends: failures on demand, latency on demand."""

from __future__ import annotations

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Protocol

from hicache.errors import StoreUnavailableError
from hicache.storage_backends.base import PageRun, StorageBackend, StorageUsage


class Fault(str, Enum):
    """What can happen to one call.

    ERROR: it raises StoreUnavailableError and does nothing. SHORT: it does the first half of its
    pages. CORRUPT (reads): the last page asked for is damaged on the medium before it is read.
    """

    ERROR = "error"
    SHORT = "short"
    CORRUPT = "corrupt"


class Damageable(Protocol):
    """A backend whose stored pages can be damaged for a drill."""

    def flip_byte(self, key: bytes) -> bool: ...


class FaultyBackend(StorageBackend):
    """Calls fail as scripted for their operation, else at random with probability `rate` (seeded).

    Operations are named as the methods are. `medium` is what CORRUPT damages, usually the inner
    backend; without one such a fault is an error.
    """

    def __init__(
        self, inner: StorageBackend, rate: float = 0.0, seed: int = 0, medium: Damageable | None = None
    ) -> None:
        self.inner = inner
        self.injected = 0
        self._rate = rate
        self._random = random.Random(seed)
        self._medium = medium
        self._scripts: defaultdict[str, deque[Fault | None]] = defaultdict(deque)

    def script(self, operation: str, *faults: Fault | None) -> None:
        """What the next calls of an operation meet, one after the other; None is an undisturbed call."""
        self._scripts[operation].extend(faults)

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        return self.inner.contains_prefix(self._cut("contains_prefix", keys))

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        kept = self._cut("read_into", keys)
        return self.inner.read_into(kept, buffers[: len(kept)])

    def write(self, runs: Sequence[PageRun]) -> list[int]:
        fault = self._fault("write")
        if fault is Fault.SHORT:
            runs = [_first_half(run) for run in runs]
        return self.inner.write(runs)

    def delete(self, keys: Sequence[bytes]) -> int:
        self._fault("delete")
        return self.inner.delete(keys)

    def clear(self) -> int:
        self._fault("clear")
        return self.inner.clear()

    def generation(self) -> int:
        return self.inner.generation()

    def usage(self) -> StorageUsage:
        self._fault("usage")
        return self.inner.usage()

    def close(self) -> None:
        self.inner.close()

    def _cut(self, operation: str, keys: Sequence[bytes]) -> Sequence[bytes]:
        fault = self._fault(operation)
        if fault is Fault.SHORT:
            return keys[: len(keys) // 2]
        if fault is Fault.CORRUPT and self._medium is not None and keys:
            self._medium.flip_byte(keys[-1])
        return keys

    def _fault(self, operation: str) -> Fault | None:
        """The fault of this call; raises if it is an error."""
        fault = self._next(operation)
        if fault is None:
            return None
        self.injected += 1
        if fault is Fault.ERROR or (fault is Fault.CORRUPT and self._medium is None):
            raise StoreUnavailableError(f"injected failure of {operation}")
        return fault

    def _next(self, operation: str) -> Fault | None:
        script = self._scripts[operation]
        if script:
            return script.popleft()
        if self._random.random() < self._rate:
            return self._random.choice(list(Fault))
        return None


class SlowBackend(StorageBackend):
    """Each call that moves or looks up pages takes `per_call + pages * per_page` seconds longer."""

    def __init__(
        self,
        inner: StorageBackend,
        per_call: float = 0.0,
        per_page: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.inner = inner
        self._per_call = per_call
        self._per_page = per_page
        self._sleep = sleep

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        self._sleep(self._per_call)
        return self.inner.contains_prefix(keys)

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        self._sleep(self._per_call + self._per_page * len(keys))
        return self.inner.read_into(keys, buffers)

    def write(self, runs: Sequence[PageRun]) -> list[int]:
        self._sleep(self._per_call + self._per_page * sum(len(run.keys) for run in runs))
        return self.inner.write(runs)

    def delete(self, keys: Sequence[bytes]) -> int:
        self._sleep(self._per_call)
        return self.inner.delete(keys)

    def clear(self) -> int:
        self._sleep(self._per_call)
        return self.inner.clear()

    def generation(self) -> int:
        return self.inner.generation()

    def usage(self) -> StorageUsage:
        return self.inner.usage()

    def close(self) -> None:
        self.inner.close()


def _first_half(run: PageRun) -> PageRun:
    half = len(run.keys) // 2
    return replace(run, keys=run.keys[:half], buffers=run.buffers[:half])
