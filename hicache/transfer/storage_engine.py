"""Asynchronous storage: bounded queues in front of a blocking backend.

Workers take loads before stores, and at most one of them stores at a time, so that stores reach the
backend in the order they were submitted: parents before children. Overload sheds stores, not loads.

A backend call cannot be interrupted. One that runs for longer than its deadline stops further calls of its
lane (loads or stores) until a trial works; its buffers stay its own until it returns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from hicache.errors import StorageError, StoreUnavailableError
from hicache.storage_backends.base import PageRun, StorageBackend, StorageUsage
from hicache.transfer.breaker import BreakerState
from hicache.transfer.storage_lane import Call, Lane, LaneLimits
from hicache.transfer.storage_tickets import (
    CheckTicket,
    ClearTicket,
    LookupTicket,
    ReadTicket,
    Ticket,
    WriteTicket,
)

MAX_QUEUED_LOADS = 1024

MAX_WORKERS = 64
"""Workers of one engine, those included that hang in a call."""

CLOSE_SECONDS = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BackendCall:
    """A call of the backend that the engine counts as under way. Calling this makes it, and must happen once."""

    ticket: Ticket
    make: Callable[[], None]

    def __call__(self) -> None:
        self.make()


@dataclass(frozen=True)
class EngineLimits:
    """Bounds in bytes and seconds: of the store queue, and of one backend call.

    A store that waited for longer than `queue_seconds` is shed, a load that waited for longer than
    `load_deadline` has failed.
    """

    queue_bytes: int
    queue_seconds: float = 10.0
    load_deadline: float = 5.0
    store_deadline: float = 30.0


class StorageEngine:
    """Worker threads around one backend. With `threads=0` nothing runs until `run_next` is called."""

    def __init__(
        self,
        backend: StorageBackend,
        page_size: int,
        limits: EngineLimits,
        threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.backend = backend
        self.page_size = page_size
        self.generation = 0
        """Of the backend, as of the last call: moves when the store was cleared, by whomever."""
        seconds = limits.load_deadline
        self.limits = limits
        self._loads = Lane(
            "load", LaneLimits(seconds, seconds, "timeout", MAX_QUEUED_LOADS, parallel=MAX_WORKERS - 1), clock
        )
        stores = LaneLimits(limits.store_deadline, limits.queue_seconds, "shed", nbytes=limits.queue_bytes, parallel=1)
        self._stores = Lane("store", stores, clock)
        self._closed = False
        self._abandoned = False
        self._changed = threading.Condition()
        self._ask_generation()
        self._workers = threads
        self._threads: list[threading.Thread] = []
        for _ in range(threads):
            self._add_worker()

    # ---- submitting (scheduler thread) ------------------------------------------------------

    def lookup(self, parent: bytes, tokens: bytes) -> LookupTicket | None:
        """Ask which leading pages are stored; None if too many loads wait already, or loads are stopped."""
        ticket = LookupTicket(parent=parent, tokens=tokens, page_size=self.page_size)
        return ticket if self._submit(self._loads, ticket) else None

    def find(self, keys: Sequence[bytes]) -> LookupTicket | None:
        """As `lookup`, for pages whose names are known."""
        ticket = LookupTicket(keys=list(keys))
        return ticket if self._submit(self._loads, ticket) else None

    def check(self, keys: Sequence[bytes]) -> CheckTicket | None:
        """Ask which of `keys` are stored, each by itself; None as for `lookup`."""
        ticket = CheckTicket(keys=keys)
        return ticket if self._submit(self._loads, ticket) else None

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> ReadTicket | None:
        """Read pages into host buffers; None if too many loads wait already, or loads are stopped."""
        ticket = ReadTicket(keys=keys, buffers=buffers)
        return ticket if self._submit(self._loads, ticket) else None

    def write(self, runs: Sequence[PageRun], nbytes: int) -> WriteTicket | None:
        """Store runs, in transactions of bounded size; None (shed) if stores are stopped, or a queue in use would be
        too long."""
        ticket = WriteTicket(runs=runs, nbytes=nbytes)
        return ticket if self._submit(self._stores, ticket) else None

    def clear(self) -> None:
        """Remove all pages of this identity from the store, also while stores are stopped; blocks meanwhile.

        Stores that wait were made for another generation by then: they store nothing. Raises what the backend
        raises, or StoreUnavailableError after `store_deadline` seconds: then nothing was removed, unless the
        message says that it is still under way.
        """
        ticket = ClearTicket()
        with self._changed:
            if self._closed:
                raise StoreUnavailableError("the storage engine is closed", "closed")
            self._stores.put_first(ticket)
            self._changed.notify_all()
        if not self._wait(lambda: ticket.done, self.limits.store_deadline):
            with self._changed:
                withdrawn = self._stores.withdraw(ticket)
            if withdrawn or not ticket.done:
                state = "not begun" if withdrawn else "still under way"
                raise StoreUnavailableError(
                    f"clearing the store is {state} after {self.limits.store_deadline:g} s", "timeout"
                )
        if ticket.error is not None:
            raise ticket.error

    def _submit(self, lane: Lane, ticket: Ticket) -> bool:
        with self._changed:
            lane.watch()
            self._replace_hung()
            taken = not self._closed and lane.put(ticket)
            if taken:
                self._changed.notify_all()
        return taken

    def poll(self) -> Counter[str]:
        """Look after deadlines; returns what failed since the last poll, by kind and reason ("store_disk_full")."""
        failures: Counter[str] = Counter()
        with self._changed:
            for lane in (self._loads, self._stores):
                lane.watch()
                if lane.failures:
                    failures += lane.failures
                    lane.failures.clear()
            self._replace_hung()
        return failures

    # ---- state ------------------------------------------------------------------------------

    @property
    def takes_loads(self) -> bool:
        """False while loads are stopped."""
        return self._loads.ready

    @property
    def takes_stores(self) -> bool:
        """False while stores are stopped."""
        return self._stores.ready

    @property
    def states(self) -> tuple[BreakerState, BreakerState]:
        """Of loads and of stores."""
        return self._loads.breaker.state, self._stores.breaker.state

    def usage(self) -> StorageUsage | None:
        """What the backend holds, waiting for a write at most; None while it does not answer, or closed."""
        if self._closed or self._loads.breaker.state is BreakerState.OFF or self._hung:
            return None
        try:
            return self.backend.usage()
        except StorageError:
            return None

    @property
    def _hung(self) -> bool:
        with self._changed:
            return self.overdue > 0

    @property
    def queued_bytes(self) -> int:
        """Bytes submitted to be stored and not yet acknowledged."""
        return self._stores.nbytes

    @property
    def idle(self) -> bool:
        with self._changed:
            return self._loads.idle and self._stores.idle

    def wait_idle(self, timeout: float) -> bool:
        return self._wait(lambda: self._loads.idle and self._stores.idle, timeout)

    def trip(self, error: Exception) -> None:
        """Stop loads and stores because of `error`; they are tried again as after any failure."""
        with self._changed:
            self._loads.trip(error)
            self._stores.trip(error)

    def _wait(self, over: Callable[[], bool], timeout: float) -> bool:
        while not self._threads and not over() and self.run_next():
            pass
        with self._changed:
            return self._changed.wait_for(over, timeout if self._threads else 0)

    # ---- closing ----------------------------------------------------------------------------

    def close(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Finish stores, drop loads, stop the workers and close the backend. Idempotent.

        False if a backend call has not returned after `timeout` seconds: what waits is dropped, the buffers of
        that call stay its own, and its worker closes the backend should it ever return.
        """
        end = time.monotonic() + timeout
        with self._changed:
            self._closed = True
            self._loads.close()
            self._changed.notify_all()
        self._wait(lambda: self._stores.idle, timeout)
        with self._changed:
            self._stores.close(StoreUnavailableError("the storage engine is closed", "closed"))
            self._changed.notify_all()
        for thread in list(self._threads):
            thread.join(max(end - time.monotonic(), 0))
        with self._changed:
            self._abandoned = not (self._loads.idle and self._stores.idle)
        if self._abandoned:
            log.warning(
                "a storage call has not returned after %g s: it is left alone, with its memory; check the disk", timeout
            )
            return False
        self.backend.close()
        return True

    # ---- working ----------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._loads.waiting or self._stores.waiting)
                if self._closed and not self._stores.waiting:
                    return
            self.run_next()
            with self._changed:
                if len(self._threads) > self._workers + self.overdue:  # who hung is back
                    self._threads.remove(threading.current_thread())
                    self._changed.notify_all()
                    return

    @property
    def overdue(self) -> int:
        """Calls that run for longer than they should: whoever makes one is stuck in it."""
        return self._loads.overdue + self._stores.overdue

    def _replace_hung(self) -> None:
        """Start a worker for each that hangs in a call, so that the other lane, and trials, go on."""
        wanted = min(self._workers + self.overdue, MAX_WORKERS) if self._workers and not self._closed else 0
        while len(self._threads) < wanted:
            self._add_worker()

    def _add_worker(self) -> None:
        thread = threading.Thread(target=self._work, name=f"storage-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def run_next(self) -> bool:
        """Make the next backend call on this thread; False if there is none to make."""
        call = self.begin_next()
        if call is not None:
            call()
        return call is not None

    def begin_next(self) -> BackendCall | None:
        """The next backend call, begun as the engine sees it, to be made by the caller; None if there is none."""
        with self._changed:
            self._changed.notify_all()
            for lane in (self._loads, self._stores):
                lane.watch()
                call = lane.next()
                if call is not None:
                    return BackendCall(call.ticket, partial(self._make, lane, call))
        return None

    def _make(self, lane: Lane, call: Call) -> None:
        error: Exception | None = None
        finished = True
        try:
            finished = call.ticket.call(self.backend)
        except Exception as raised:  # whatever a backend raises is a miss, or nothing stored
            error = raised
        self._ask_generation()
        with self._changed:
            lane.ended(call, error, finished)
            last = self._abandoned and self._loads.idle and self._stores.idle
            self._changed.notify_all()
        if last:
            self.backend.close()

    def _ask_generation(self) -> None:
        try:
            self.generation = self.backend.generation()
        except Exception:
            log.debug("the store does not say its generation", exc_info=True)
