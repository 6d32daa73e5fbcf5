"""What the scheduler's side and the workers' side of the connector tell each other.

A job has a number. Every rank runs every job on pages of the same numbers and reports what came of it; the job
is over once all ranks have reported, and its result is the smallest.

| job     | moves                                 | result                                   |
|---------|---------------------------------------|------------------------------------------|
| Load    | host pages to device blocks           | 1, or 0 if the copy failed               |
| Store   | device blocks to host pages           | 1, or 0 if the copy failed               |
| Lookup  | nothing: asks the disk                | leading pages that are there             |
| Read    | disk to host pages                    | leading pages that were read and verified |
| Persist | host pages to disk                    | leading pages that are stored            |

Keys are 32 bytes; a rank makes the names on its disk from them and its own identity. What a job moves is given as
pairs, never as two lists: a page and the block or the key that it belongs to cannot part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from hicache.hashing import StoreIdentity


class BlockCopy(NamedTuple):
    """One device block and the host page with the same tokens."""

    block: int
    page: int


class NamedPage(NamedTuple):
    """One host page and the key of its tokens."""

    key: bytes
    page: int


@dataclass(frozen=True)
class Load:
    job: int
    request: str
    copies: list[BlockCopy]


@dataclass(frozen=True)
class Store:
    job: int
    request: str
    copies: list[BlockCopy]


@dataclass(frozen=True)
class Lookup:
    job: int
    keys: list[bytes]


@dataclass(frozen=True)
class Read:
    job: int
    pages: list[NamedPage]


@dataclass(frozen=True)
class Persist:
    """`pages` follow each other; `parent` is the key before the first, None at the start of a chain."""

    job: int
    pages: list[NamedPage]
    parent: bytes | None


@dataclass
class StepPlan(KVConnectorMetadata):
    """The jobs of one step: loads may be under way for several, stores end with it. `cancelled` are jobs whose
    result nobody waits for any more; they still report. `idle`: the step computes nothing."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    persists: list[Persist] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    idle: bool = False


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Results by job: how many ranks have reported, and the smallest of theirs."""

    results: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, job: int, ranks: int, result: int) -> None:
        known, least = self.results.get(job, (0, result))
        self.results[job] = (known + ranks, min(least, result))

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Reports of two ranks as one."""
        assert isinstance(other, WorkerReport)
        both = WorkerReport(dict(self.results))
        for job, (ranks, result) in other.results.items():
            both.add(job, ranks, result)
        return both


@dataclass
class Hello(KVConnectorHandshakeMetadata):
    """What the scheduler learns of a rank before the first request."""

    identity: StoreIdentity
    host_pages: int
