"""Host → storage: writes under way, and what becomes of the pages when they are acknowledged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache.hashing import DIGEST_BYTES, digests_in
from hicache.stats import HOST_STORAGE
from hicache.storage_backends.base import PageRun
from hicache.tiers import StorageTier, Tiers
from hicache.transfer.breaker import failure_reason
from hicache.transfer.storage_tickets import WriteTicket
from hicache.tree.node import Node
from hicache.tree.plans import Fill, joined, page_count
from hicache.tree.residency import ABSENT
from hicache.types import DropReason, Tier, no_pages


@dataclass(frozen=True)
class Persist:
    """Pages of one chain on their way to storage. The last `evict_pages` of them are to leave the host at
    the acknowledgement, stored or not, unless they were used after `evict_before`."""

    fill: Fill
    evict_pages: int
    evict_before: int


@dataclass(frozen=True)
class PersistBatch:
    """What one transaction stores; `tier` is where to."""

    tier: StorageTier
    ticket: WriteTicket
    persists: Sequence[Persist]

    @property
    def evict_pages(self) -> int:
        return sum(persist.evict_pages for persist in self.persists)


class Persister:
    """Owns the writes to storage.

    `drop_host` gives up an evictable host copy for a reason. To `settled` go the nodes whose copies were just
    committed.
    """

    def __init__(self, tiers: Tiers, drop_host: Callable[[Node, DropReason], None], settled: list[Node]) -> None:
        self.tiers = tiers
        self.batches: deque[PersistBatch] = deque()  # in the order of submission
        self.leaving = 0  # host pages that go when the write is acknowledged
        self._settled = settled
        self._hung: list[PersistBatch] = []
        self._drop_host = drop_host

    @property
    def in_flight(self) -> bool:
        return bool(self.batches or self._hung)

    def on_entry(self, nodes: Sequence[Node]) -> None:
        """Host copies have arrived: those that are admitted go to storage, if it is written through."""
        storage = self.tiers.writable_storage
        if storage is not None and storage.write.on_entry():
            self.persist([node for node in nodes if storage.admits(node)], evict=False)

    def on_entry_admits(self, nodes: Sequence[Node]) -> bool:
        """Would host copies of any of these go on to storage as soon as they are there?"""
        storage = self.tiers.writable_storage
        return storage is not None and storage.write.on_entry() and any(map(storage.admits, nodes))

    def on_hit(self, nodes: Sequence[Node]) -> None:
        """Nodes were used again, which may have admitted them: as at their entry."""
        storage = self.tiers.writable_storage
        if storage is None or storage.admission.mode == "all" or not storage.write.on_entry():
            return
        stored = [node for node in nodes if node.residency[Tier.STORAGE] is ABSENT and node.residency.on_host]
        if stored:
            self.on_entry(stored)

    def persist(self, nodes: Sequence[Node], evict: bool) -> list[tuple[Node, DropReason]]:
        """Write host pages to storage, ancestors first. Returns the nodes that were not taken, and why."""
        storage, tree = self.tiers.writable_storage, self.tiers.tree
        if storage is None:
            return [(node, DropReason.TIER_DEGRADED) for node in nodes]
        refused, persists, runs, accepted = list[tuple[Node, DropReason]](), list[Persist](), list[PageRun](), []
        for node in nodes:
            chain = self._unstored_chain(node)
            if chain is None:
                refused.append((node, DropReason.CHAIN_CUT))
            elif chain:
                runs.append(self._run_of(chain, storage.generation))
                fill = tree.fills.begin(Tier.STORAGE, chain, no_pages())
                persists.append(Persist(fill, page_count(node) if evict else 0, tree.tick))
                accepted.append(node)
        if not persists:
            return refused
        nbytes = sum(len(run.buffers) for run in runs) * self.tiers.host_stride
        ticket = storage.engine.write(runs, nbytes)
        if ticket is None:
            for persist in reversed(persists):
                tree.fills.commit_store(persist.fill, 0)
            reason = DropReason.STORAGE_SHED if storage.engine.takes_stores else DropReason.TIER_DEGRADED
            return refused + [(node, reason) for node in accepted]
        batch = PersistBatch(storage, ticket, tuple(persists))
        self.leaving += batch.evict_pages
        self.batches.append(batch)
        return refused

    def _unstored_chain(self, node: Node) -> list[Node] | None:
        """The node after those of its ancestors that are not stored yet; None if one of them has no host copy."""
        chain: list[Node] = []
        at: Node | None = node
        while at is not None and not at.is_root and at.residency[Tier.STORAGE] is ABSENT:
            if not at.residency.on_host:
                return None
            chain.append(at)
            at = at.parent
        chain.reverse()
        return chain

    def _run_of(self, chain: Sequence[Node], generation: int) -> PageRun:
        tree, above = self.tiers.tree, chain[0].parent
        seed = self.tiers.seed(tree.namespace_of(chain[0]))
        names = b"".join([tree.digests(node, seed) for node in chain])
        keys = digests_in(names)
        parent = None if above is None or above.is_root else tree.digests(above, seed)[-DIGEST_BYTES:]
        buffers = self.tiers.host_buffers(joined([node.host_pages for node in chain]))
        return PageRun(keys, buffers, parent, generation)

    # ---- acknowledgements -------------------------------------------------------------------

    def set_hung_aside(self, all_of_them: bool = False) -> None:
        """A write that hangs holds up neither the commits behind it nor whoever waits for room.

        `all_of_them`: so do those that are not overdue yet.
        """
        while self.batches and (all_of_them or self.batches[0].ticket.hangs):
            self._hung.append(self._pop())

    def commit_returned(self) -> None:
        """Commit the writes that had been set aside and have returned."""
        for batch in [batch for batch in self._hung if batch.ticket.done]:
            self._hung.remove(batch)
            self._commit(batch)

    def commit_next(self) -> None:
        """Commit the oldest write, which is done."""
        self._commit(self._pop())

    def _pop(self) -> PersistBatch:
        batch = self.batches.popleft()
        self.leaving -= batch.evict_pages
        return batch

    def _commit(self, batch: PersistBatch) -> None:
        storage, counters = self.tiers.storage, self.tiers.counters
        stride = self.tiers.host_stride
        reason = _loss(batch.ticket.error)
        for persist, run, count in zip(batch.persists, batch.ticket.runs, batch.ticket.counts, strict=True):
            counters.moved_bytes[HOST_STORAGE] += count * stride
            top = persist.fill.nodes[0]
            self._settled += persist.fill.nodes
            # what was stored in another store, or before this one was cleared, is not in it
            valid = batch.tier is storage and run.generation == storage.generation
            self.tiers.tree.fills.commit_store(persist.fill, count if valid else 0)
            if not count and run.parent is not None and batch.ticket.error is None:
                self._forget_stored(top.parent)
            self._drop_unused(persist, reason)

    def _forget_stored(self, node: Node | None) -> None:
        """The backend no longer has the pages before a run: what the tree believes of the chain is stale."""
        while node is not None and not node.is_root:
            if node.residency.on_storage:
                self.tiers.tree.drop_storage(node)
            node = node.parent

    def _drop_unused(self, persist: Persist, reason: DropReason) -> None:
        ledger, left = self.tiers.tree.ledger, persist.evict_pages
        for node in reversed(persist.fill.nodes):
            if left <= 0:
                return
            left -= page_count(node)
            if node.tick <= persist.evict_before and (node in ledger.mirrors or node in ledger.host_leaves):
                self._drop_host(node, reason)


def _loss(error: Exception | None) -> DropReason:
    """Why pages that were to be stored are lost: nobody raised, nobody tried, or it failed."""
    if error is None:
        return DropReason.STORAGE_REFUSED
    nobody_tried = {
        "shed": DropReason.STORAGE_SHED,
        "closed": DropReason.STORAGE_SHED,
        "stopped": DropReason.TIER_DEGRADED,
    }
    return nobody_tried.get(failure_reason(error), DropReason.STORAGE_FAILED)
