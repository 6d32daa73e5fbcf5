"""The pages of one host pool on disk, by SGLang's keys."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from itertools import takewhile
from typing import Any, TypeVar

from hicache.errors import StorageError
from hicache.integrations.sglang.identity import PoolIdentity
from hicache.integrations.sglang.page_forms import PageBatch, PageForm, Scratch
from hicache.storage_backends.base import PageRun, StorageBackend
from hicache.transfer.breaker import Breaker, failure_reason

log = logging.getLogger(__name__)

T = TypeVar("T")


class PoolStore:
    """Pages of `pool` (a HostKVCache) in `backend`. Calls block and may come from several threads.

    A failure of the disk is a miss, or a page that is not stored: it is logged and counted, and after three in a row
    the disk is left alone for a while. A read or a write that hangs is waited for: it is under way in memory of
    SGLang's, which may be used for something else as soon as the call returns.
    """

    def __init__(self, pool: Any, form: PageForm, identity: PoolIdentity, backend: StorageBackend) -> None:
        self.pool = pool
        self.form = form
        self.scratch = Scratch(form.page_bytes)
        self.backend = backend
        self.failures: Counter[str] = Counter()
        self._name = identity.pool
        self._seed = identity.seed()
        self._lock = threading.Lock()
        self._loads = Breaker(f"loads of pool {identity.pool!r}", time.monotonic)
        self._stores = Breaker(f"stores of pool {identity.pool!r}", time.monotonic)

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Which pages are stored. A hint: what is found may turn out damaged when it is read."""
        # The last part of a page is stored after the others, and goes before them.
        ends = [self._part_key(key, self.form.parts - 1) for key in keys]
        return self._guarded(self._loads, "lookup", lambda: self.backend.contains_each(ends)) or [False] * len(keys)

    def leading(self, keys: Sequence[str]) -> int:
        """How many leading pages are stored."""
        return sum(1 for _ in takewhile(bool, self.present(keys)))

    def get(self, keys: Sequence[str], pages: PageBatch) -> int:
        """Read leading pages; returns how many were read and verified. The others hold garbage."""
        count = 0
        while count < len(keys):
            stop = min(count + pages.step, len(keys))
            read = self._guarded(self._loads, "read", partial(self._read, keys, pages, count, stop)) or 0
            count += read
            if count < stop:
                break
        return count

    def put(self, keys: Sequence[str], pages: PageBatch, parent: str | None) -> int:
        """Store pages; returns how many leading ones are stored now. `parent`: the page before the first, if known."""
        count = 0
        while count < len(keys):
            stop = min(count + pages.step, len(keys))
            before = keys[count - 1] if count else parent
            write = partial(self._write, keys, pages, count, stop, before)
            stored = self._guarded(self._stores, "write", write) or 0
            count += stored
            if count < stop:
                break
        return count

    def clear(self) -> int:
        """Remove the pages of this pool; returns how many. Raises StorageError."""
        return self.backend.clear() // self.form.parts

    def close(self) -> None:
        self.backend.close()

    # ---- helpers ------------------------------------------------------------------------------

    def _read(self, keys: Sequence[str], pages: PageBatch, start: int, stop: int) -> int:
        names = [name for key in keys[start:stop] for name in self._part_keys(key)]
        count = self.backend.read_into(names, pages.targets(start, stop)) // self.form.parts
        pages.landed(start, start + count)
        return count

    def _write(self, keys: Sequence[str], pages: PageBatch, start: int, stop: int, before: str | None) -> int:
        """Each page is a run after the page before it, so that it goes before that one when room is wanted. It is a
        run of its own since any may be there already: SGLang stores them in pieces that change with its tree."""
        buffers, parts = pages.sources(start, stop), self.form.parts
        parent = self._part_key(before, parts - 1) if before is not None else None
        if parent is not None and not self.backend.contains_each([parent])[0]:
            parent = None  # it may still be in memory, and this page of use with it
        runs = []
        for number, key in enumerate(keys[start:stop]):
            names = self._part_keys(key)
            runs.append(PageRun(names, buffers[number * parts : (number + 1) * parts], parent))
            parent = names[-1]
        return sum(1 for _ in takewhile(lambda count: count == parts, self.backend.write(runs)))

    def _part_keys(self, key: str) -> list[bytes]:
        return [self._part_key(key, part) for part in range(self.form.parts)]

    def _part_key(self, key: str, part: int) -> bytes:
        return sha256(self._seed + bytes([part]) + key.encode()).digest()

    def _guarded(self, breaker: Breaker, kind: str, call: Callable[[], T]) -> T | None:
        """What `call` returns; None if the disk fails, or is left alone."""
        with self._lock:
            if not breaker.begin():
                return None
        try:
            result = call()
        except StorageError as error:
            with self._lock:
                self.failures[f"{kind}_{failure_reason(error)}"] += 1
                breaker.failed(kind, error)
            log.warning("pool %r: a %s failed: %s", self._name, kind, error)
            return None
        except BaseException:
            with self._lock:
                breaker.not_made()
            raise
        with self._lock:
            breaker.succeeded(kind)
        return result
