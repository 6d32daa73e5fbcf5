"""A clock that is set forward to what happens next, and streams whose work takes as long as a model says."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from hicache.errors import ProtocolError
from hicache.streams.base import Event, Stream

Action = Callable[[], None]


class VirtualClock:
    """Seconds since the start of a simulation. Calling it gives the time, as calling time.monotonic does.

    What is due at the same time happens in the order in which it was asked for. `before_pause` is called before
    time goes on, to start what the last moment asked for.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.before_pause: Action = _nothing
        self._due: list[tuple[float, int, Action]] = []
        self._serial = 0

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, action: Action) -> None:
        """Call `action` when it is `time`; now, if that is past."""
        self._serial += 1
        heapq.heappush(self._due, (max(time, self.now), self._serial, action))

    def wake(self, time: float) -> None:
        """Let time stop there: something is to be looked at then."""
        if time > self.now:
            self.at(time, _nothing)

    def advance_to(self, time: float) -> None:
        """Let everything happen that is due until `time`; then it is `time`."""
        self.before_pause()
        while self._due and self._due[0][0] <= time:
            self._happen()
        self.now = max(self.now, time)

    def advance(self) -> bool:
        """Go on to the next thing that is due, and to all that is due at that moment. False: nothing is."""
        self.before_pause()
        if not self._due:
            return False
        until = self._due[0][0]
        while self._due and self._due[0][0] <= until:
            self._happen()
        return True

    def _happen(self) -> None:
        self.now, _, action = heapq.heappop(self._due)
        action()
        self.before_pause()


def _nothing() -> None:
    pass


class VirtualEvent:
    """A point in a VirtualStream: complete from a known time on."""

    __slots__ = ("_clock", "time")

    def __init__(self, clock: VirtualClock, time: float) -> None:
        self._clock = clock
        self.time = time

    def query(self) -> bool:
        return self._clock.now >= self.time

    def synchronize(self) -> None:
        """Lets the time pass until then."""
        self._clock.advance_to(self.time)

    def gate(self) -> None:
        """As `synchronize`: the caller computes in virtual time, too."""
        self.synchronize()


class VirtualStream(Stream):
    """Work is done when it is submitted, and takes the seconds that it `spend`s meanwhile.

    `busy` are the seconds spent so far. Work must not fail: an exception is the caller's at once.
    """

    def __init__(self, clock: VirtualClock, name: str) -> None:
        self.name = name
        self.busy = 0.0
        self._clock = clock
        self._free_at = 0.0

    def submit(self, work: Callable[[], None]) -> None:
        self._free_at = max(self._free_at, self._clock.now)
        work()

    def spend(self, seconds: float) -> None:
        """The work submitted last, or now, takes so long (more)."""
        self._free_at = max(self._free_at, self._clock.now) + seconds
        self.busy += seconds

    def record(self) -> VirtualEvent:
        event = self._event()
        self._clock.wake(event.time)
        return event

    def submit_all(self, works: Sequence[Callable[[], None]]) -> list[Event]:
        """As of every stream; time stops at the end of the last one only."""
        events: list[Event] = []
        for work in works:
            self.submit(work)
            events.append(self._event())
        self._clock.wake(self._free_at)
        return events

    def wait(self, event: Event) -> None:
        if not isinstance(event, VirtualEvent):
            raise ProtocolError(f"stream {self.name} cannot wait for an event of another clock")
        self._free_at = max(self._free_at, event.time)

    def clear_error(self) -> None:
        """Nothing to forget: nothing fails."""

    def close(self) -> None:
        """Nothing to stop: all work is done."""

    def _event(self) -> VirtualEvent:
        return VirtualEvent(self._clock, max(self._free_at, self._clock.now))
