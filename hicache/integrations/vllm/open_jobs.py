"""Jobs that some rank has not reported yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hicache.integrations.vllm.jobs import WorkerReport


@dataclass
class _Open:
    done: Callable[[int], None]
    missing: int
    least: int | None = None


class OpenJobs:
    """Numbers the jobs, and calls each one's `done` with the smallest result once all ranks have reported it."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._open: dict[int, _Open] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, done: Callable[[int], None]) -> int:
        """The number of a new job."""
        self._last += 1
        self._open[self._last] = _Open(done, self._ranks)
        return self._last

    def report(self, report: WorkerReport) -> None:
        """Take in what ranks have reported, in the order of the jobs."""
        for job in sorted(report.results):
            ranks, result = report.results[job]
            state = self._open[job]
            state.missing -= ranks
            state.least = result if state.least is None else min(state.least, result)
            if not state.missing:
                del self._open[job]
                state.done(state.least)
