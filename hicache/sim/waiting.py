"""Requests that have not been let in yet: a window of them prefetches while they wait."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hicache.sim.ports import ReplayTarget
from hicache.sim.timeline import Timeline
from hicache.sim.workload import TokenArray, TraceRequest
from hicache.types import PrefixKey


@dataclass(frozen=True, eq=False, slots=True)
class Waiting:
    """`sequence` is every token whose KV is to be computed: the prompt and all answered tokens but the last.

    Where the trace does not tell the answer, filler stands for it.
    """

    trace: TraceRequest
    request: Any
    sequence: TokenArray
    arrived: float  # on the replay's timeline


@dataclass(frozen=True)
class Skipped:
    """A request that takes `needed` tokens where the device tier has room for `room`. Its prompt counts as computed
    elsewhere: as misses."""

    rid: str
    prompt_tokens: int
    needed: int
    room: int

    def __str__(self) -> str:
        return (
            f"request {self.rid} takes {self.needed} tokens and the device tier has room for {self.room}; it was "
            "skipped, give the device tier a larger size"
        )


class WaitingQueue:
    """Pulls requests from a trace, `window` at a time, and prefetches for them in their order.

    Requests of one session wait for each other, as the user does: a turn is asked when the last is answered.
    Time stops `deadline` seconds after a request was taken in, and after it might first have run: its prefetch is
    not waited for any longer then.
    """

    def __init__(
        self,
        trace: Iterable[TraceRequest],
        target: ReplayTarget,
        window: int,
        timeline: Timeline,
        deadline: float | None = None,
    ) -> None:
        self._trace = iter(trace)
        self._target = target
        self._size = window
        self._timeline = timeline
        self._deadline = deadline
        self._window: list[Waiting] = []
        self._asked: set[str] = set()
        self._next: TraceRequest | None = next(self._trace, None)
        self.skipped: list[Skipped] = []
        """Requests that can never run."""

    def __bool__(self) -> bool:
        """True while requests wait. Ask after `refill`."""
        return bool(self._window) or self._next is not None

    @property
    def waiting(self) -> bool:
        """Has a request arrived that was not let in yet?"""
        return bool(self._window)

    def refill(self) -> None:
        """Take in requests that have arrived until the window is full, and start their prefetch."""
        while (trace := self._next) is not None and len(self._window) < self._size:
            if not self._timeline.due(trace.arrival_ms / 1000):
                return
            self._next = next(self._trace, None)
            if (needed := trace.prompt_len + trace.output_len) > self._target.max_context_len:
                self.skipped.append(Skipped(trace.rid, trace.prompt_len, needed, self._target.max_context_len))
            else:
                self._window.append(self._enqueue(trace, self._timeline.arrival(trace.arrival_ms / 1000)))

    def candidates(self, busy_sessions: Container[str]) -> Iterator[Waiting]:
        """Requests that may be let in now, in order of arrival."""
        waiting_sessions: set[str] = set()
        for waiting in self._window.copy():
            session = waiting.trace.session
            held = session is not None and (session in busy_sessions or session in waiting_sessions)
            if not held and self._ready(waiting.trace.rid):
                yield waiting
            if session is not None:
                waiting_sessions.add(session)

    def _ready(self, rid: str) -> bool:
        ready = self._target.cache.prefetch_ready(rid)
        if not ready and self._deadline is not None and rid not in self._asked:
            self._asked.add(rid)
            self._timeline.wake(self._deadline)
        return ready

    def remove(self, waiting: Waiting) -> None:
        """Take out a request that was let in."""
        self._window.remove(waiting)
        self._asked.discard(waiting.trace.rid)

    def put_back(self, trace: TraceRequest, arrived: float) -> None:
        """Queue a retracted request again, before all others."""
        self._window.insert(0, self._enqueue(trace, arrived))

    def _enqueue(self, trace: TraceRequest, arrived: float) -> Waiting:
        prompt = trace.tokens()
        request = self._target.new_request(trace.rid, prompt, trace.namespace)
        self._target.cache.prefetch(trace.rid, PrefixKey.of(prompt, trace.namespace))
        if self._deadline is not None:
            self._timeline.wake(self._deadline)
        return Waiting(trace, request, _sequence(trace, prompt), arrived)


def _sequence(trace: TraceRequest, prompt: TokenArray) -> TokenArray:
    answered = max(trace.output_len - 1, 0)
    if trace.output is None:
        return np.concatenate([prompt, np.zeros(answered, np.int32)])
    return np.concatenate([prompt, trace.output[:answered]])
