"""Requests to the storage engine, and their results.

A worker sets the results first and `done` last; whoever sees `done` sees the results. Until then the
buffers of a ticket are the worker's, except the first `count` of a read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hicache.hashing import page_digests
from hicache.storage_backends.base import PageRun, StorageBackend

BATCH_PAGES = 64
"""Pages of one backend read: a cancelled load ends within one batch."""


@dataclass(eq=False)
class Ticket:
    """One request to the engine. `error` is set if the backend raised, or if it was not asked at all.

    Set `cancelled` to end it early: what waits is not begun, a read ends after its batch. `overdue` says that
    a backend call for it has been running for longer than its deadline. `busy`: seconds that calls for it
    took, shared out among the calls that ran beside each other.
    """

    kind: ClassVar[str]
    done: bool = False
    error: Exception | None = None
    cancelled: bool = False
    overdue: bool = False
    queued_at: float = 0.0
    busy: float = 0.0
    nbytes: int = 0

    @property
    def hangs(self) -> bool:
        return self.overdue and not self.done

    def call(self, backend: StorageBackend) -> bool:
        """The next backend call for it; True if it was the last."""
        raise NotImplementedError


@dataclass(eq=False)
class LookupTicket(Ticket):
    """Which leading pages are stored: those in `keys`, or of `tokens` (int32 bytes, after the page named `parent`)."""

    kind = "lookup"
    parent: bytes = b""
    tokens: bytes = b""
    page_size: int = 1
    keys: list[bytes] = field(default_factory=list)
    hits: int = 0

    def call(self, backend: StorageBackend) -> bool:
        self.keys = self.keys or page_digests(self.parent, self.tokens, self.page_size)
        self.hits = backend.contains_prefix(self.keys)
        return True


@dataclass(eq=False)
class ReadTicket(Ticket):
    """Pages being read. The first `count` buffers are read and verified, and not written to any more."""

    kind = "read"
    keys: Sequence[bytes] = ()
    buffers: Sequence[memoryview] = ()
    count: int = 0

    def call(self, backend: StorageBackend) -> bool:
        at = self.count
        keys = self.keys[at : at + BATCH_PAGES]
        if not keys:
            return True
        self.count += backend.read_into(keys, self.buffers[at : at + BATCH_PAGES])
        return self.count < at + len(keys) or self.count == len(self.keys)


@dataclass(eq=False)
class WriteTicket(Ticket):
    """Runs being stored; `counts[i]` leading pages of run i are stored once `done`."""

    kind = "write"
    runs: Sequence[PageRun] = ()
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = [0] * len(self.runs)

    def call(self, backend: StorageBackend) -> bool:
        self.counts = backend.write(self.runs)
        return True


@dataclass(eq=False)
class ClearTicket(Ticket):
    """Everything of this identity being removed from the store."""

    kind = "clear"

    def call(self, backend: StorageBackend) -> bool:
        backend.clear()
        return True
