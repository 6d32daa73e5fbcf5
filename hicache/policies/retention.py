"""Soft retention: a wish to keep a range of tokens, which grows weaker and never blocks the pool."""

from __future__ import annotations

from typing import NamedTuple

from hicache.errors import ConfigError

MAX_PRIORITY = 100
DEFAULT_PRIORITY = 35
"""Of what nothing was wished for, and of what was kept for its time."""


class Retention(NamedTuple):
    """`priority` (0 to 100) right after a use, going back to DEFAULT_PRIORITY within `duration` seconds."""

    priority: int
    duration: float

    def priority_at(self, age: float) -> float:
        """What is left of it `age` seconds after the last use."""
        left = max(1 - age / self.duration, 0.0)
        return DEFAULT_PRIORITY + (self.priority - DEFAULT_PRIORITY) * left


class RetentionRange(NamedTuple):
    """Tokens `start` to `stop` of a prompt (None: to its end) and how to keep them. Made by `retention_range`."""

    start: int
    stop: int | None
    retention: Retention


def retention_range(start: int, stop: int | None, priority: int, duration: float) -> RetentionRange:
    """A checked range. Raises ConfigError for one that is empty or a value out of its bounds."""
    if start < 0 or (stop is not None and stop <= start):
        raise ConfigError(f"retention of tokens {start} to {stop}: there are none, use 0 <= start < stop")
    if not 0 <= priority <= MAX_PRIORITY:
        raise ConfigError(f"retention priority {priority} is not between 0 and {MAX_PRIORITY}")
    if not 0 < duration < float("inf"):
        raise ConfigError(f"retention duration {duration} is not a positive number of seconds")
    return RetentionRange(start, stop, Retention(priority, duration))
