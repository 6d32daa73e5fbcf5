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
from typing import Literal, NamedTuple

from hicache.demotion import Demotion
from hicache.hashing import DIGEST_BYTES
from hicache.load_choice import StorageLoad
from hicache.stats import STORAGE_HOST
from hicache.tiers import Tiers
from hicache.transfer.storage_tickets import LookupTicket, ReadTicket
from hicache.tree.node import Node
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
    last: Node | None = None  # the node before that page
    lookup: LookupTicket | None = None
    read: ReadTicket | None = None
    pages: PageIndices = field(default_factory=no_pages)
    generation: int = 0  # of the store when the read began
    second: bool = False  # for what had been in memory when the first one looked
    leader: Prefetch | None = None  # another request's prefetch that brings the next missing page
    claimed: bool = False  # its request runs already: nobody waits for what is still to come
    ended: bool = False


class _Ended(NamedTuple):
    """What is kept of a prefetch that has ended while its request waits."""

    key: PrefixKey
    started: float
    asked: float | None
    known: int  # tokens that were in memory when it looked,
    last: Node | None  # up to this node


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
        self._ended: dict[str, _Ended] = {}  # of requests that still wait
        self._unclaimed: dict[str, int] = {}  # request -> pages that have arrived for it and it has not used yet
        self._draining: list[tuple[ReadTicket, PageIndices]] = []  # ended reads whose last batch is still running

    def start(self, rid: str, key: PrefixKey) -> None:
        """Begin to look for what `key` misses. A second start of the same request ends the first."""
        self.end(rid)
        if self._tiers.readable_storage is None or self._tiers.usable_host is None:
            return
        op = Prefetch(rid, key, self._clock())
        self._attempt(op)
        if not op.ended:
            self._active[rid] = op

    def _attempt(self, op: Prefetch) -> None:
        storage, tree = self._tiers.readable_storage, self._tiers.tree
        match = self._match(op.key)
        page_bytes = tree.page_bytes
        known = match.device_len + match.host_hit_len
        op.attempts += 1
        op.first_page, op.last = known // tree.page_size, match.path[-1] if match.path else None
        missing = op.key.data[op.first_page * page_bytes :]
        if len(missing) // page_bytes < self._policy.min_pages or op.attempts > MAX_ATTEMPTS:
            self._finish(op, "nothing_missing" if op.attempts == 1 else "complete")
            return
        if storage is None:
            self._finish(op, "error")
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
        elif any(ticket is not None and ticket.hangs for ticket in (op.lookup, op.read)):
            self._end(op, "error")
        elif op.read is not None:
            if op.read.done:
                self._end(op, "complete" if op.read.count == len(op.read.keys) else "short")
        elif op.lookup is not None and op.lookup.done:
            self._begin_read(op, op.lookup)

    def _begin_read(self, op: Prefetch, lookup: LookupTicket) -> None:
        if lookup.hits >= self._policy.min_pages and self._crowded(op, lookup.hits):
            return
        host, storage = self._tiers.usable_host, self._tiers.readable_storage
        if lookup.error is not None or host is None or storage is None:
            self._end(op, "error")
            return
        if lookup.hits < self._policy.min_pages:
            self._end(op, "miss")
            return
        at = op.first_page * self._tiers.tree.page_size
        wanted = self._tiers.loads.from_storage(at, min(lookup.hits, host.pool.num_pages), self._load(1))
        if wanted < self._policy.min_pages:
            self._end(op, "declined")
            return
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
        op.read, op.pages, op.generation = read, pages, storage.generation
        self._tiers.staged_host_pages += len(pages)

    def _crowded(self, op: Prefetch, hits: int) -> bool:
        """Would these pages push out what earlier prefetches brought for requests that still wait?

        The oldest never stands back: others may wait for its request to run.
        """
        host = self._tiers.host
        if host is None or op is next(iter(self._active.values()), op):
            return False
        unclaimed = sum(count for rid, count in self._unclaimed.items() if rid != op.rid)
        held = self._tiers.staged_host_pages + unclaimed
        return held > 0 and held + hits > host.pool.num_pages // 2

    def claim(self, rid: str) -> None:
        """The request runs: what arrived for it is in its hands, and what still arrives is nobody's in particular."""
        if rid in self._active:
            self._active[rid].claimed = True
        self._unclaimed.pop(rid, None)
        self._ended.pop(rid, None)

    def ready(self, rid: str) -> bool:
        """May the request run now? Ends its prefetch if its time is up."""
        op = self._active.get(rid) or self._second(rid)
        if op is None:
            self._first_asked(rid)
            return True
        self._advance(op)
        if op.asked is None:
            op.asked = self._clock()
            self._tiers.loads.measured_wait(op.asked - op.started)
        if op.ended:
            return True
        if self._may_wait(op):
            return False
        self._end(op, "cut_short")
        return True

    def _may_wait(self, op: Prefetch) -> bool:
        since = op.asked if self._policy.mode == "wait_complete" and op.asked is not None else op.started
        in_time = self._policy.mode != "best_effort" and self._clock() - since < self._policy.deadline
        return in_time and self._worth_waiting(op)

    def _worth_waiting(self, op: Prefetch) -> bool:
        """Does what is still to be read, by this prefetch or by the one it waits for, come sooner than computed?"""
        while op.leader is not None:
            op = op.leader
        if op.read is not None:
            left, first = len(op.read.keys) - op.read.count, op.first_page + op.read.count
        elif op.lookup is not None and op.lookup.done:
            left, first = op.lookup.hits, op.first_page
        else:
            return True
        return self._tiers.loads.waits_for(first * self._tiers.tree.page_size, left, self._load())

    def _load(self, more: int = 0) -> StorageLoad:
        """How busy it is, with so many reads more."""
        reads = sum(op.read is not None for op in self._active.values())
        return StorageLoad(reads + more, len(self._active) + len(self._ended))

    def _first_asked(self, rid: str) -> None:
        """It is the turn of a request whose prefetch has ended."""
        ended = self._ended.get(rid)
        if ended is not None and ended.asked is None:
            now = self._clock()
            self._ended[rid] = ended._replace(asked=now)
            self._tiers.loads.measured_wait(now - ended.started)

    def _second(self, rid: str) -> Prefetch | None:
        """Another prefetch, once, for what was in memory when the first one looked and has left it since."""
        ended = self._ended.get(rid)
        if ended is None or ended.last is None or ended.last.alive:
            return None
        del self._ended[rid]
        op = Prefetch(rid, ended.key, ended.started, ended.asked, second=True)
        match = self._match(op.key)
        if match.device_len + match.host_hit_len >= ended.known:  # its last node was merged into another
            self._ended[rid] = ended._replace(last=match.path[-1])
            return None
        if not self._may_wait(op) or self._tiers.readable_storage is None:
            return None
        self._attempt(op)
        if op.ended:
            return None
        self._active[rid] = op
        return op

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
        self._ended.clear()

    def _end(self, op: Prefetch, how: str) -> None:
        if op.lookup is not None:
            op.lookup.cancelled = True
        if op.read is not None:
            self._keep_arrived(op, op.read)
        self._finish(op, how)

    def _keep_arrived(self, op: Prefetch, read: ReadTicket) -> None:
        """Hand the verified pages to the tree; the others are free once the worker has let go of them.

        What was read before the store was cleared was flushed: it is not brought back.
        """
        tiers = self._tiers
        tiers.loads.measured_read(read.count, read.busy)
        flushed = tiers.storage is None or tiers.storage.generation != op.generation
        arrived = 0 if flushed else read.count
        read.cancelled = True
        tiers.staged_host_pages -= arrived
        tiers.counters.moved_bytes[STORAGE_HOST] += arrived * tiers.host_stride
        if arrived:
            if not op.claimed:
                self._unclaimed[op.rid] = self._unclaimed.get(op.rid, 0) + arrived
            tiers.free_host(tiers.tree.insert_host(op.key, op.first_page, op.pages[:arrived]))
        rest = op.pages[arrived:]
        if not self._drained(read, rest):
            self._draining.append((read, rest))

    def _drained(self, read: ReadTicket, pages: PageIndices) -> bool:
        if not read.done:
            return False
        self._tiers.staged_host_pages -= len(pages)
        self._tiers.free_host(pages)
        return True

    def _finish(self, op: Prefetch, how: str) -> None:
        op.ended = True
        self._active.pop(op.rid, None)
        if not op.second and not op.claimed:
            known = op.first_page * self._tiers.tree.page_size
            self._ended[op.rid] = _Ended(op.key, op.started, op.asked, known, op.last)
        if self._leaders.get(op.start) is op:
            del self._leaders[op.start]
        self._tiers.counters.prefetches[how] += 1
        self._tiers.decisions.fetched(op.key, op.first_page, how)

    @property
    def moving(self) -> bool:
        """Is anything under way that does not hang?"""
        return any(not read.hangs for read, _ in self._draining) or any(_moves(op) for op in self._active.values())

    @property
    def in_flight(self) -> bool:
        """Is anything under way? A prefetch that waits for others to be claimed is not."""
        return bool(self._draining) or any(_moves(op) for op in self._active.values())


def _moves(op: Prefetch) -> bool:
    if op.leader is not None:
        return _moves(op.leader) or op.leader.ended
    return op.read is not None or (op.lookup is not None and not op.lookup.done)
