"""A stream that moves only when the test says so, so that a test chooses the interleaving."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hicache.errors import ProtocolError, TransferError
from hicache.streams.base import Event, Stream, raise_failure


class SteppedEvent:
    """A point in a SteppedStream."""

    def __init__(self) -> None:
        self._done = False
        self._cause: BaseException | None = None

    def query(self) -> bool:
        raise_failure(self._cause)
        return self._done

    def synchronize(self) -> None:
        """Raises ProtocolError if not complete: nothing would ever complete it while the caller blocks."""
        if not self.query():
            raise ProtocolError("a stepped stream cannot block: drive it with step() or drain()")

    def gate(self) -> None:
        """As `synchronize`: what a thread computes on a CPU comes later only if it blocks."""
        self.synchronize()

    def complete(self, cause: BaseException | None) -> None:
        self._cause = cause
        self._done = True


@dataclass(frozen=True)
class _Item:
    """One entry of the queue: `run` is called when it is due, `gate` is the event that it waits for."""

    run: Callable[[], None]
    gate: Event | None = None


class SteppedStream(Stream):
    """Runs one item of its queue at each `step()`, with the order and failure rules of the real streams."""

    def __init__(self, name: str = "stepped") -> None:
        self.name = name
        self._items: deque[_Item] = deque()
        self._cause: BaseException | None = None
        self._injected: BaseException | None = None
        self._closed = False

    def submit(self, work: Callable[[], None]) -> None:
        self._put(_Item(lambda: self._attempt(lambda: self._work(work))))

    def record(self) -> SteppedEvent:
        event = SteppedEvent()
        self._put(_Item(lambda: event.complete(self._cause)))
        return event

    def wait(self, event: Event) -> None:
        self._put(_Item(lambda: self._pass(event), gate=event))

    def clear_error(self) -> None:
        self._put(_Item(self._forget))

    def fail_next(self, cause: BaseException | None = None) -> None:
        """Let the next work that would run fail with `cause` instead."""
        self._injected = cause or OSError("injected failure")

    @property
    def idle(self) -> bool:
        """Nothing is left to run."""
        return not self._items

    @property
    def blocked(self) -> bool:
        """The next item waits for an event that is not complete, be the stream poisoned or not."""
        return bool(self._items) and not _over(self._items[0].gate)

    def step(self) -> bool:
        """Run the next item. False, with nothing done, if idle or blocked."""
        if self.idle or self.blocked:
            return False
        self._items.popleft().run()
        return True

    def close(self) -> None:
        """Run what is left. Raises ProtocolError if that is blocked by another stream: drain both first."""
        while self.step():
            pass
        if not self.idle:
            raise ProtocolError(f"stream {self.name} closed while it waits for an event: drain the streams together")
        self._closed = True

    def _put(self, item: _Item) -> None:
        if self._closed:
            raise ProtocolError(f"stream {self.name} is closed")
        self._items.append(item)

    def _work(self, work: Callable[[], None]) -> None:
        if (injected := self._injected) is not None:
            self._injected = None
            raise injected
        work()

    def _attempt(self, work: Callable[[], None]) -> None:
        if self._cause is not None:
            return
        try:
            work()
        except BaseException as error:
            self._cause = error

    def _pass(self, gate: Event) -> None:
        try:
            gate.synchronize()
        except BaseException as error:
            self._cause = self._cause or error

    def _forget(self) -> None:
        self._cause = None


def drain(*streams: SteppedStream) -> None:
    """Step `streams` until none can move; they may still be blocked by each other or by outside events."""
    while any(stream.step() for stream in streams):
        pass


def _over(gate: Event | None) -> bool:
    """True if `gate` holds nothing back any more, be it complete or failed."""
    try:
        return gate is None or gate.query()
    except TransferError:
        return True
