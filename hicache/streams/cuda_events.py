"""Events on CUDA streams, on top of raw torch.cuda.Event objects that are used again and again.

| moment | who has the raw event |
|---|---|
| recorded | the handle (`CudaEvent`), and every call of it that is under way in some thread |
| the handle has seen the outcome, or is dropped | the calls still under way |
| the last of them has returned | the pool |

A wait that is enqueued on a raw event is for the record it found at that call (cudaStreamWaitEvent), so recording the
raw event anew later does not change what is waited for: a handle may be dropped while streams still wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Protocol

import torch

from hicache.errors import TransferError
from hicache.streams.base import raise_failure

POOL_LIMIT = 1024
"""Raw events that a device's pool keeps: those of ten loads in flight on a deep model."""


class RawEvent(Protocol):
    """What we use of torch.cuda.Event, which has no types of its own. A CUDA error is a RuntimeError."""

    def record(self, stream: torch.cuda.Stream) -> None: ...
    def wait(self, stream: torch.cuda.Stream) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class _Lease:
    """The use of one raw event. It returns to the pool when the last reference to the lease goes.

    Counting references is what makes reuse safe without locks: a thread inside a call holds one.
    """

    __slots__ = ("_free", "raw")

    def __init__(self, raw: RawEvent, free: deque[RawEvent]) -> None:
        self.raw = raw
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.raw)


class CudaEvent:
    """A point in a CUDA stream. Keeps its outcome, good or bad, for ever.

    `cause` is what is known to have failed before this point. It is reported only once the work submitted before is
    over on the device: that work may still write to pages which are freed when the failure is seen.
    """

    def __init__(self, device: int, lease: _Lease | None, cause: BaseException | None) -> None:
        self.cause = cause
        self._device = device
        self._lease = lease  # None: over, `cause` is the outcome

    def query(self) -> bool:
        lease = self._lease
        if lease is not None:
            try:
                if not lease.raw.query():
                    return False
            except RuntimeError as error:
                self._fail(error)
            self._lease = None
        raise_failure(self.cause)
        return True

    def synchronize(self) -> None:
        lease = self._lease
        if lease is not None:
            try:
                lease.raw.synchronize()
            except RuntimeError as error:
                self._fail(error)
            self._lease = None
        raise_failure(self.cause)

    def gate(self) -> None:
        """Raises TransferError at once for a failure known already, but the current stream waits all the same.

        So what the thread does about the failure on this stream also comes after the work that failed. The error
        does not say that this work is over: pages are freed on the word of `query` only.
        """
        self.hold(torch.cuda.current_stream(self._device))

    def hold(self, stream: torch.cuda.Stream) -> None:
        """What is enqueued on `stream` from now on comes after this event; does not block.

        Raises TransferError if work before the event is known to have failed, or if CUDA refuses the wait.
        The order holds in both cases: for a refused wait by blocking, as there is no other way left.
        """
        lease = self._lease
        if lease is not None:
            try:
                lease.raw.wait(stream)
            except RuntimeError as error:
                with suppress(RuntimeError):
                    lease.raw.synchronize()
                raise TransferError(f"a stream cannot wait for another one: {error}") from error
        raise_failure(self.cause)

    def _fail(self, error: RuntimeError) -> None:
        """CUDA reports an error in place of completion: its context is lost and no work of it runs any more."""
        self.cause = self.cause or error


class EventPool:
    """The raw events of one device, at most `limit` idle ones. Any thread may use it.

    The deque needs no lock: its operations are atomic, also where the garbage collector runs `_Lease.__del__` in the
    middle of one of ours; beyond its limit it drops the oldest.
    """

    def __init__(self, device: int, limit: int = POOL_LIMIT) -> None:
        self._device = device
        self._free: deque[RawEvent] = deque(maxlen=limit)

    def record(self, stream: torch.cuda.Stream, cause: BaseException | None = None) -> CudaEvent:
        """A point after everything enqueued on `stream` so far; `cause` is what failed of it already.

        Never raises for a CUDA error: if the event cannot be recorded, it has failed with that error, after
        `stream` has been waited for.
        """
        try:
            lease = _Lease(self._raw(), self._free)
            lease.raw.record(stream)
        except RuntimeError as error:
            with suppress(RuntimeError):
                stream.synchronize()
            return CudaEvent(self._device, None, cause or error)
        return CudaEvent(self._device, lease, cause)

    def _raw(self) -> RawEvent:
        try:
            return self._free.pop()
        except IndexError:
            # No timing: it costs on every record. Blocking: a thread in synchronize() sleeps, it does not spin.
            make: Callable[..., RawEvent] = torch.cuda.Event
            return make(enable_timing=False, blocking=True)


@cache
def event_pool(device: int) -> EventPool:
    """The pool of the CUDA device with this index."""
    return EventPool(device)


def record_current(device: int) -> CudaEvent:
    """A point after all that the calling thread has launched on its current stream of this device."""
    return event_pool(device).record(torch.cuda.current_stream(device))
