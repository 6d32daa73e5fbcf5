"""A backend that is opened when it can be, and opened anew when it was found damaged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hicache.errors import BadInput, StoreCorruptError, StoreReplacedError, StoreUnavailableError
from hicache.hashing import Field, StoreIdentity
from hicache.storage_backends.base import Neighbour, PageRun, StorageBackend, StorageUsage

log = logging.getLogger(__name__)

_EPOCH_SHIFT = 32
_INNER = (1 << _EPOCH_SHIFT) - 1


@dataclass(eq=False)
class _Opened:
    """The backend in use, or one that was given up and is closed when its last call returns."""

    backend: StorageBackend
    calls: int = 0


class RecoveringBackend(StorageBackend):
    """Opens the backend that `open_backend` makes at the first call, and again after a StoreCorruptError
    or a StoreReplacedError.

    What is damaged, or not at its path any more, is given up, and closed when the last call in it has returned.
    Opening it anew is expected to set damage aside. A call raises StoreUnavailableError while there is nothing to call.

    `generation` counts how often the backend was given up in its upper bits, so that runs made before that
    are too late for what is opened afterwards.
    """

    def __init__(self, open_backend: Callable[[], StorageBackend], identity: StoreIdentity | None = None) -> None:
        self.identity = identity
        self._open_backend = open_backend
        self._opened: _Opened | None = None
        self._epoch = 0
        self._closed = False
        self._lock = threading.Lock()
        self._opening = threading.Lock()  # held while opening, which may take long; `_lock` never is

    def open(self) -> None:
        """Open now. Raises what the backend raises, BadInput too, which a later call hides as unavailable."""
        with self._opening:
            self._check_open()
            if self._opened is None:
                backend = self._open_backend()
                with self._lock:
                    self._opened = None if self._closed else _Opened(backend)
                if self._closed:
                    backend.close()

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        with self._inside() as (backend, _):
            return backend.contains_prefix(keys)

    def contains_each(self, keys: Sequence[bytes]) -> list[bool]:
        with self._inside() as (backend, _):
            return backend.contains_each(keys)

    def neighbours(self, keys_of: Callable[[Mapping[str, Field]], Sequence[bytes]]) -> list[Neighbour]:
        with self._inside() as (backend, _):
            return backend.neighbours(keys_of)

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        with self._inside() as (backend, _):
            return backend.read_into(keys, buffers)

    def write(self, runs: Sequence[PageRun]) -> list[int]:
        with self._inside() as (backend, epoch):
            timely = [run.generation is None or run.generation >> _EPOCH_SHIFT == epoch for run in runs]
            counts = iter(backend.write([_inner_run(run) for run, is_timely in zip(runs, timely) if is_timely]))
            return [next(counts) if is_timely else 0 for is_timely in timely]

    def delete(self, keys: Sequence[bytes]) -> int:
        with self._inside() as (backend, _):
            return backend.delete(keys)

    def clear(self) -> int:
        with self._inside() as (backend, _):
            return backend.clear()

    def generation(self) -> int:
        """Does not open the backend: while it is not open only the upper bits are told."""
        if self._opened is None:
            return self._epoch << _EPOCH_SHIFT
        with self._inside() as (backend, epoch):
            return epoch << _EPOCH_SHIFT | backend.generation()

    def usage(self) -> StorageUsage:
        """Does not open the backend: StoreUnavailableError while it is not open."""
        if self._opened is None:
            raise StoreUnavailableError("the store is not open")
        with self._inside() as (backend, _):
            return backend.usage()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._give_up(self._opened)

    @contextmanager
    def _inside(self) -> Iterator[tuple[StorageBackend, int]]:
        """The backend and its epoch, for one call."""
        opened, epoch = self._enter()
        damaged = False
        try:
            yield opened.backend, epoch
        except (StoreCorruptError, StoreReplacedError) as error:
            damaged = True
            log.error("storage is given up, and opened again by the next call: %s", error)
            raise
        finally:
            self._leave(opened, damaged)

    def _enter(self) -> tuple[_Opened, int]:
        while True:
            with self._lock:
                if self._opened is not None:
                    self._opened.calls += 1
                    return self._opened, self._epoch
            try:
                self.open()
            except BadInput as error:
                raise StoreUnavailableError(f"the store cannot be used: {error}", "refused") from error

    def _leave(self, opened: _Opened, damaged: bool) -> None:
        with self._lock:
            opened.calls -= 1
            if damaged and self._opened is opened:
                self._opened = None
                self._epoch += 1
            last = self._opened is not opened and not opened.calls
        if last:
            _close_damaged(opened.backend)

    def _give_up(self, opened: _Opened | None) -> None:
        with self._lock:
            if opened is None or self._opened is not opened:
                return
            self._opened = None
            last = not opened.calls
        if last:
            opened.backend.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError("the store is closed", "closed")


def _close_damaged(backend: StorageBackend) -> None:
    try:
        backend.close()
    except Exception:  # what matters is the damage, which is on its way to the caller
        log.warning("a damaged store could not be closed in order", exc_info=True)


def _inner_run(run: PageRun) -> PageRun:
    return run if run.generation is None else replace(run, generation=run.generation & _INNER)
