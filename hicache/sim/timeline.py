"""Time as a replay sees it: the machine's, as fast as it goes, or a virtual one, paced by the trace."""

from __future__ import annotations

import time
from typing import Protocol

from hicache.sim.ports import Cache
from hicache.sim.virtual import VirtualClock

_IDLE_SECONDS = 0.0002

_BARREN_IDLES = 256
"""Times in a row that a virtual scheduler may find nothing to do and nothing due: more are not going to help."""

_ROUNDING = 1e-6
"""Seconds: a deadline is over when it is looked at, whichever way its sum was rounded."""


class Timeline(Protocol):
    """Seconds, and how they pass while there is nothing to do."""

    def now(self) -> float: ...

    def due(self, arrival: float) -> bool:
        """Has a request that arrives `arrival` seconds after the start of the trace arrived?"""
        ...

    def arrival(self, seconds: float) -> float:
        """The time, as `now` gives it, at which a request of the trace arrives."""
        ...

    def wake(self, seconds: float) -> None:
        """`idle` goes on no further than `seconds` from now."""
        ...

    def idle(self) -> None:
        """Let some time pass."""
        ...

    def stalled(self, since: float, limit: float) -> bool:
        """Is there nothing to hope for any more? `since` is when something last moved, `limit` the patience."""
        ...

    def settle(self, cache: Cache, limit: float) -> bool:
        """Let all copies land; False if some have not after `limit` seconds."""
        ...


class RealTime:
    """The machine's time. Requests come as fast as they are served."""

    def now(self) -> float:
        return time.perf_counter()

    def due(self, arrival: float) -> bool:
        return True

    def arrival(self, seconds: float) -> float:
        """Now: who asks takes the request in."""
        return self.now()

    def wake(self, seconds: float) -> None:
        """Idling is short."""

    def idle(self) -> None:
        time.sleep(_IDLE_SECONDS)

    def stalled(self, since: float, limit: float) -> bool:
        return self.now() - since > limit

    def settle(self, cache: Cache, limit: float) -> bool:
        return cache.drain(limit)


class VirtualTime:
    """Requests come when the trace says, `speed` times as fast; time passes in leaps from one event to the next."""

    def __init__(self, clock: VirtualClock, speed: float = 1.0) -> None:
        self._clock = clock
        self._speed = speed
        self._barren = 0
        self._moved = -1.0
        self._awaited = -1.0

    def now(self) -> float:
        return self._clock.now

    def due(self, arrival: float) -> bool:
        """See Timeline. If it has not arrived, time stops when it does."""
        time = arrival / self._speed
        if time > self._clock.now and time != self._awaited:
            self._awaited = time
            self._clock.wake(time)
        return time <= self._clock.now

    def arrival(self, seconds: float) -> float:
        return seconds / self._speed

    def wake(self, seconds: float) -> None:
        self._clock.wake(self._clock.now + seconds + _ROUNDING)

    def idle(self) -> None:
        self._barren = 0 if self._clock.advance() else self._barren + 1

    def stalled(self, since: float, limit: float) -> bool:
        """Nothing is due, and asking again has not helped. How much time has passed says nothing."""
        if since != self._moved:
            self._moved, self._barren = since, 0
        return self._barren > _BARREN_IDLES

    def settle(self, cache: Cache, limit: float) -> bool:
        while cache.in_flight and self._barren <= _BARREN_IDLES:
            self.idle()
            cache.end_step(None)
            cache.poll()
        return not cache.in_flight
