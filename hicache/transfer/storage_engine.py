"""Asynchronous storage: bounded queues in front of a blocking backend.

Workers take loads before stores, and at most one of them stores at a time, so that stores reach the
backend in the order they were submitted: parents before children. Overload sheds stores, not loads.

Tickets are written by a worker and read by the scheduler. A worker sets the results first and `done`
last; whoever sees `done` sees the results.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from hicache.hashing import page_digests
from hicache.storage_backends.base import PageRun, StorageBackend

BATCH_PAGES = 64
"""Pages of one backend read: a cancelled load ends within one batch."""

MAX_QUEUED_LOADS = 1024


@dataclass(eq=False)
class Ticket:
    """One request to the engine. `error` is set if the backend raised."""

    done: bool = False
    error: Exception | None = None


@dataclass(eq=False)
class LookupTicket(Ticket):
    """Which leading pages of `tokens` (int32 bytes, after the page named `parent`) are stored."""

    parent: bytes = b""
    tokens: bytes = b""
    keys: list[bytes] = field(default_factory=list)
    hits: int = 0


@dataclass(eq=False)
class ReadTicket(Ticket):
    """Pages being read. The first `count` buffers are read and verified, and not written to any more.

    Set `cancelled` to end the read early; buffers from `count` on belong to the worker until `done`.
    """

    keys: Sequence[bytes] = ()
    buffers: Sequence[memoryview] = ()
    count: int = 0
    cancelled: bool = False


@dataclass(eq=False)
class WriteTicket(Ticket):
    """Runs being stored; `counts[i]` leading pages of run i are stored once `done`."""

    runs: Sequence[PageRun] = ()
    nbytes: int = 0
    counts: list[int] = field(default_factory=list)


LoadTicketT = TypeVar("LoadTicketT", LookupTicket, ReadTicket)


class StorageEngine:
    """Worker threads around one backend. With `threads=0` nothing runs until `run_next` is called."""

    def __init__(self, backend: StorageBackend, page_size: int, queue_bytes: int, threads: int = 2) -> None:
        self.backend = backend
        self.page_size = page_size
        self.queue_bytes = queue_bytes
        self._loads: deque[LookupTicket | ReadTicket] = deque()
        self._stores: deque[WriteTicket] = deque()
        self._queued_bytes = 0
        self._storing = False
        self._busy = 0
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._work, name=f"storage-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    # ---- submitting (scheduler thread) ------------------------------------------------------

    def lookup(self, parent: bytes, tokens: bytes) -> LookupTicket | None:
        """Ask which leading pages are stored; None if too many loads wait already."""
        return self._submit_load(LookupTicket(parent=parent, tokens=tokens))

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> ReadTicket | None:
        """Read pages into host buffers; None if too many loads wait already."""
        return self._submit_load(ReadTicket(keys=keys, buffers=buffers))

    def write(self, runs: Sequence[PageRun], nbytes: int) -> WriteTicket | None:
        """Store runs in one transaction; None (shed) if `queue_bytes` would be exceeded by a queue in use."""
        with self._changed:
            if self._closed or (self._queued_bytes and self._queued_bytes + nbytes > self.queue_bytes):
                return None
            ticket = WriteTicket(runs=runs, nbytes=nbytes)
            self._queued_bytes += nbytes
            self._stores.append(ticket)
            self._changed.notify()
        return ticket

    def _submit_load(self, ticket: LoadTicketT) -> LoadTicketT | None:
        with self._changed:
            if self._closed or len(self._loads) >= MAX_QUEUED_LOADS:
                return None
            self._loads.append(ticket)
            self._changed.notify()
        return ticket

    @property
    def queued_bytes(self) -> int:
        """Bytes submitted to be stored and not yet acknowledged."""
        return self._queued_bytes

    @property
    def idle(self) -> bool:
        with self._changed:
            return not (self._loads or self._stores or self._busy)

    def wait_idle(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not (self._loads or self._stores or self._busy), timeout)

    def close(self) -> None:
        """Finish stores, drop loads, stop the workers and close the backend. Idempotent."""
        with self._changed:
            self._closed = True
            for load in self._loads:
                load.done = True
            self._loads.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        while self.run_next():
            pass
        self.backend.close()

    # ---- working ----------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._loads or (self._stores and not self._storing))
                if self._closed and not (self._stores and not self._storing):
                    return
            self.run_next()

    def run_next(self) -> bool:
        """Run the next piece of work on this thread; False if there is none."""
        work = self._take()
        if work is None:
            return False
        try:
            work()
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()
        return True

    def _take(self) -> Callable[[], None] | None:
        with self._changed:
            if self._loads:
                load = self._loads.popleft()
                self._busy += 1
                return lambda: self._load(load)
            if self._stores and not self._storing:
                store = self._stores.popleft()
                self._storing = True
                self._busy += 1
                return lambda: self._store(store)
        return None

    def _load(self, ticket: LookupTicket | ReadTicket) -> None:
        try:
            finished = self._lookup(ticket) if isinstance(ticket, LookupTicket) else self._read_batch(ticket)
        except Exception as error:  # whatever a backend raises is a miss
            ticket.error = error
            finished = True
        if not finished:
            with self._changed:
                self._loads.append(ticket)  # round robin: one long load does not hold up the others
                self._changed.notify()
            return
        ticket.done = True

    def _lookup(self, ticket: LookupTicket) -> bool:
        ticket.keys = page_digests(ticket.parent, ticket.tokens, self.page_size)
        ticket.hits = self.backend.contains_prefix(ticket.keys)
        return True

    def _read_batch(self, ticket: ReadTicket) -> bool:
        at = ticket.count
        keys = ticket.keys[at : at + BATCH_PAGES]
        if ticket.cancelled or not keys:
            return True
        ticket.count += self.backend.read_into(keys, ticket.buffers[at : at + BATCH_PAGES])
        return ticket.count < at + len(keys) or ticket.count == len(ticket.keys)

    def _store(self, ticket: WriteTicket) -> None:
        try:
            ticket.counts = self.backend.write(ticket.runs)
        except Exception as error:  # a failed write stores nothing the caller may count on
            ticket.error = error
            ticket.counts = [0] * len(ticket.runs)
        with self._changed:
            self._storing = False
            self._queued_bytes -= ticket.nbytes
        ticket.done = True
