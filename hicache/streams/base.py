"""Ordered asynchronous work queues: one interface for CUDA streams, worker threads and tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from hicache.errors import TransferError


class Event(Protocol):
    """A point in a stream. Completes once everything submitted to the stream before it has run."""

    def query(self) -> bool:
        """True once complete, never blocks. Raises TransferError if work before it failed."""
        ...

    def synchronize(self) -> None:
        """Block until complete. Raises TransferError if work before it failed."""
        ...

    def gate(self) -> None:
        """Whatever the calling thread computes from now on comes after this event.

        On a CPU this blocks; on CUDA it makes the thread's current stream wait and returns at once. Raises
        TransferError if work before the event failed; an error on a CUDA device itself may show only at `query`.
        """
        ...


def raise_failure(cause: BaseException | None) -> None:
    """Raise TransferError from `cause`, if there is one.

    A new error for each caller: one shared by threads would mix their tracebacks.
    """
    if cause is not None:
        raise TransferError(f"work on a stream failed: {cause}") from cause


class Stream(ABC):
    """Work runs in submission order; streams are ordered against each other only by events.

    `submit` may run `work` now (CUDA: it launches kernels) or later (worker thread), so `work`
    closes over snapshots only (index arrays, tensors), never over tree state.

    A failing piece of work poisons the stream: work submitted before `clear_error` does not run and
    its events raise TransferError, as later calls of a CUDA stream do after an error. `query` and
    `synchronize` report a failure only once all that was submitted before the event has stopped: pages
    are freed on their word.
    """

    @abstractmethod
    def submit(self, work: Callable[[], None]) -> None: ...

    @abstractmethod
    def record(self) -> Event: ...

    def submit_all(self, works: Sequence[Callable[[], None]]) -> list[Event]:
        """Submit each and record an event after each, in one call: cheaper than one by one on CUDA."""
        events = []
        for work in works:
            self.submit(work)
            events.append(self.record())
        return events

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Work submitted from now on runs after `event`; if the event fails, this stream is poisoned."""

    @abstractmethod
    def clear_error(self) -> None:
        """Forget a poisoning, from this point of the submission order on."""

    def synchronize(self) -> None:
        self.record().synchronize()

    @abstractmethod
    def close(self) -> None:
        """Finish what was submitted and stop. Idempotent."""
