"""What blocks: drain, flush, close, and a storage tier that comes or goes while requests run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hicache.demotion import Demotion
from hicache.errors import ProtocolError, StoreIdentityError
from hicache.hashing import StoreIdentity, digests_in
from hicache.prefetch import Prefetcher
from hicache.tiers import StorageTier, Tiers
from hicache.transfer.storage_tickets import Ticket
from hicache.tree.node import Node
from hicache.tree.plans import page_count
from hicache.tree.residency import ABSENT
from hicache.types import DropReason, Tier

_POLL_SECONDS = 0.0002
_CLOSING_BYTES = 64 << 20
_CHECKED_NODES = 256
"""Nodes whose pages are asked for in one call of the backend."""


@dataclass(frozen=True)
class FlushReport:
    """Whether a flush happened. If not, nothing was changed and `reason` says why."""

    flushed: bool
    reason: str = ""


@dataclass(frozen=True)
class DetachReport:
    """`shed_pages` were waiting to be stored and are not. `closed` is False if a call of the backend has not
    returned: it keeps its host pages until it does, and closes the backend then."""

    closed: bool
    shed_pages: int


def _check_identity(own: StoreIdentity, theirs: StoreIdentity | None) -> None:
    """Raises StoreIdentityError for a store of other pages than the cache's: of another model, page length, codec."""
    if theirs is None or theirs == own:
        return
    mine, other = own.flat(), theirs.flat()
    fields = [f"{name} {other.get(name)} where the cache has {mine.get(name)}" for name in own.differences(other)]
    raise StoreIdentityError(f"the storage tier is of another identity: {', '.join(fields)}")


