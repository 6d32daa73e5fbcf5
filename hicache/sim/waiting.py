"""Requests that have not been let in yet: a window of them prefetches while they wait."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hicache.sim.ports import ReplayTarget
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


class WaitingQueue:
    """Pulls requests from a trace, `window` at a time, and prefetches for them in their order.

    Requests of one session wait for each other, as the user does: a turn is asked when the last is answered.
    """

    def __init__(self, trace: Iterable[TraceRequest], target: ReplayTarget, window: int) -> None:
        self._trace = iter(trace)
        self._target = target
        self._size = window
        self._window: list[Waiting] = []
        self._exhausted = False
        self.skipped: list[str] = []
        """One line for each request that can never run."""

    def __bool__(self) -> bool:
        """True while requests wait. Ask after `refill`."""
        return bool(self._window) or not self._exhausted

    def refill(self) -> None:
        """Take in requests until the window is full, and start their prefetch."""
        while len(self._window) < self._size and not self._exhausted:
            trace = next(self._trace, None)
            if trace is None:
                self._exhausted = True
            elif (needed := trace.prompt_len + trace.output_len) > self._target.max_context_len:
                self.skipped.append(
                    f"request {trace.rid} takes {needed} tokens and the device tier has room for "
                    f"{self._target.max_context_len}; it was skipped, give the device tier a larger size"
                )
            else:
                self._window.append(self._enqueue(trace))

    def candidates(self, busy_sessions: Container[str]) -> Iterator[Waiting]:
        """Requests that may be let in now, in order of arrival."""
        waiting_sessions: set[str] = set()
        for waiting in self._window.copy():
            session = waiting.trace.session
            held = session is not None and (session in busy_sessions or session in waiting_sessions)
            if not held and self._target.cache.prefetch_ready(waiting.trace.rid):
                yield waiting
            if session is not None:
                waiting_sessions.add(session)

    def remove(self, waiting: Waiting) -> None:
        """Take out a request that was let in."""
        self._window.remove(waiting)

    def put_back(self, trace: TraceRequest) -> None:
        """Queue a retracted request again, before all others."""
        self._window.insert(0, self._enqueue(trace))

    def _enqueue(self, trace: TraceRequest) -> Waiting:
        prompt = trace.tokens()
        request = self._target.new_request(trace.rid, prompt, trace.namespace)
        self._target.cache.prefetch(trace.rid, PrefixKey.of(prompt, trace.namespace))
        return Waiting(trace, request, _sequence(trace, prompt))


def _sequence(trace: TraceRequest, prompt: TokenArray) -> TokenArray:
    answered = max(trace.output_len - 1, 0)
    if trace.output is None:
        return np.concatenate([prompt, np.zeros(answered, np.int32)])
    return np.concatenate([prompt, trace.output[:answered]])
