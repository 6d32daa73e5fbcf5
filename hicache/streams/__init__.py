"""Ordered asynchronous work queues, by device."""

from __future__ import annotations

from hicache.errors import ConfigError
from hicache.streams.base import Event, Stream
from hicache.streams.cpu import ThreadEvent, ThreadStream

__all__ = ["Event", "Stream", "ThreadEvent", "ThreadStream", "create_stream"]


def create_stream(device: str, name: str) -> Stream:
    """A stream for copies between `device` and host memory; `name` shows in thread lists and errors.

    Raises ConfigError for a device that has no streams in this build.
    """
    if device == "cpu":
        return ThreadStream(name)
    raise ConfigError(f"device {device!r}: this build has CPU streams only, use device: cpu")
