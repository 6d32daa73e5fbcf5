"""CUDA streams with the rules of order and failure of `Stream`, and no synchronisation of a whole device."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from hicache.errors import ConfigError, ProtocolError, TransferError
from hicache.streams.base import Event, Stream
from hicache.streams.cuda_events import CudaEvent, event_pool


class CudaStream(Stream):
    """A stream of one CUDA device. One thread at a time may use it; its events may be used by any.

    `submit` runs `work` at once, with this stream and its device as torch's current ones: what fails is the launch.
    An error on the device itself (a bad address, say) shows at an event, and all later calls of CUDA fail with it
    whatever is cleared here: the process has lost its device.

    torch has 32 streams for each priority and hands them out in turn. Two objects may get the same one; their
    work is then ordered more than it had to be, never less.

    Raises ConfigError if CUDA gives no stream.
    """

    def __init__(self, name: str, device: int, priority: int = 0) -> None:
        self.name = name
        self._stream = _new_stream(device, priority)
        self._pool = event_pool(device)
        self._cause: BaseException | None = None
        self._closed = False

    def submit(self, work: Callable[[], None]) -> None:
        self._check_open()
        self._attempt(lambda: self._enter(work))

    def record(self) -> CudaEvent:
        self._check_open()
        return self._record()

    def submit_all(self, works: Sequence[Callable[[], None]]) -> list[Event]:
        """Enters the stream once for all: that costs several microseconds."""
        self._check_open()
        events: list[Event] = []

        def run() -> None:
            for work in works:
                self._attempt(work)
                events.append(self._record())

        self._attempt(lambda: self._enter(run))
        events.extend(self._record() for _ in works[len(events) :])  # poisoned before the first of these could run
        return events

    def wait(self, event: Event) -> None:
        """An event of another kind of stream must be complete: a CUDA stream cannot wait for it, we must not block.

        Raises ProtocolError if it is not.
        """
        self._check_open()
        try:
            if isinstance(event, CudaEvent):
                event.hold(self._stream)
            elif not event.query():
                raise ProtocolError(f"CUDA stream {self.name} cannot wait for an incomplete {type(event).__name__}")
        except TransferError as error:
            self._cause = self._cause or error

    def clear_error(self) -> None:
        self._check_open()
        self._cause = None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with suppress(RuntimeError):  # of a lost device, where nothing is left to wait for; events report it
            self._stream.synchronize()

    def _check_open(self) -> None:
        if self._closed:
            raise ProtocolError(f"stream {self.name} is closed")

    def _attempt(self, work: Callable[[], None]) -> None:
        if self._cause is not None:
            return
        try:
            work()
        except BaseException as error:
            self._cause = error
            if not isinstance(error, Exception):
                raise  # Ctrl-C is for the thread that submits, not only for this stream

    def _enter(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def _record(self) -> CudaEvent:
        event = self._pool.record(self._stream, self._cause)
        self._cause = event.cause  # failing to record an event poisons like failing work
        return event


def cuda_index(device: str) -> int:
    """The index of `device`: cuda is torch's current one, cuda:N the N-th.

    Raises ConfigError for other names and for a device that is not there.
    """
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise ConfigError(f"device {device!r}: it must be cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError(f"device {device!r}: torch finds no CUDA device, use device: cpu")
    index = int(match[1]) if match[1] else torch.cuda.current_device()
    if index >= count:
        raise ConfigError(f"device {device!r}: torch finds {count} CUDA devices, the last is cuda:{count - 1}")
    return index


def _new_stream(device: int, priority: int) -> torch.cuda.Stream:
    make: Callable[..., torch.cuda.Stream] = torch.cuda.Stream  # its constructor has no types
    try:
        return make(device, priority=priority)
    except RuntimeError as error:
        raise ConfigError(f"CUDA device {device}: no stream is to be had: {error}") from error
