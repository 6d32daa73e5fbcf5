"""Ordered asynchronous work queues, by device."""

from __future__ import annotations

from hicache.streams.base import Event, Stream
from hicache.streams.cpu import ThreadEvent, ThreadStream

__all__ = ["Event", "Stream", "ThreadEvent", "ThreadStream", "create_stream", "record_compute"]

# The CUDA half is imported where it is asked for: it brings in torch, which the CPU half does not need.


def create_stream(device: str, name: str, priority: int = 0) -> Stream:
    """A stream for copies between `device` and host memory; `name` shows in thread lists and errors.

    `device` is cpu, cuda (torch's current device) or cuda:N. `priority` is as in CUDA, a lower number is more
    urgent; a CPU ignores it. Raises ConfigError for a device that has no streams or is not there.
    """
    if device == "cpu":
        return ThreadStream(name)
    from hicache.streams.cuda import CudaStream, cuda_index

    return CudaStream(name, cuda_index(device), priority)


def record_compute(device: str) -> Event | None:
    """A point after all that the calling thread has computed on `device` so far.

    None on a CPU, where that is over when the call returns. On CUDA an event on the thread's current stream.
    Raises ConfigError for a device that has no streams or is not there.
    """
    if device == "cpu":
        return None
    from hicache.streams.cuda import cuda_index
    from hicache.streams.cuda_events import record_current

    return record_current(cuda_index(device))
