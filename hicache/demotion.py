"""Making room: device → host → storage. Only what no lower tier takes is discarded, with its reason.

| evicted from | its copies                       | what happens                                             |
|--------------|----------------------------------|----------------------------------------------------------|
| device       | on the host                      | dropped: demoted                                         |
| device       | nowhere else, worth a copy       | backed up first; dropped when the copy is acknowledged   |
| device       | nowhere else, not worth a copy   | discarded                                                |
| device       | nowhere else, host full for good | discarded                                                |
| host, mirror | on the device                    | stored first if storage takes it, then reclaimed         |
| host, leaf   | on storage                       | dropped: demoted                                         |
| host, leaf   | nowhere else                     | stored first; dropped when the write is acknowledged     |
| host, leaf   | refused by storage, or none      | discarded                                                |

No call waits for a copy. A call that could only start copies reports that there is no room yet;
the caller tries again after the next poll.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hicache.errors import TransferError
from hicache.persist import Persister
from hicache.stats import DEVICE_HOST, HOST_STORAGE
from hicache.streams.base import Event
from hicache.tiers import Tiers
from hicache.transfer.tickets import CopyTicket
from hicache.tree.node import Node
from hicache.tree.plans import Fill, joined, page_count
from hicache.tree.radix_tree import RadixTree
from hicache.tree.residency import ABSENT
from hicache.types import DropReason, Tier

_FRAGMENTS = 8
"""A victim longer than needed is cut, but by no less than this fraction of it."""


@dataclass(frozen=True)
class Backup:
    """Host copies on their way. The device copies of the last `evict_pages` pages fall at the
    acknowledgement, unless they were used after `evict_before`."""

    fill: Fill
    evict_pages: int
    evict_before: int


@dataclass(frozen=True)
class BackupBatch:
    ticket: CopyTicket
    backups: Sequence[Backup]


class Demotion:
    """Evicts, and owns the copies down that eviction and the write policies start."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self._staged: list[Backup] = []
        self.backups: deque[BackupBatch] = deque()
        self._leaving_device = 0  # pages whose device copy falls when their backup is acknowledged
        self.settled: list[Node] = []  # whose copies were just committed: they may be whole again
        self.persister = Persister(tiers, self._drop_host, self.settled)

    # ---- device -----------------------------------------------------------------------------

    def make_device_room(self, num_pages: int) -> bool:
        """Evict until `num_pages` device pages are free. False: not yet, or not at all."""
        tree, allocator = self.tiers.tree, self.tiers.device_allocator
        order = tree.ledger.device
        stuck: list[Node] = []
        while (shortage := num_pages - allocator.free_pages) > 0:
            shortage -= self._leaving_device
            victim = order.first()
            if victim is None or shortage <= 0:
                break
            victim = self._cut(victim, shortage)
            if not victim.residency.on_host and page_count(victim) > self._largest_backup():
                tree.split(victim, page_count(victim) - self._largest_backup())
            if not self._evict_from_device(victim):
                order.discard(victim)
                stuck.append(victim)
        for node in stuck:
            order.add(node)
        return num_pages <= allocator.free_pages

    def _largest_backup(self) -> int:
        """Pages that one victim's backup may take, so that a small host tier is never asked for more than it has."""
        host = self.tiers.usable_host
        return max(host.pool.num_pages // 2, 1) if host is not None else self.tiers.device_allocator.num_pages

    def _evict_from_device(self, node: Node) -> bool:
        """Drop it, discard it, or start its backup. False if none of these can be done now."""
        if node.residency.on_host:
            self._demote_from_device(node)
            return True
        reason = self._no_backup(node)
        if reason is None:
            if self.stage_backup([node], evict=True):
                return True
            if self.moving:
                return False  # what is on its way to or from the host makes room there when it lands
            reason = DropReason.HOST_FULL
        return self._discard_device(node, reason)

    def _no_backup(self, node: Node) -> DropReason | None:
        """Why this page gets no host copy at its eviction; None if it does."""
        host = self.tiers.host
        if host is None:
            return DropReason.NO_LOWER_TIER
        if host.degraded:
            return DropReason.TIER_DEGRADED
        if not host.write.on_eviction(node.hits):
            return DropReason.WRITE_POLICY
        return None

    def _demote_from_device(self, node: Node) -> None:
        self.tiers.counters.demoted_pages[DEVICE_HOST] += page_count(node)
        self.tiers.decisions.left(node, Tier.DEVICE, DropReason.NO_LOWER_TIER)
        self.tiers.free_device(self.tiers.tree.drop_device(node))

    def _discard_device(self, node: Node, reason: DropReason) -> bool:
        """Discard a device page that is nowhere else, with what hangs below it on the host."""
        below = list(node.subtree())[1:]
        if any(child.lock_ref or not child.residency.can_drop(Tier.HOST) for child in below):
            return False
        for child in reversed(below):
            self._drop_host(child, DropReason.CHAIN_CUT)
        self.tiers.counters.dropped(reason, page_count(node))
        self.tiers.decisions.left(node, Tier.DEVICE, reason)
        self.tiers.free_device(self.tiers.tree.drop_device(node))
        return True

    # ---- device → host ----------------------------------------------------------------------

    def write_through(self, nodes: Sequence[Node]) -> None:
        """Pages have entered the device: begin their host copies.

        A host that is full gives up the copy of another device page for that, to be made again when this page goes.
        So then it is only done for storage's sake.
        """
        host = self.tiers.usable_host
        assert host is not None
        if host.pool.allocator.free_pages >= sum(map(page_count, nodes)) or self.persister.on_entry_admits(nodes):
            self.stage_backup(nodes)

    def stage_backup(self, nodes: Sequence[Node], evict: bool = False) -> bool:
        """Begin host copies of device pages; they are copied with the step's batch. False: no host room now.

        With a storage tier, ancestors that are on no lower tier come along: a page stored without them
        could never be reached.
        """
        host = self.tiers.usable_host
        leaving = sum(map(page_count, nodes)) if evict else 0
        if host is not None and self.tiers.storage is not None and nodes:
            nodes = [*_only_on_device(nodes[0].parent), *nodes]
        count = sum(map(page_count, nodes))
        if host is None or not self.make_host_room(count):
            return False
        pages = host.pool.allocator.alloc(count)
        assert pages is not None
        fill = self.tiers.tree.fills.begin(Tier.HOST, nodes, pages)
        self._staged.append(Backup(fill, leaving, self.tiers.tree.tick))
        self._leaving_device += leaving
        return True

    def flush_backups(self, after: Event | None) -> None:
        """Send everything staged in this step as one copy, ordered after the event `after`."""
        if not self._staged:
            return
        host = self.tiers.host
        assert host is not None
        nodes = [node for backup in self._staged for node in backup.fill.nodes]
        host.copy_begins()
        ticket = host.copies.backup(
            joined([node.device_pages for node in nodes]), joined([node.host_pages for node in nodes]), after
        )
        self.backups.append(BackupBatch(ticket, tuple(self._staged)))
        self._staged = []

    def commit_backup(self, batch: BackupBatch) -> None:
        """Commit what has arrived, start its way to storage, and let go of the device copies that are to fall."""
        counters = self.tiers.counters
        try:
            batch.ticket.query()
        except TransferError as error:
            self.tiers.copy_failed(error)
            for backup in reversed(batch.backups):
                self._leaving_device -= backup.evict_pages
                self.tiers.free_host(self.tiers.tree.fills.abort(backup.fill))
            return
        assert self.tiers.host is not None
        self.tiers.host.copy_arrived()
        counters.moved_bytes[DEVICE_HOST] += batch.ticket.nbytes
        arrived: list[Node] = []
        for backup in batch.backups:
            self._leaving_device -= backup.evict_pages
            self.tiers.tree.fills.commit(backup.fill)
            arrived += backup.fill.nodes
        self.settled += arrived
        self.persister.on_entry(arrived)
        for backup in batch.backups:
            self._drop_unused_device(backup)

    def _drop_unused_device(self, backup: Backup) -> None:
        left = backup.evict_pages
        for node in reversed(backup.fill.nodes):
            if left <= 0:
                return
            left -= page_count(node)
            if node.tick <= backup.evict_before and node in self.tiers.tree.ledger.device:
                self._demote_from_device(node)

    # ---- host -------------------------------------------------------------------------------

    def make_host_room(self, num_pages: int) -> bool:
        """Evict until `num_pages` host pages are free. False: not yet, or not at all."""
        host = self.tiers.host
        assert host is not None
        if num_pages > host.pool.num_pages:
            return False
        ledger, allocator = self.tiers.tree.ledger, host.pool.allocator
        storing: list[Node] = []
        wanted = 0
        while (shortage := num_pages - allocator.free_pages - self.persister.leaving - wanted) > 0:
            order = ledger.mirrors if len(ledger.mirrors) else ledger.host_leaves
            victim = order.first()
            if victim is None:
                break
            victim = self._cut(victim, shortage)
            reason = self._no_store(victim)
            if reason is not None:
                self._drop_host(victim, reason)
                continue
            order.discard(victim)  # out of the way until its fate is known
            storing.append(victim)
            wanted += page_count(victim)
        for node in storing:
            (ledger.mirrors if node.residency.on_device else ledger.host_leaves).add(node)
        if storing:
            self._store_or_drop(storing)
        return num_pages <= allocator.free_pages

    def _no_store(self, node: Node) -> DropReason | None:
        """Why this page is not to be stored at its eviction, if it is lost by that; None if it is to be."""
        storage = self.tiers.storage
        if storage is None or node.residency.on_storage:
            return DropReason.NO_LOWER_TIER
        return None if storage.admits(node) else DropReason.NOT_ADMITTED

    def _store_or_drop(self, nodes: Sequence[Node]) -> None:
        refused = self.persister.persist(nodes, evict=True)
        for node, reason in refused:
            self._drop_host(node, reason)

    def _drop_host(self, node: Node, reason: DropReason) -> None:
        """Give up a host copy: a mirror is reclaimed, a leaf demoted if storage has it, else discarded."""
        counters, count = self.tiers.counters, page_count(node)
        self.tiers.decisions.left(node, Tier.HOST, reason)
        if node.residency.on_device:
            counters.reclaimed_mirrors += count
        elif node.residency.on_storage:
            counters.demoted_pages[HOST_STORAGE] += count
        else:
            counters.dropped(reason, count)
        self.tiers.free_host(self.tiers.tree.drop_host(node))

    def _cut(self, node: Node, wanted: int) -> Node:
        """The tail of a victim that is longer than what is wanted; the tail keeps the node's identity."""
        cut_victim(self.tiers.tree, node, max(wanted, self.tiers.fragment_tokens // self.tiers.tree.page_size))
        return node

    # ---- state ------------------------------------------------------------------------------

    @property
    def moving(self) -> bool:
        """Is anything in flight that does not hang?"""
        return bool(self._staged or self.backups or self.persister.batches)

    @property
    def in_flight(self) -> bool:
        return bool(self._staged or self.backups) or self.persister.in_flight


def cut_victim(tree: RadixTree, node: Node, wanted: int) -> None:
    """Leave to `node` its last `wanted` pages, but no less than a fraction of it; the rest becomes its parent."""
    count = page_count(node)
    tail = max(wanted, count // _FRAGMENTS, 1)
    if tail < count:
        tree.split(node, count - tail)


def _only_on_device(node: Node | None) -> list[Node]:
    """`node` and those of its ancestors that are on the device and on no lower tier, root first."""
    alone = []
    while node is not None and node.parent is not None:
        _, host, storage = node.residency.states
        if host is ABSENT and storage is ABSENT:
            alone.append(node)
        node = node.parent
    alone.reverse()
    return alone
