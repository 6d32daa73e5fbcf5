"""The workers of a storage engine in virtual time: its calls are made in the scheduler's thread, when they would end.

The engine itself is the product's, without threads: queues, lanes, deadlines and breakers are the real ones.
"""

from __future__ import annotations

from functools import partial

from hicache.costs import Costs, Link
from hicache.errors import StorageError
from hicache.sim.virtual import VirtualClock
from hicache.transfer.storage_engine import BackendCall, StorageEngine
from hicache.transfer.storage_tickets import BATCH_PAGES, ReadTicket, Ticket, WriteTicket


class _Channel:
    """One direction of the disk: latencies overlap, bytes follow each other."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free_at = 0.0
        self.busy = 0.0

    def end_of(self, start: float, nbytes: int) -> float:
        """When a transfer that is asked for at `start` is over."""
        seconds = nbytes / self._link.bytes_per_second
        self._free_at = max(start + self._link.latency, self._free_at) + seconds
        self.busy += seconds
        return self._free_at


class VirtualWorkers:
    """`workers` workers that take the engine's calls in its order. A call has its effect when it ends.

    Reads share the read bandwidth and writes the write bandwidth of the disk; a page takes `page_bytes` bytes of it.
    """

    def __init__(self, engine: StorageEngine, clock: VirtualClock, costs: Costs, page_bytes: int, workers: int) -> None:
        self._engine = engine
        self._clock = clock
        self._lookup = costs.lookup
        self._page_bytes = page_bytes
        self._workers = workers
        self._at_work = 0
        self.reads = _Channel(costs.disk_read)
        self.writes = _Channel(costs.disk_write)

    def start(self) -> None:
        """Let workers that are free take what waits. One that hangs is replaced, as the engine does."""
        while self._at_work < self._workers or self._at_work < self._workers + self._engine.overdue:
            call = self._engine.begin_next()
            if call is None:
                return
            self._at_work += 1
            self._clock.at(self._end_of(call.ticket), partial(self._finish, call))

    def _end_of(self, ticket: Ticket) -> float:
        now = self._clock.now
        if isinstance(ticket, ReadTicket):
            return self.reads.end_of(now, min(BATCH_PAGES, len(ticket.keys) - ticket.count) * self._page_bytes)
        if isinstance(ticket, WriteTicket):
            return self.writes.end_of(now, sum(len(run.keys) for run in ticket.runs) * self._page_bytes)
        return now + self._lookup

    def _finish(self, call: BackendCall) -> None:
        self._at_work -= 1
        call()
        error = call.ticket.error
        if error is not None and not isinstance(error, StorageError):
            raise error  # a fault of the model is not to pass for one of the disk
