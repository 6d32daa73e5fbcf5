"""Prefetch: pages that neither device nor host has come from storage while the request waits.

    LOOKUP --hits--> READING --done, deadline or asked for--> ENDED
       '---no hits, no room, error------------------------------^

Pages stage outside the tree until they are read and verified: what the tree holds is readable. A
miss costs no page; a request never waits beyond its deadline, whatever storage does. What has arrived
and waits for its request is bounded to half the host, so that prefetches do not push each other out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from hicache.demotion import Demotion
from hicache.hashing import DIGEST_BYTES
from hicache.stats import STORAGE_HOST
from hicache.tiers import Tiers
from hicache.transfer.storage_engine import LookupTicket, ReadTicket
from hicache.tree.plans import PrefixMatch
from hicache.types import PageIndices, PrefixKey, no_pages

PrefetchMode = Literal["best_effort", "wait_complete", "timeout"]

MAX_ATTEMPTS = 3
"""How often a request that waited for another's prefetch of its prefix looks for more."""


@dataclass(frozen=True)
class PrefetchPolicy:
    """How long a request waits for storage; `deadline` in seconds is never exceeded.

    | mode          | the request may run                                          |
    |---------------|--------------------------------------------------------------|
    | best_effort   | at once, with what has arrived when the scheduler asks       |
    | timeout       | when all has arrived, or `deadline` after it was enqueued    |
    | wait_complete | when all has arrived, or `deadline` after it was first asked |
    """

    mode: PrefetchMode = "timeout"
    deadline: float = 0.2
    min_pages: int = 1


@dataclass(eq=False)
class Prefetch:
    """The prefetch of one request."""

    rid: str
    key: PrefixKey
    started: float
    asked: float | None = None
    attempts: int = 0
    start: bytes = b""  # names the first missing page; equal for requests that miss the same one
    first_page: int = 0
    lookup: LookupTicket | None = None
    read: ReadTicket | None = None
    pages: PageIndices = field(default_factory=no_pages)
    leader: Prefetch | None = None  # another request's prefetch that brings the next missing page
    ended: bool = False


