"""A worker thread as a stream: the CPU twin of a CUDA stream, with the same rules of order and failure."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from hicache.errors import ProtocolError
from hicache.streams.base import Event, Stream, raise_failure


class ThreadEvent:
    """A point in a ThreadStream. Keeps its outcome, good or bad, for ever."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._cause: BaseException | None = None

    def query(self) -> bool:
        if not self._done.is_set():
            return False
        raise_failure(self._cause)
        return True

    def synchronize(self) -> None:
        self._done.wait()
        raise_failure(self._cause)

    def gate(self) -> None:
        """Blocks: a thread's computation on a CPU has no other way to come later."""
        self.synchronize()

    def complete(self, cause: BaseException | None) -> None:
        """For the stream: work before this point is over; `cause` is what made it fail."""
        self._cause = cause
        self._done.set()


class ThreadStream(Stream):
    """A FIFO worker thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._items: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._cause: BaseException | None = None  # touched by the worker only
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        self._put(lambda: self._attempt(work))

    def record(self) -> ThreadEvent:
        event = ThreadEvent()
        self._put(lambda: event.complete(self._cause))
        return event

    def wait(self, event: Event) -> None:
        self._put(lambda: self._await(event))

    def clear_error(self) -> None:
        self._put(self._forget)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._items.put(None)
        self._thread.join()

    def _put(self, item: Callable[[], None]) -> None:
        if self._closed:
            raise ProtocolError(f"stream {self.name} is closed")
        self._items.put(item)

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            item()

    def _attempt(self, work: Callable[[], None]) -> None:
        if self._cause is not None:
            return
        try:
            work()
        except BaseException as error:  # whatever it is, the thread lives on and events report it
            self._cause = error

    def _await(self, event: Event) -> None:
        """Waits even if poisoned: what runs after a later `clear_error` is still ordered after `event`."""
        try:
            event.synchronize()
        except BaseException as error:
            self._cause = self._cause or error

    def _forget(self) -> None:
        self._cause = None
