"""What waits for the backend and what runs in it: one lane for loads, one for stores.

Everything here happens under the engine's lock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from hicache.errors import StoreUnavailableError
from hicache.transfer.breaker import Breaker, BreakerState, failure_reason
from hicache.transfer.storage_tickets import Ticket


@dataclass(frozen=True)
class LaneLimits:
    """`tickets` and `nbytes` may wait, each for `wait` seconds at most; a call should end within `call` seconds.

    `nbytes` does not count while nothing waits or runs, so that a ticket larger than that is possible. What
    waited for too long ends with the reason `too_late`. At most `parallel` calls run at once.
    """

    call: float
    wait: float
    too_late: str
    tickets: float = float("inf")
    nbytes: float = float("inf")
    parallel: float = float("inf")


@dataclass(eq=False)
class Call:
    """A backend call under way since `began`, the `beside`-th of its lane then."""

    ticket: Ticket
    began: float
    beside: int


class Lane:
    """A queue, its running calls, and the breaker that says whether there may be more."""

    def __init__(self, name: str, limits: LaneLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.breaker = Breaker(f"storage {name}s", clock)
        self.nbytes = 0  # of all tickets that are not done
        self.failures: Counter[str] = Counter()  # since the last look: name of the lane _ reason
        self._name = name
        self._clock = clock
        self._queue: deque[Ticket] = deque()
        self._urgent: deque[Ticket] = deque()
        self._calls: list[Call] = []
        self._closed = False

    @property
    def idle(self) -> bool:
        return not (self._queue or self._urgent or self._calls)

    @property
    def overdue(self) -> int:
        """Calls that run for longer than they should."""
        return sum(call.ticket.overdue for call in self._calls)

    @property
    def waiting(self) -> bool:
        """Is there a ticket that a worker can take now?"""
        return bool(self._queue or self._urgent) and len(self._calls) < self.limits.parallel

    @property
    def ready(self) -> bool:
        """Would `put` take a ticket, if there is room? Not while calls that hang hold all places of the lane: what came
        behind them, a trial too, could not begin, and whoever waits for it would hang with them."""
        return self.breaker.ready and self.overdue < self.limits.parallel

    def put(self, ticket: Ticket) -> bool:
        """Queue a ticket. False: the queue is full, or the lane takes none now."""
        if not self.ready:
            return False
        full = len(self._queue) >= self.limits.tickets or (
            self.nbytes > 0 and self.nbytes + ticket.nbytes > self.limits.nbytes
        )
        if full:
            self.failures[f"{self._name}_shed"] += 1
        if full or not self.breaker.begin():
            return False
        self.nbytes += ticket.nbytes
        self._append(ticket)
        return True

    def put_first(self, ticket: Ticket) -> None:
        """Queue a ticket before all others, whatever the limits and the breaker say, and will say of its end."""
        self._urgent.append(ticket)

    def _append(self, ticket: Ticket) -> None:
        """Queue what is new, or needs another call: a long load does not hold up the others, a store stays before those
        that may build upon it."""
        again = ticket.queued_at is not None
        ticket.queued_at = self._clock()
        if again and not ticket.round_robin:
            self._queue.appendleft(ticket)
        else:
            self._queue.append(ticket)

    def next(self) -> Call | None:
        """The next ticket to call the backend for."""
        while self.waiting:
            ticket = (self._urgent or self._queue).popleft()
            if not ticket.cancelled:
                call = Call(ticket, self._clock(), len(self._calls) + 1)
                self._calls.append(call)
                return call
            self.breaker.not_made()
            self._settle(ticket, None)
        return None

    def ended(self, call: Call, error: Exception | None, finished: bool) -> None:
        """A call returned or raised. A ticket that needs more calls waits for its next turn."""
        ticket = call.ticket
        ticket.busy += 2 * (self._clock() - call.began) / (call.beside + len(self._calls))
        self._calls.remove(call)
        if ticket.kind == "clear":
            self._settle(ticket, error)
            return
        if error is None:
            self.breaker.succeeded(ticket.kind)
        else:
            self.breaker.failed(ticket.kind, error)
        if error is not None or finished or self._closed:
            self._settle(ticket, error)
        else:
            ticket.overdue = False
            self._append(ticket)
        self._drop_if_stopped()

    def watch(self) -> None:
        """Find calls that run for too long, and tickets that have waited for too long."""
        if self.idle:
            return
        now = self._clock()
        for call in self._calls:
            if not call.ticket.overdue and now - call.began > self.limits.call and call.ticket.kind != "clear":
                call.ticket.overdue = True
                message = f"a {call.ticket.kind} runs for more than {self.limits.call:g} s"
                self.failures[f"{self._name}_timeout"] += 1
                self.breaker.trip(call.ticket.kind, StoreUnavailableError(message, "timeout"))
        while self._queue and now - (self._queue[0].queued_at or 0.0) > self.limits.wait:
            ticket = self._queue.popleft()
            late = StoreUnavailableError(f"a {ticket.kind} waited for {self.limits.wait:g} s", self.limits.too_late)
            if self.breaker.state is BreakerState.TRYING:
                self.breaker.failed(ticket.kind, late)
            self._settle(ticket, late)
        self._drop_if_stopped()

    def trip(self, error: Exception) -> None:
        """Take the lane out of service: `error` says why."""
        self.breaker.trip("", error)
        self._drop_if_stopped()

    def close(self, error: Exception | None = None) -> None:
        """End what waits; what runs ends with its call."""
        self._closed = True
        self._drop_waiting(error)

    def _drop_waiting(self, error: Exception | None) -> None:
        while self._queue:
            self._settle(self._queue.popleft(), error)

    def withdraw(self, ticket: Ticket) -> bool:
        """Take back a ticket that was put first; False if a call for it has begun."""
        if ticket not in self._urgent:
            return False
        self._urgent.remove(ticket)
        return True

    def _drop_if_stopped(self) -> None:
        if self.breaker.state is BreakerState.OFF:
            self._drop_waiting(self._out_of_service())

    def _out_of_service(self) -> StoreUnavailableError:
        return StoreUnavailableError(f"storage {self._name}s are stopped for now", "stopped")

    def _settle(self, ticket: Ticket, error: Exception | None) -> None:
        self.nbytes -= ticket.nbytes
        if error is not None:
            self.failures[f"{self._name}_{failure_reason(error)}"] += 1
        ticket.error = error
        ticket.done = True
