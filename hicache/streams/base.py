"""Ordered asynchronous work queues: one interface for CUDA streams, worker threads and tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol


class Event(Protocol):
    """A point in a stream. Completes once everything submitted to the stream before it has run."""

    def query(self) -> bool:
        """True once complete, never blocks. Raises TransferError if work before it failed."""
        ...

    def synchronize(self) -> None:
        """Block until complete. Raises TransferError if work before it failed."""
        ...


class Stream(ABC):
    """Work runs in submission order; streams are ordered against each other only by events.

    `submit` may run `work` now (CUDA: it launches kernels) or later (worker thread), so `work`
    closes over snapshots only (index arrays, tensors), never over tree state.

    A failing piece of work poisons the stream: work submitted before `clear_error` does not run and
    its events raise TransferError, as later calls of a CUDA stream do after an error.
    """

    @abstractmethod
    def submit(self, work: Callable[[], None]) -> None: ...

    @abstractmethod
    def record(self) -> Event: ...

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
