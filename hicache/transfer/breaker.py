"""Stop calling what fails, and try again later by itself.

    ON --failures in a row, or a call past its deadline--> OFF --the pause is over--> TRYING
     ^                                                      ^                            |
     |                                                      '------- it failed ----------|
     '-------------------------------- it worked ----------------------------------------'

No thread, no lock, no timer: whoever calls holds a lock and asks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from enum import Enum

from hicache.errors import StorageError

MAX_FAILURES = 3
"""Failures in a row after which calls stop."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds until the first trial, and the most that doubling makes of them."""

log = logging.getLogger(__name__)

ADVICE = {
    "corrupt": "see the log for what was set aside, and check the disk if it happens again",
    "timeout": "check the disk: it does not answer in time",
}
"""For what an error cannot say itself."""


class BreakerState(str, Enum):
    ON = "on"
    OFF = "off"
    TRYING = "trying"  # one call at a time, until one has worked


def failure_reason(error: Exception) -> str:
    """One word for counters: the reason of a StorageError, "error" for what a backend should not raise."""
    return error.reason if isinstance(error, StorageError) else "error"


class Breaker:
    """Whether calls of one sort (`what`) may be made. Times are seconds of `clock`.

    Calls have a `kind`: failures are counted for each of them, and what was stopped by failures of one
    kind goes on once a call of that kind has worked. A lookup that works says nothing about reads.
    """

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self.state = BreakerState.ON
        self._what = what
        self._clock = clock
        self._failures: Counter[str] = Counter()
        self._culprit = ""  # the kind of call that stopped them; empty: any
        self._next_pause = FIRST_PAUSE
        self._retry_at = 0.0
        self._trial = False

    @property
    def ready(self) -> bool:
        """Would `begin` say yes now?"""
        if self.state is BreakerState.ON:
            return True
        return not self._trial and (self.state is BreakerState.TRYING or self._clock() >= self._retry_at)

    def begin(self) -> bool:
        """Ask for one call. After True its end must be reported: `succeeded`, `failed`, or `not_made`."""
        if not self.ready:
            return False
        if self.state is not BreakerState.ON:
            self.state, self._trial = BreakerState.TRYING, True
        return True

    def succeeded(self, kind: str) -> None:
        self._failures[kind] = 0
        self._trial = False
        if self.state is BreakerState.TRYING and self._culprit in ("", kind):
            self.state, self._next_pause = BreakerState.ON, FIRST_PAUSE
            self._failures.clear()
            log.info("%s work again", self._what)

    def not_made(self) -> None:
        """The call that was asked for was not needed after all."""
        self._trial = False

    def failed(self, kind: str, error: Exception) -> None:
        """A call raised. The trial, or too many in a row, stop the calls."""
        self._failures[kind] += 1
        if self.state is BreakerState.TRYING or self._failures[kind] >= MAX_FAILURES:
            self.trip(kind, error)

    def trip(self, kind: str, error: Exception) -> None:
        """Stop the calls now; nothing happens where they are stopped already. Without a `kind`, any may end that."""
        if self.state is BreakerState.OFF:
            return
        pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
        self.state, self._trial, self._culprit = BreakerState.OFF, False, kind
        self._retry_at = self._clock() + pause
        reason = failure_reason(error)
        advice = f"; {ADVICE[reason]}" if reason in ADVICE else ""
        what = f"{kind}, {reason}" if kind else reason
        log.warning("%s are stopped (%s: %s)%s; next try in %g s", self._what, what, error, advice, pause)