class Prefetcher:
    """All prefetches under way. Scheduler thread only."""

    def __init__(
        self,
        tiers: Tiers,
        demotion: Demotion,
        match: Callable[[PrefixKey], PrefixMatch],
        clock: Callable[[], float],
        policy: PrefetchPolicy,
    ) -> None:
        self._tiers = tiers
        self._demotion = demotion
        self._match = match
        self._clock = clock
        self._policy = policy
        self._active: dict[str, Prefetch] = {}
        self._leaders: dict[bytes, Prefetch] = {}
        self._unclaimed: dict[str, int] = {}  # request -> pages that have arrived for it and it has not used yet
        self._draining: list[tuple[ReadTicket, PageIndices]] = []  # ended reads whose last batch is still running

    def start(self, rid: str, key: PrefixKey) -> None:
        """Begin to look for what `key` misses. A second start of the same request ends the first."""
        self.end(rid)
        if self._tiers.usable_storage is None or self._tiers.usable_host is None:
            return
        op = Prefetch(rid, key, self._clock())
        self._attempt(op)
        if not op.ended:
            self._active[rid] = op

    def _attempt(self, op: Prefetch) -> None:
        storage, tree = self._tiers.usable_storage, self._tiers.tree
        match = self._match(op.key)
        page_bytes = tree.page_bytes
        known = match.device_len + match.host_hit_len
        op.attempts += 1
        op.first_page = known // tree.page_size
        missing = op.key.data[op.first_page * page_bytes :]
        if storage is None or len(missing) // page_bytes < self._policy.min_pages or op.attempts > MAX_ATTEMPTS:
            self._finish(op, "nothing_missing" if op.attempts == 1 else "complete")
            return
        seed = self._tiers.seed(op.key.namespace)
        parent = tree.digests(match.path[-1], seed)[-DIGEST_BYTES:] if match.path else seed
        op.start = parent + missing[:page_bytes]
        leader = self._leaders.get(op.start)
        if leader is not None:
            op.leader = leader
            return
        op.lookup = storage.engine.lookup(parent, missing)
        if op.lookup is None:
            self._finish(op, "queue_full")
            return
        self._leaders[op.start] = op

    def poll(self) -> None:
        """Take every prefetch as far as its tickets allow."""
        for op in list(self._active.values()):
            self._advance(op)
        self._draining = [(read, pages) for read, pages in self._draining if not self._drained(read, pages)]

    def _advance(self, op: Prefetch) -> None:
        if op.leader is not None:
            if op.leader.ended:
                op.leader = None
                self._attempt(op)
        elif op.read is not None:
            if op.read.done:
                self._end(op, "complete" if op.read.count == len(op.read.keys) else "short")
        elif op.lookup is not None and op.lookup.done:
            self._begin_read(op, op.lookup)

    def _begin_read(self, op: Prefetch, lookup: LookupTicket) -> None:
        if lookup.hits >= self._policy.min_pages and self._crowded(lookup.hits):
            return
        self._tally(lookup.error)
        host, storage = self._tiers.usable_host, self._tiers.usable_storage
        if lookup.hits < self._policy.min_pages or host is None or storage is None:
            self._end(op, "miss" if lookup.error is None else "error")
            return
        wanted = min(lookup.hits, host.pool.num_pages)
        self._demotion.make_host_room(wanted)
        pages = host.pool.allocator.alloc(min(wanted, host.pool.allocator.free_pages))
        if pages is None or not len(pages):
            self._end(op, "no_room")
            return
        read = storage.engine.read(lookup.keys[: len(pages)], self._tiers.host_buffers(pages))
        if read is None:
            self._tiers.free_host(pages)
            self._end(op, "queue_full")
            return
        op.read, op.pages = read, pages
        self._tiers.staged_host_pages += len(pages)

    def _crowded(self, hits: int) -> bool:
        """Would these pages push out what earlier prefetches brought for requests that still wait?"""
        host = self._tiers.host
        held = self._tiers.staged_host_pages + sum(self._unclaimed.values())
        return host is not None and held > 0 and held + hits > host.pool.num_pages // 2

    def claim(self, rid: str) -> None:
        """The request runs: what arrived for it is in its hands."""
        self._unclaimed.pop(rid, None)

    def ready(self, rid: str) -> bool:
        """May the request run now? Ends its prefetch if its time is up."""
        op = self._active.get(rid)
        if op is None:
            return True
        self._advance(op)
        now = self._clock()
        if op.asked is None:
            op.asked = now
        if op.ended:
            return True
        since = op.asked if self._policy.mode == "wait_complete" else op.started
        if self._policy.mode != "best_effort" and now - since < self._policy.deadline:
            return False
        self._end(op, "cut_short")
        return True

    def end(self, rid: str) -> None:
        """Stop the prefetch of a request; what has arrived stays. Unknown requests are ignored."""
        op = self._active.get(rid)
        if op is not None:
            self._end(op, "cancelled")
        self.claim(rid)

    def end_all(self) -> None:
        for rid in list(self._active):
            self.end(rid)
        self._unclaimed.clear()

    def _end(self, op: Prefetch, how: str) -> None:
        if op.read is not None:
            self._keep_arrived(op, op.read)
        self._finish(op, how)

    def _keep_arrived(self, op: Prefetch, read: ReadTicket) -> None:
        """Hand the verified pages to the tree; the others are free once the worker has let go of them."""
        tiers, arrived = self._tiers, read.count
        read.cancelled = True
        tiers.staged_host_pages -= arrived
        tiers.counters.moved_bytes[STORAGE_HOST] += arrived * tiers.device_pool.layout.page_stride
        if arrived:
            self._unclaimed[op.rid] = self._unclaimed.get(op.rid, 0) + arrived
            tiers.free_host(tiers.tree.insert_host(op.key, op.first_page, op.pages[:arrived]))
        rest = op.pages[arrived:]
        if not self._drained(read, rest):
            self._draining.append((read, rest))

    def _drained(self, read: ReadTicket, pages: PageIndices) -> bool:
        if not read.done:
            return False
        self._tally(read.error)
        self._tiers.staged_host_pages -= len(pages)
        self._tiers.free_host(pages)
        return True

    def _finish(self, op: Prefetch, how: str) -> None:
        op.ended = True
        self._active.pop(op.rid, None)
        if self._leaders.get(op.start) is op:
            del self._leaders[op.start]
        self._tiers.counters.prefetches[how] += 1

    def _tally(self, error: Exception | None) -> None:
        storage = self._tiers.storage
        if storage is None:
            return
        if error is not None:
            self._tiers.counters.failures["load"] += 1
        storage.count(failed=error is not None)

    @property
    def in_flight(self) -> bool:
        """Is anything under way? A prefetch that waits for others to be claimed is not."""
        return bool(self._draining) or any(_moves(op) for op in self._active.values())


def _moves(op: Prefetch) -> bool:
    if op.leader is not None:
        return _moves(op.leader) or op.leader.ended
    return op.read is not None or (op.lookup is not None and not op.lookup.done)
