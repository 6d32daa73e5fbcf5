"""As much of torch.cuda as streams need, on a device that moves only when the test steps it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from hicache.streams.cuda import CudaStream


@dataclass
class Mark:
    """What an event captures when it is recorded."""

    done: bool = False


@dataclass
class Item:
    """One entry of a stream: runs once `after`, if there is one, is done."""

    run: Callable[[], None]
    after: Mark | None = None


class FakeCuda:
    """The device. `refuse` names the calls that raise a CUDA error from now on."""

    def __init__(self) -> None:
        self.refuse: set[str] = set()
        self.streams: list[FakeStream] = []
        self.events: list[FakeEvent] = []
        self.entered = 0
        self.current = self.new_stream(0, priority=0)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """In place of torch.cuda, until the test ends."""
        patch.setattr(torch.cuda, "Stream", self.new_stream)
        patch.setattr(torch.cuda, "Event", self.new_event)
        patch.setattr(torch.cuda, "stream", self.enter)
        patch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "synchronize", _forbidden)

    def new_stream(self, device: int, *, priority: int) -> FakeStream:
        self.check("Stream")
        self.streams.append(FakeStream(self, device, priority))
        return self.streams[-1]

    def new_event(self, *, enable_timing: bool, blocking: bool) -> FakeEvent:
        assert blocking and not enable_timing
        self.check("Event")
        self.events.append(FakeEvent(self))
        return self.events[-1]

    @contextmanager
    def enter(self, stream: FakeStream) -> Iterator[None]:
        self.check("stream")
        self.entered += 1
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def launch(self, kernel: Callable[[], None]) -> Callable[[], None]:
        """Work that launches `kernel` on the current stream."""
        return lambda: self.current.items.append(Item(kernel))

    def drain(self) -> None:
        """Run all that nothing holds back."""
        while sum(stream.step() for stream in self.streams):
            pass

    def check(self, call: str) -> None:
        if call in self.refuse:
            raise RuntimeError(f"CUDA error: {call} refused")


@dataclass
class FakeStream:
    cuda: FakeCuda
    device: int
    priority: int
    items: deque[Item] = field(default_factory=deque)
    synchronized: int = 0

    def step(self) -> bool:
        if not self.items or (self.items[0].after is not None and not self.items[0].after.done):
            return False
        self.items.popleft().run()
        return True

    def synchronize(self) -> None:
        self.synchronized += 1
        while self.items:
            self.cuda.drain()
        self.cuda.check("synchronize")


class FakeEvent:
    """Like the real one: a wait takes the mark of the last record, a later record changes nothing about it."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.mark = Mark(done=True)
        self.queries = 0

    def record(self, stream: FakeStream) -> None:
        self._cuda.check("record")
        mark = self.mark = Mark()
        stream.items.append(Item(lambda: setattr(mark, "done", True)))

    def wait(self, stream: FakeStream) -> None:
        self._cuda.check("wait")
        stream.items.append(Item(lambda: None, self.mark))

    def query(self) -> bool:
        self._cuda.check("query")
        self.queries += 1
        return self.mark.done

    def synchronize(self) -> None:
        mark = self.mark
        while not mark.done:
            self._cuda.drain()
        self._cuda.check("synchronize")


def raw_of(stream: CudaStream) -> FakeStream:
    """The fake stream under `stream`."""
    raw = stream._stream
    assert isinstance(raw, FakeStream)
    return raw


def _forbidden() -> None:
    raise AssertionError("the whole device was synchronised")
