"""Requests to the storage engine, and their results.

A worker sets the results first and `done` last; whoever sees `done` sees the results. Until then the
buffers of a ticket are the worker's, except the first `count` of a read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from hicache.hashing import page_digests
from hicache.storage_backends.base import PageRun, StorageBackend

BATCH_PAGES = 64
"""Pages of one backend read: a cancelled load ends within one batch."""

WRITE_PAGES, WRITE_BYTES = 4096, 64 << 20
"""At most so much is stored in one transaction: the deadline of a call is one for bounded work, and a long prompt on a
healthy disk does not look like a disk that hangs."""


@dataclass(eq=False)
class Ticket:
    """One request to the engine. `error` is set if the backend raised, or if it was not asked at all.

    Set `cancelled` to end it early: what waits is not begun, a read ends after its batch. `overdue` says that
    a backend call for it has been running for longer than its deadline. `busy`: seconds that calls for it
    took, shared out among the calls that ran beside each other.
    """

    kind: ClassVar[str]
    round_robin: ClassVar[bool] = True  # whether others come first when it needs more calls
    done: bool = False
    error: Exception | None = None
    cancelled: bool = False
    overdue: bool = False
    queued_at: float | None = None  # when it began to wait for its next call
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
class CheckTicket(Ticket):
    """Which of `keys` are stored, each by itself: `present` has one answer a key once `done` without an error."""

    kind = "lookup"
    keys: Sequence[bytes] = ()
    present: list[bool] = field(default_factory=list)

    def call(self, backend: StorageBackend) -> bool:
        self.present = backend.contains_each(self.keys)
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
    """Runs being stored, a bounded part of them with each call; `counts[i]` leading pages of run i are stored once
    `done`. Stores keep their order, since pages of a later one may hang below those of this one."""

    kind = "write"
    round_robin = False
    runs: Sequence[PageRun] = ()
    counts: list[int] = field(default_factory=list)
    _left: deque[int] = field(default_factory=deque)  # runs that are not through, in order

    def __post_init__(self) -> None:
        self.counts = [0] * len(self.runs)
        self._left = deque(range(len(self.runs)))

    def call(self, backend: StorageBackend) -> bool:
        parts = self._next_parts()
        counts = backend.write(list(parts.values()))
        for (number, part), count in zip(parts.items(), counts, strict=True):
            self.counts[number] += count
            if count < len(part.keys) or self.counts[number] == len(self.runs[number].keys):
                self._left.remove(number)
        return not self._left

    def _next_parts(self) -> dict[int, PageRun]:
        """What follows of the runs that are not through, by the run's number."""
        parts: dict[int, PageRun] = {}
        pages, nbytes = WRITE_PAGES, WRITE_BYTES
        for number in self._left:
            run, at = self.runs[number], self.counts[number]
            page_bytes = max(run.buffers[0].nbytes, 1) if run.buffers else 1
            count = min(len(run.keys) - at, pages, max(nbytes // page_bytes, not parts))
            if count < 1 and len(run.keys):
                break
            parent = run.keys[at - 1] if at else run.parent
            parts[number] = replace(
                run, keys=run.keys[at : at + count], buffers=run.buffers[at : at + count], parent=parent
            )
            pages -= count
            nbytes -= count * page_bytes
        return parts


@dataclass(eq=False)
class ClearTicket(Ticket):
    """Everything of this identity being removed from the store."""

    kind = "clear"

    def call(self, backend: StorageBackend) -> bool:
        backend.clear()
        return True
