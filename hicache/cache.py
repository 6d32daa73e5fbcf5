"""HiCache: the facade over the tiers and the only place that orders what happens between them.

One thread, the scheduler's, calls everything here. Streams and storage workers move bytes and set
events; `poll` commits what they finished. No call blocks on a copy, except `drain`, `flush` and `close`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hicache.demotion import Demotion
from hicache.errors import TransferError
from hicache.explaining import Explanation, explain
from hicache.headroom import Headroom
from hicache.integrity import check_cache, device_use, host_use
from hicache.layout import KVLayout
from hicache.lifecycle import DetachReport, FlushReport, Lifecycle
from hicache.load_choice import HostLoad
from hicache.policies.retention import RetentionRange
from hicache.prefetch import Prefetcher, PrefetchPolicy
from hicache.stats import HOST_DEVICE, CacheStats
from hicache.streams.base import Event
from hicache.tiers import StorageTier, Tiers
from hicache.transfer.tickets import CopyTicket, LoadTicket
from hicache.tree.node import Node
from hicache.tree.plans import Fill, InsertResult, LockReceipt, PrefixMatch, joined, page_count
from hicache.tree.residency import ABSENT
from hicache.tree.wishes import Expectations, retain
from hicache.types import PageIndices, PrefixKey, Tier, no_pages

CommitBarrier = Callable[[list[int]], list[int]]
"""Makes ranks agree on how many completions to commit: element-wise minimum over ranks of what each has ready."""


@dataclass(frozen=True)
class LoadBack:
    """Host pages of a match on their way to the device.

    `tokens` of the match beyond `device_len` will be readable; layer i of all of them is once
    `layer_done(i)` of every ticket is. `receipt` locks the whole prefix.
    """

    tokens: int
    storage_tokens: int  # of `tokens`, those that a prefetch brought from storage
    tickets: Sequence[LoadTicket]
    receipt: LockReceipt
    pages: PageIndices  # on the device, of the whole prefix, those that are still arriving too


class HiCache:
    """A hierarchical KV cache: device, host and storage tiers under one radix tree."""

    def __init__(
        self,
        tiers: Tiers,
        *,
        prefetch: PrefetchPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        commit_barrier: CommitBarrier = lambda ready: ready,
    ) -> None:
        self.tiers = tiers
        self._demotion = Demotion(tiers)
        self._headroom = Headroom(tiers.device_allocator.num_pages)
        self._clock = clock
        tiers.decisions.clock = clock
        self._expected = Expectations(tiers.tree) if tiers.tree.queue_aware else None
        self._prefetcher = Prefetcher(
            tiers, self._demotion, self.match_prefix, clock, prefetch if prefetch is not None else PrefetchPolicy()
        )
        self._loads: deque[tuple[LoadTicket, Fill]] = deque()
        self._ticket_of: dict[Fill, LoadTicket] = {}
        self._barrier = commit_barrier
        self._compute: Event | None = None
        self._owners: list[Callable[[], Iterable[PageIndices]]] = []
        self._lifecycle = Lifecycle(
            tiers, self._demotion, self._prefetcher, self._advance, lambda: bool(self._loads), clock
        )

    @property
    def layout(self) -> KVLayout:
        return self.tiers.device_pool.layout

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    # ---- prefixes ---------------------------------------------------------------------------

    def match_prefix(self, key: PrefixKey) -> PrefixMatch:
        """Longest cached prefix of `key`, in whole pages. Valid until the next call that may evict.

        Looking is no use yet: `init_load_back` counts one.
        """
        match = self.tiers.tree.match(key, hit=False)
        if match.host_hit_len and self.tiers.usable_host is None:
            return match._replace(path=match.path[: match.device_nodes], host_hit_len=0)
        return match

    def lock(self, match: PrefixMatch) -> LockReceipt:
        """Keep the device part of a match until the receipt is given back."""
        return self.tiers.tree.lock(match.last_device_node)

    def unlock(self, receipt: LockReceipt) -> None:
        """Give a receipt back, exactly once: ProtocolError the second time."""
        self.tiers.tree.unlock(receipt)

    def init_load_back(self, match: PrefixMatch) -> LoadBack | None:
        """Bring the host part of a match to the device, layer by layer, and lock the whole prefix.

        Of the host part only what is worth it, see LoadChoice: the rest is to be computed. Pages that another
        request is loading already are shared. None if there is no room on the device now: nothing has changed,
        try again after a poll. The device part is locked meanwhile.
        """
        tree = self.tiers.tree
        match, choice = self._worth_loading(match)
        guard = self.lock(match)
        last, to_load, tickets = self._loadable(match)
        tree.pin_host(to_load, 1)
        count = sum(map(page_count, to_load))
        room = self._demotion.make_device_room(count)  # may cut nodes of the path, but not those that are pinned
        tree.pin_host(to_load, -1)
        if not room:
            tree.unlock(guard)
            return None
        from_storage = sum(page_count(node) for node in to_load if node.from_storage) * self.page_size
        if to_load:
            tickets.append(self._load(to_load, count))
        self.tiers.loads.taken(choice)
        receipt = tree.lock(last)
        tree.count_hit(last)
        tree.unlock(guard)
        pages = device_table(last)
        return LoadBack(len(pages) * self.page_size - match.device_len, from_storage, tickets, receipt, pages)

    def _worth_loading(self, match: PrefixMatch) -> tuple[PrefixMatch, HostLoad]:
        """The part of a match that is to be used. What is on its way to the device already costs nothing more."""
        choice = self.tiers.loads.from_host(match.device_len, match.host_hit_len, len(match.key) + 1)
        if choice.tokens == choice.found:
            return match, choice
        if any(node.residency[Tier.DEVICE] is not ABSENT for node in match.path[match.device_nodes :]):
            return match, HostLoad(choice.found, choice.found)
        return self.match_prefix(match.key.head(match.device_len + choice.tokens)), choice

    def _loadable(self, match: PrefixMatch) -> tuple[Node | None, list[Node], list[LoadTicket]]:
        """The last usable node of a match, its nodes to load, and the loads under way to wait for."""
        last, to_load, tickets = match.last_device_node, list[Node](), list[LoadTicket]()
        for node in match.path[match.device_nodes :]:
            if node.residency[Tier.DEVICE] is ABSENT:
                to_load.append(node)
            else:
                fill = next(fill for fill in self.tiers.tree.fills.of(node) if fill.tier is Tier.DEVICE)
                if fill.doomed:
                    break
                if self._ticket_of[fill] not in tickets:
                    tickets.append(self._ticket_of[fill])
            last = node
        return last, to_load, tickets

    def _load(self, nodes: Sequence[Node], count: int) -> LoadTicket:
        host = self.tiers.host
        pages = self.tiers.device_allocator.alloc(count)
        assert host is not None and pages is not None
        fill = self.tiers.tree.fills.begin(Tier.DEVICE, nodes, pages)
        host.copy_begins()
        ticket = host.copies.load_back(joined([node.host_pages for node in nodes]), pages, self._compute)
        self._loads.append((ticket, fill))
        self._ticket_of[fill] = ticket
        for node in nodes:
            node.from_storage = False
        return ticket

    def insert(self, key: PrefixKey, pages: PageIndices, owned_from: int = 0, priority: int = 0) -> InsertResult:
        """Give computed pages to the tree and free the duplicates; see RadixTree.insert.

        The pages must have come from `alloc_pages`. Those that the tree did not take stay the caller's.
        Making room for host copies may cut nodes: take `device_table(result.node)` for the pages, and
        not the nodes of the result.
        """
        result = self.tiers.tree.insert(key, pages, owned_from, priority)
        adopted = sum(map(page_count, result.adopted))
        self.tiers.request_pages -= adopted
        self.free_pages(result.duplicates)
        self._write_through(result)
        return result

    def _write_through(self, result: InsertResult) -> None:
        host = self.tiers.usable_host
        if host is None:
            return
        if host.write.on_entry():
            fresh = [node for node in result.adopted if node.residency[Tier.HOST] is ABSENT]
            if fresh:
                self._demotion.write_through(fresh)
        elif host.write.mode == "write_through_selective":
            for node in result.path:
                if host.write.on_hit(node.hits) and node.residency[Tier.HOST] is ABSENT:
                    self._demotion.stage_backup([node])
        self._demotion.persister.on_hit(result.path)

    def retain(self, key: PrefixKey, ranges: Sequence[RetentionRange]) -> None:
        """Wish that ranges of a cached prefix be kept for a while; heard by tiers with `eviction: retention`.

        Nothing is pinned: what is wanted least goes when room is needed. Make ranges with `retention_range`.
        """
        retain(self.tiers.tree, key, ranges)

    # ---- pages ------------------------------------------------------------------------------

    def alloc_pages(self, count: int) -> PageIndices | None:
        """Device pages for a request; None if there is no room now: poll and try again, or retract."""
        if not self._demotion.make_device_room(count):
            return None
        pages = self.tiers.device_allocator.alloc(count)
        self.tiers.request_pages += count
        self._headroom.took(count)
        return pages

    def free_pages(self, pages: PageIndices) -> None:
        """Take back pages of a request that did not go to the tree."""
        self.tiers.free_device(pages)
        self.tiers.request_pages -= len(pages)

    def add_owner(self, pages: Callable[[], Iterable[PageIndices]]) -> None:
        """Register who can list the pages that requests own, for `check_integrity`."""
        self._owners.append(pages)

    # ---- steps ------------------------------------------------------------------------------

    def poll(self) -> int:
        """Commit completions, in the order of submission per stream; returns how many."""
        self.tiers.tree.ledger.advance(self._clock())
        demotion, persister = self._demotion, self._demotion.persister
        self.tiers.watch_storage()
        persister.set_hung_aside()
        ready = [
            _leading(demotion.backups, lambda batch: _complete(batch.ticket)),
            _leading(self._loads, lambda load: _complete(load[0])),
            _leading(persister.batches, lambda batch: batch.ticket.done),
        ]
        backups, loads, persists = self._barrier(ready)
        for _ in range(backups):
            demotion.commit_backup(demotion.backups.popleft())
        for _ in range(loads):
            self._commit_load(*self._loads.popleft())
        for _ in range(persists):
            persister.commit_next()
        persister.commit_returned()
        self._prefetcher.poll()
        self.tiers.tree.coalesce(demotion.settled)
        demotion.settled.clear()
        return backups + loads + persists

    def _commit_load(self, ticket: LoadTicket, fill: Fill) -> None:
        del self._ticket_of[fill]
        try:
            ticket.query()
        except TransferError as error:
            self.tiers.copy_failed(error)
            self.tiers.decisions.load_failed(fill.nodes)
            self.tiers.free_device(self.tiers.tree.fills.abort(fill))
            return
        assert self.tiers.host is not None
        self.tiers.host.copy_arrived()
        self.tiers.counters.moved_bytes[HOST_DEVICE] += ticket.nbytes
        if fill.doomed:
            self.tiers.free_device(self.tiers.tree.fills.abort(fill))
        else:
            self.tiers.tree.fills.commit(fill)
            self._demotion.settled += fill.nodes

    def end_step(self, after: Event | None) -> None:
        """The step's work is submitted: send its copies down as one batch, ordered after `after`, the
        event behind the compute that wrote the pages. Loads from now on come after it, too.

        With a host tier, pages are evicted ahead of the next step's need.
        """
        if after is not None:
            self._compute = after
        ahead = self._headroom.next_step()
        if self.tiers.usable_host is not None:
            self._demotion.make_device_room(ahead)
        self._demotion.flush_backups(after)

    # ---- prefetch ---------------------------------------------------------------------------

    def prefetch(self, rid: str, key: PrefixKey) -> None:
        """Look on storage for what neither device nor host has of `key`; call when a request is enqueued.

        Until it is claimed or cancelled, tiers that are queue-aware evict what they have of `key` last.
        """
        if self._expected is not None:
            self._expected.expect(rid, key)
        self._prefetcher.start(rid, key)

    def prefetch_ready(self, rid: str) -> bool:
        """True once the request may run; with a policy that waits, that is at its deadline at the latest."""
        return self._prefetcher.ready(rid)

    def claim_prefetch(self, rid: str) -> None:
        """The request was admitted: what was prefetched for it no longer counts as waiting."""
        self._prefetcher.claim(rid)
        self._waits_no_more(rid)

    def cancel_prefetch(self, rid: str) -> None:
        """The request will not run."""
        self._prefetcher.end(rid)
        self._waits_no_more(rid)

    def _waits_no_more(self, rid: str) -> None:
        if self._expected is not None:
            self._expected.end(rid)

    # ---- state ------------------------------------------------------------------------------

    def evictable_size(self) -> int:
        """Device tokens that eviction can free."""
        return device_use(self.tiers).evictable * self.page_size

    def protected_size(self) -> int:
        """Device tokens that are locked by requests."""
        return device_use(self.tiers).protected * self.page_size

    def stats(self) -> CacheStats:
        """A snapshot. Asks the storage backend for its usage, which may wait for a write: not for every step."""
        counters, storage = self.tiers.counters, self.tiers.storage
        usage = storage.engine.usage() if storage is not None else None
        loads, stores = storage.engine.states if storage is not None else (None, None)
        return CacheStats(
            hit_tokens=dict(counters.hit_tokens),
            computed_tokens=counters.computed_tokens,
            demoted_pages=dict(counters.demoted_pages),
            dropped_pages=dict(counters.dropped_pages),
            moved_bytes=dict(counters.moved_bytes),
            reclaimed_mirrors=counters.reclaimed_mirrors,
            prefetches=dict(counters.prefetches),
            failures=dict(counters.failures),
            device=device_use(self.tiers),
            host=host_use(self.tiers),
            storage_pages=usage.pages if usage is not None else None,
            storage_bytes=usage.used_bytes if usage is not None else None,
            storage_loads=loads.value if loads is not None else None,
            storage_stores=stores.value if stores is not None else None,
            forgotten_pages=counters.forgotten_pages,
            load_choices=dict(self.tiers.loads.counts.choices),
            declined_tokens=dict(self.tiers.loads.counts.declined_tokens),
            saved_seconds=self.tiers.loads.counts.saved_seconds,
        )

    def why(self, key: PrefixKey) -> Explanation:
        """Where the match of `key` ends on each tier, and why. Times are those of the cache's clock.

        It changes nothing, and asks the store, which may wait for a write. What left a tier is known as far back as
        the decision log goes (`decision_log`, off by default).
        """
        return explain(self.tiers, key)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every invariant holds and every page has exactly one owner."""
        owned = [pages for owner in self._owners for pages in owner()] if self._owners else None
        check_cache(self.tiers, owned)
        if self._expected is not None:
            self._expected.check()

    @property
    def loading(self) -> bool:
        """Are loads to the device under way, or done and not committed?"""
        return bool(self._loads)

    @property
    def in_flight(self) -> bool:
        """Is anything under way that a later poll will commit?"""
        return self._lifecycle.in_flight

    def drain(self, timeout: float) -> bool:
        """Commit everything in flight, waiting up to `timeout` seconds; False if something still is."""
        return self._lifecycle.drain(timeout)

    def _advance(self) -> None:
        self._demotion.flush_backups(self._compute)
        self.poll()

    # ---- flush and close --------------------------------------------------------------------

    def flush(self, tiers: Iterable[Tier] = tuple(Tier), timeout: float = 0.0) -> FlushReport:
        """Forget what `tiers` hold, all of them by default.

        Waits up to `timeout` seconds for copies in flight, so that none can bring flushed data back.
        Refused, with nothing forgotten, while requests hold locks or copies are still in flight. Waiting
        prefetches end either way.
        """
        return self._lifecycle.flush(set(tiers), timeout)

    def close(self, timeout: float = 60.0) -> None:
        """Bring what only memory holds to storage, then stop streams and workers. Idempotent.

        Waits `timeout` seconds for copies and as long again for the backend. One that has not returned by then
        is left alone: its worker keeps the host pages it has, and the host's memory stays.
        """
        self._lifecycle.close(timeout)

    def attach_storage(self, storage: StorageTier) -> None:
        """Use a storage tier from now on. ProtocolError if there is one, or no host tier, or the cache is closed;
        StoreIdentityError if it was opened for another model, layout or codec: nothing has changed then."""
        self._lifecycle.attach(storage)

    def detach_storage(self, timeout: float = 60.0) -> DetachReport:
        """Go on without the storage tier, and close it; what only it has is not found any more.

        Waits up to `timeout` seconds for the stores that wait, then drops them. Prefetches end. ProtocolError
        if there is no storage tier.
        """
        return self._lifecycle.detach(timeout)


T = TypeVar("T")


def device_table(node: Node | None) -> PageIndices:
    """Device pages of the prefix that ends with `node`, from the root down."""
    return joined([step.device_pages for step in node.path()]) if node is not None else no_pages()


def _leading(queue: deque[T], ready: Callable[[T], bool]) -> int:
    count = 0
    for item in queue:
        if not ready(item):
            break
        count += 1
    return count


def _complete(ticket: CopyTicket) -> bool:
    try:
        return ticket.query()
    except TransferError:
        return True