class Lifecycle:
    """`advance` sends staged copies down and commits completions; `loading` says whether loads to the device
    are under way. `clock` gives seconds."""

    def __init__(
        self,
        tiers: Tiers,
        demotion: Demotion,
        prefetcher: Prefetcher,
        advance: Callable[[], object],
        loading: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self.closed = False
        self._tiers = tiers
        self._demotion = demotion
        self._prefetcher = prefetcher
        self._advance = advance
        self._loading = loading
        self._clock = clock
        self._abandoned = False  # a backend call that may never return has host buffers

    @property
    def in_flight(self) -> bool:
        return self._loading() or self._demotion.in_flight or self._prefetcher.in_flight

    def _moving(self) -> bool:
        """In flight, and not hung."""
        return self._loading() or self._demotion.moving or self._prefetcher.moving

    def wait(self, pending: Callable[[], bool], until: float) -> bool:
        """Commit what completes until nothing is pending; False if something still is when the clock says `until`."""
        while True:
            self._advance()
            if not pending():
                return True
            if self._clock() >= until:
                return False
            time.sleep(_POLL_SECONDS)

    def drain(self, timeout: float) -> bool:
        return self.wait(lambda: self.in_flight, self._clock() + timeout)

    # ---- flush ------------------------------------------------------------------------------

    def flush(self, named: set[Tier], timeout: float) -> FlushReport:
        tiers, storage = self._tiers, self._tiers.storage
        if any(node.lock_ref for node in tiers.tree.nodes()):
            return FlushReport(False, "requests hold locks on cached pages")
        self._prefetcher.end_all()
        if not self.drain(timeout):
            return FlushReport(False, f"copies are still in flight after {timeout:g} s")
        if Tier.STORAGE in named and storage is not None:
            try:
                storage.engine.clear()
            except Exception as error:  # whatever a backend raises: nothing has been forgotten yet
                return FlushReport(False, f"the store was not cleared: {error}")
            storage.generation = storage.engine.generation
            tiers.forget_stored()
        for node in reversed(list(tiers.tree.nodes())):
            self._flush_node(node, named)
        return FlushReport(True)

    def _flush_node(self, node: Node, named: set[Tier]) -> None:
        tiers, tree = self._tiers, self._tiers.tree
        lost = page_count(node)
        keeps_host = Tier.HOST not in named and node.residency.on_host
        if node.residency.on_device and Tier.DEVICE in named:
            if not keeps_host:
                for child in reversed(list(node.subtree())[1:]):  # host pages that nothing would lead to
                    tiers.counters.dropped(DropReason.FLUSHED, page_count(child))
                    tiers.decisions.left(child, Tier.HOST, DropReason.FLUSHED)
                    tiers.free_host(tree.drop_host(child))
            tiers.decisions.left(node, Tier.DEVICE, DropReason.FLUSHED)
            tiers.free_device(tree.drop_device(node))
        if node.residency.on_host and (Tier.HOST in named) and (node.residency.on_device or not node.children):
            tiers.decisions.left(node, Tier.HOST, DropReason.FLUSHED)
            tiers.free_host(tree.drop_host(node))
        if not node.alive:
            tiers.counters.dropped(DropReason.FLUSHED, lost)

    # ---- a storage tier comes or goes -------------------------------------------------------

    def attach(self, storage: StorageTier) -> None:
        if self.closed:
            raise ProtocolError("the cache is closed")
        if self._tiers.storage is not None:
            raise ProtocolError("there is a storage tier already: detach it first")
        if self._tiers.host is None:
            raise ProtocolError("a storage tier needs a host tier: copies pass it")
        _check_identity(self._tiers.identity, storage.engine.backend.identity)
        self._tiers.storage = storage

    def detach(self, timeout: float) -> DetachReport:
        storage, persister = self._tiers.storage, self._demotion.persister
        if storage is None:
            raise ProtocolError("there is no storage tier")
        self._prefetcher.end_all()
        waiting = [batch.ticket for batch in persister.batches]
        closed = self._close_engine(storage, timeout)
        self._advance()
        persister.set_hung_aside(all_of_them=True)
        self._tiers.storage = None
        self._tiers.forget_stored()
        return DetachReport(closed, sum(len(run.keys) for ticket in waiting if ticket.error for run in ticket.runs))

    def _close_engine(self, storage: StorageTier, timeout: float) -> bool:
        closed = storage.engine.close(timeout)
        self._abandoned |= not closed
        return closed

    # ---- close ------------------------------------------------------------------------------

    def close(self, timeout: float) -> None:
        if self.closed:
            return
        until = self._clock() + timeout
        tiers, host = self._tiers, self._tiers.host
        self._prefetcher.end_all()
        self.wait(self._moving, until)
        if tiers.storage is not None:
            self._persist_all(tiers.storage, until)
        self.closed = True
        if host is not None:
            host.copies.close()
        if tiers.storage is not None:
            self._close_engine(tiers.storage, timeout)
        if host is not None and not self._abandoned:
            host.pool.close()

    def _persist_all(self, storage: StorageTier, until: float) -> None:
        """Store what is in memory only and worth it, parents first, in as many rounds as the host needs."""
        self._forget_what_is_not_there(storage, until)
        left, before = self._unstored_pages(storage), -1
        while left and left != before and self._tiers.usable_host is not None and storage.engine.takes_stores:
            self._stage_round(storage)
            self.wait(self._moving, until)
            for node in self._unstored(storage):
                if node.residency.on_host and node.residency[Tier.STORAGE] is ABSENT:
                    self._demotion.persister.persist([node], evict=False)
                if storage.engine.queued_bytes > _CLOSING_BYTES:
                    self.wait(self._moving, until)
            self.wait(self._moving, until)
            left, before = self._unstored_pages(storage), left

    def _stage_round(self, storage: StorageTier) -> None:
        """Copy as much to the host as it has room for, in pieces of at most half of it: a chain that is longer than
        the host goes through it in several rounds.

            device   [ stored | host |         to come          ]
        """
        host = self._tiers.usable_host
        assert host is not None
        piece = max(host.pool.num_pages // 2, 1)
        for node in self._unstored(storage):
            if not node.residency.on_device or node.residency[Tier.HOST] is not ABSENT:
                continue
            while page_count(node) > piece:
                if not self._demotion.stage_backup([self._tiers.tree.split(node, piece)]):
                    return
            if not self._demotion.stage_backup([node]):
                return

    def _forget_what_is_not_there(self, storage: StorageTier, until: float) -> None:
        """What the tree takes for stored may have been evicted by the store since: what is hot in memory is not used
        there. Memory is about to go, so the store is asked."""
        tree, tiers = self._tiers.tree, self._tiers
        believed = [node for node in tree.nodes() if node.residency.on_storage]
        for first in range(0, len(believed), _CHECKED_NODES):
            nodes = believed[first : first + _CHECKED_NODES]
            keys_of = {node: digests_in(tree.digests(node, tiers.seed(tree.namespace_of(node)))) for node in nodes}
            keys = [key for own in keys_of.values() for key in own]
            ticket = storage.engine.check(keys)
            if ticket is None or not self._answered(ticket, until):
                return  # it will not store either
            present = dict(zip(keys, ticket.present, strict=True))
            for node, own in keys_of.items():
                if not all(present[key] for key in own):
                    tree.drop_storage(node)

    def _answered(self, ticket: Ticket, until: float) -> bool:
        """Waits for a call of the backend; False if it fails, hangs, or the clock says `until` before it returns."""
        self.wait(lambda: not (ticket.done or ticket.hangs), until)
        return ticket.done and ticket.error is None

    def _unstored(self, storage: StorageTier) -> list[Node]:
        nodes = self._tiers.tree.nodes()
        return [node for node in nodes if not node.residency.on_storage and storage.admits(node)]

    def _unstored_pages(self, storage: StorageTier) -> int:
        return sum(page_count(node) for node in self._unstored(storage))
