"""The radix tree against an oracle that knows no nodes: a dictionary from page prefixes to their copies."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from hicache.errors import ProtocolError
from hicache.pages import PageAllocator
from hicache.policies.eviction import EVICTION_POLICIES
from hicache.tree.check import check_tree
from hicache.tree.node import Node
from hicache.tree.plans import Fill, LockReceipt, page_count
from hicache.tree.radix_tree import RadixTree
from hicache.types import PageIndices, PrefixKey, Tier

Prefix = tuple[bytes, bytes]
"""A namespace, and the token bytes from the root to the end of a page."""

PAGE_SIZE = 2
PAGE_BYTES = PAGE_SIZE * 4
POOL_PAGES = {Tier.DEVICE: 40, Tier.HOST: 32}
REACHED: Counter[str] = Counter()

MUST_REACH = (
    "insert",
    "duplicates",
    "adopted_demoted",
    "insert_stopped_at_fill",
    "namespace",
    "partial_match",
    "split_device_fill",
    "split_host_fill",
    "split_storage_fill",
    "split_lock",
    "commit_device",
    "commit_host",
    "commit_storage",
    "abort_device",
    "abort_host",
    "doomed",
    "doomed_refused",
    "partial_store",
    "evict_device",
    "demote",
    "evict_host_leaf",
    "evict_mirror",
    "refused_drop",
    "insert_host",
    "insert_host_spare",
    "insert_host_vanished",
    "merged",
)


@dataclass
class Copies:
    """Copies of one page: page number and state per tier."""

    pages: list[int | None] = field(default_factory=lambda: [None, None, None])
    states: list[str] = field(default_factory=lambda: ["absent"] * 3)

    def put(self, tier: Tier, page: int | None, state: str = "resident") -> None:
        self.pages[tier], self.states[tier] = page, state


@dataclass
class Transfer:
    fill: Fill
    prefixes: list[Prefix]
    doomed: bool = False


@dataclass
class Job:
    key: PrefixKey
    receipt: LockReceipt
    locked: int  # pages
    pages: PageIndices


def prefixes(key: PrefixKey) -> list[Prefix]:
    ends = range(PAGE_BYTES, len(key.data) // PAGE_BYTES * PAGE_BYTES + 1, PAGE_BYTES)
    return [(key.namespace, key.data[:end]) for end in ends]


def above(prefix: Prefix) -> Prefix:
    return prefix[0], prefix[1][:-PAGE_BYTES]


def pages_of(node: Node, namespace: bytes) -> list[Prefix]:
    data = b"".join(step.key for step in node.path())
    return prefixes(PrefixKey(data, namespace))[-page_count(node) :]


class TreeMachine(RuleBasedStateMachine):
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree(PAGE_SIZE, self.policy, self.policy)
        self.pools = {tier: PageAllocator(count) for tier, count in POOL_PAGES.items()}
        self.known: dict[Prefix, Copies] = {}
        self.transfers: list[Transfer] = []
        self.jobs: list[Job] = []

    @rule(seed=st.integers(0, 2**32))
    def burst(self, seed: int) -> None:
        """Thirty random moves, checked one by one."""
        self.rng = random.Random(seed)
        moves = {
            self.start_job: 5,
            self.finish_job: 5,
            self.match: 4,
            self.begin_load: 6,
            self.begin_backup: 4,
            self.begin_store: 4,
            self.complete: 4,
            self.abort: 2,
            self.evict_device: 5,
            self.evict_host: 2,
            self.refused: 1,
            self.insert_host: 2,
            self.split: 3,
            self.coalesce: 1,
        }
        for _ in range(30):
            self.rng.choices(list(moves), list(moves.values()))[0]()
            self.check()

    # ---- requests ---------------------------------------------------------------------------

    def random_key(self) -> PrefixKey:
        """Few distinct tokens, so that keys share prefixes; any length, so that tails are partial."""
        namespace = self.rng.choice([b"", b"", b"", b"other"])
        return PrefixKey.of([self.rng.choice([1, 1, 1, 1, 1, 1, 2]) for _ in range(self.rng.randint(0, 14))], namespace)

    def match(self) -> None:
        key = self.random_key()
        before, locked, filling = len(list(self.tree.nodes())), self.locked(), self.filling()
        found = self.tree.match(key)
        on_device, known = self.longest(key)
        REACHED["partial_match"] += 0 < known < len(prefixes(key))
        REACHED["namespace"] += bool(known and key.namespace)
        assert found.device_len == on_device * PAGE_SIZE
        assert found.host_hit_len == (known - on_device) * PAGE_SIZE
        assert found.device_pages().tolist() == [self.known[p].pages[0] for p in prefixes(key)[:on_device]]
        assert b"".join(node.key for node in found.path) == key.data[: known * PAGE_BYTES]
        if len(list(self.tree.nodes())) > before:
            self.count_split(prefixes(key)[known - 1], locked, filling)

    def count_split(self, end: Prefix, locked: Counter[Prefix], filling: set[tuple[Tier, Prefix]]) -> None:
        REACHED["split_lock"] += locked[end] > 0
        for tier in Tier:
            REACHED[f"split_{tier.name.lower()}_fill"] += (tier, end) in filling

    def start_job(self) -> None:
        """A request locks its match and gets pages for the rest."""
        key = self.random_key()
        fresh = len(prefixes(key)) - self.longest(key)[0]
        if len(self.jobs) >= 3 or fresh > self.pools[Tier.DEVICE].free_pages:
            return
        found = self.tree.match(key)
        new = self.pools[Tier.DEVICE].alloc(fresh)
        assert new is not None
        pages = np.concatenate([found.device_pages(), new])
        self.jobs.append(Job(key, self.tree.lock(found.last_device_node), found.device_len // PAGE_SIZE, pages))

    def finish_job(self) -> None:
        """A request gives its pages to the tree, or takes them back."""
        if not self.jobs:
            return
        job = self.jobs.pop(self.rng.randrange(len(self.jobs)))
        kept = self.insert(job) if self.rng.random() < 0.85 else job.locked
        self.pools[Tier.DEVICE].free(job.pages[kept:])
        self.tree.unlock(job.receipt)
        with pytest.raises(ProtocolError, match="twice"):
            self.tree.unlock(job.receipt)

    def insert(self, job: Job) -> int:
        """Returns from which page on the request still owns its pages."""
        result = self.tree.insert(job.key, job.pages, owned_from=job.locked)
        duplicates, adopted, upto = list[int](), 0, 0
        for index, prefix in enumerate(prefixes(job.key)):
            copies = self.known.setdefault(prefix, Copies())
            if copies.states[0] == "filling":
                REACHED["insert_stopped_at_fill"] += 1
                break
            if copies.states[0] == "resident" and index >= job.locked:
                duplicates.append(int(job.pages[index]))
            elif copies.states[0] == "absent":
                REACHED["adopted_demoted"] += copies.states[1] != "absent"
                copies.put(Tier.DEVICE, int(job.pages[index]))
                adopted += 1
            upto = index + 1
        REACHED["insert"] += 1
        REACHED["duplicates"] += bool(duplicates)
        assert result.num_pages == max(upto, job.locked)
        assert result.duplicates.tolist() == duplicates
        assert sum(page_count(node) for node in result.adopted) == adopted
        assert sum(page_count(node) for node in result.path) == result.num_pages
        assert result.node is (result.path[-1] if result.path else None)
        self.pools[Tier.DEVICE].free(result.duplicates)
        return result.num_pages

    def insert_host(self) -> None:
        """A read from storage arrives, for a prefix that may be gone by now."""
        key = self.random_key()
        names, known = prefixes(key), self.longest(key)[1]
        if not names:
            return
        first = self.rng.randrange(len(names))
        pages = self.pools[Tier.HOST].alloc(len(names) - first)
        if pages is None:
            return
        spare = self.tree.insert_host(key, first, pages)
        unneeded = pages.tolist()
        if known < first:
            REACHED["insert_host_vanished"] += 1
        else:
            refused = self.begun_before(key, first)
            for page, prefix in zip(pages.tolist(), names[first:]):
                copies = self.known.setdefault(prefix, Copies())
                if copies.states[1] == "absent" and prefix not in refused:
                    copies.put(Tier.HOST, page)
                    copies.states[2] = "resident"
                    unneeded.remove(page)
                    REACHED["insert_host"] += 1
            REACHED["insert_host_spare"] += bool(unneeded)
        assert spare.tolist() == unneeded
        self.pools[Tier.HOST].free(spare)

    def begun_before(self, key: PrefixKey, first: int) -> set[Prefix]:
        """Pages of the node that `first` is inside of: a node takes a host copy whole or not at all."""
        at, inside = 0, set[Prefix]()
        for node in self.tree.match(key).path:
            upto = at + page_count(node)
            if at < first < upto:
                inside = set(prefixes(key)[first:upto])
            at = upto
        return inside

    # ---- copies in flight -------------------------------------------------------------------

    def random_path(self) -> list[Node]:
        nodes = list(self.tree.nodes())
        return self.rng.choice(nodes).path() if nodes else []

    def begin(self, tier: Tier, nodes: list[Node]) -> None:
        if not nodes or len(self.transfers) >= 6:
            return
        pages = self.pools[tier].alloc(sum(map(page_count, nodes))) if tier in self.pools else np.empty(0, np.int32)
        if pages is None:
            return
        names = [prefix for node in nodes for prefix in pages_of(node, self.tree.namespace_of(node))]
        self.transfers.append(Transfer(self.tree.fills.begin(tier, nodes, pages), names))
        for index, prefix in enumerate(names):
            self.known[prefix].put(tier, int(pages[index]) if len(pages) else None, "filling")

    def begin_load(self) -> None:
        """Load what is in host memory behind the device copies, arriving ones included."""
        nodes = []
        for node in self.random_path():
            if node.device_pages is None and not node.residency.on_host:
                break
            if node.device_pages is None:
                nodes.append(node)
        self.begin(Tier.DEVICE, nodes[: self.rng.randint(1, 2)])

    def begin_backup(self) -> None:
        self.begin(Tier.HOST, [n for n in self.random_path() if n.residency.on_device and n.host_pages is None])

    def begin_store(self) -> None:
        absent = [node for node in self.random_path() if node.residency[Tier.STORAGE].value == "absent"]
        self.begin(Tier.STORAGE, [node for node in absent if node.residency.on_host])

    def complete(self) -> None:
        """The oldest copy of a tier arrives: a stream completes in order, so nothing outruns what it continues."""
        if not self.transfers:
            return
        tier = self.rng.choice(self.transfers).fill.tier
        transfer = next(item for item in self.transfers if item.fill.tier is tier)
        if transfer.doomed:
            with pytest.raises(ProtocolError, match="abort it"):
                self.tree.fills.commit(transfer.fill)
            REACHED["doomed_refused"] += 1
            self.abort_one(transfer)
        else:
            self.commit_one(transfer)

    def commit_one(self, transfer: Transfer) -> None:
        tier, count = transfer.fill.tier, len(transfer.prefixes)
        self.transfers.remove(transfer)
        if tier is Tier.STORAGE:
            count = self.rng.randint(0, count)
            REACHED["partial_store"] += 0 < count < len(transfer.prefixes)
            self.tree.fills.commit_store(transfer.fill, count)
        else:
            self.tree.fills.commit(transfer.fill)
        REACHED[f"commit_{tier.name.lower()}"] += 1
        for index, prefix in enumerate(transfer.prefixes):
            self.known[prefix].states[tier] = "resident" if index < count else "absent"

    def abort(self) -> None:
        copies = [transfer for transfer in self.transfers if transfer.fill.tier is not Tier.STORAGE]
        if copies:
            tier = self.rng.choice(copies).fill.tier
            self.abort_one(next(item for item in copies if item.fill.tier is tier))

    def abort_one(self, transfer: Transfer) -> None:
        tier = transfer.fill.tier
        self.transfers.remove(transfer)
        freed = self.tree.fills.abort(transfer.fill)
        destination = [page for prefix in transfer.prefixes if (page := self.known[prefix].pages[tier]) is not None]
        assert sorted(freed.tolist()) == sorted(destination)
        self.pools[tier].free(freed)
        for prefix in transfer.prefixes:
            self.known[prefix].put(tier, None, "absent")
        REACHED[f"abort_{tier.name.lower()}"] += 1
        for other in self.transfers if tier is Tier.DEVICE else ():
            if other.fill.tier is Tier.DEVICE and any(above(p) in transfer.prefixes for p in other.prefixes):
                other.doomed = True
                REACHED["doomed"] += 1

    # ---- eviction ---------------------------------------------------------------------------

    def evict_device(self) -> None:
        node = self.tree.ledger.device.first()
        if node is None:
            return
        names, locked = pages_of(node, self.tree.namespace_of(node)), self.locked()
        assert not any(locked[prefix] for prefix in names)
        assert not any(copies.states[0] != "absent" for p, copies in self.known.items() if above(p) == names[-1])
        if node.children and not node.residency.on_host:
            with pytest.raises(ProtocolError, match="others need"):
                self.tree.drop_device(node)
            if node.host_pages is None:
                self.drop_subtree(node)
        if node.children and not node.residency.on_host:
            return
        assert self.tree.drop_device(node).tolist() == [self.known[prefix].pages[0] for prefix in names]
        REACHED["demote" if node.alive else "evict_device"] += 1
        self.forget(names, Tier.DEVICE)

    def drop_subtree(self, top: Node) -> None:
        for node in reversed(list(top.subtree())):
            if node is not top and not node.children and node.residency.can_drop(Tier.HOST):
                self.drop_host(node)

    def evict_host(self) -> None:
        ledger = self.tree.ledger
        node = (ledger.mirrors if self.rng.random() < 0.4 else ledger.host_leaves).first()
        if node is not None:
            REACHED["evict_mirror" if node.residency.on_device else "evict_host_leaf"] += 1
            self.drop_host(node)

    def drop_host(self, node: Node) -> None:
        names = pages_of(node, self.tree.namespace_of(node))
        assert self.tree.drop_host(node).tolist() == [self.known[prefix].pages[1] for prefix in names]
        self.forget(names, Tier.HOST)

    def forget(self, names: list[Prefix], tier: Tier) -> None:
        self.pools[tier].free(np.array([self.known[prefix].pages[tier] for prefix in names], np.int32))
        for prefix in names:
            self.known[prefix].put(tier, None, "absent")
            if self.known[prefix].states[:2] == ["absent", "absent"]:
                del self.known[prefix]

    def refused(self) -> None:
        """What is locked, pinned, arriving or needed below cannot be dropped, and trying changes nothing."""
        ledger = self.tree.ledger
        for node in list(self.tree.nodes()):
            if node not in ledger.device or (node.children and not node.residency.on_host):
                with pytest.raises(ProtocolError):
                    self.tree.drop_device(node)
                REACHED["refused_drop"] += 1
            if node not in ledger.mirrors and node not in ledger.host_leaves:
                with pytest.raises(ProtocolError):
                    self.tree.drop_host(node)

    # ---- cutting and joining ----------------------------------------------------------------

    def split(self) -> None:
        nodes = [node for node in self.tree.nodes() if page_count(node) > 1]
        if nodes:
            node = self.rng.choice(nodes)
            end = pages_of(node, self.tree.namespace_of(node))[-1]
            self.count_split(end, self.locked(), self.filling())
            self.tree.split(node, self.rng.randint(1, page_count(node) - 1))

    def coalesce(self) -> None:
        before = len(list(self.tree.nodes()))
        self.tree.coalesce(list(self.tree.nodes()))
        REACHED["merged"] += len(list(self.tree.nodes())) < before

    # ---- the oracle -------------------------------------------------------------------------

    def longest(self, key: PrefixKey) -> tuple[int, int]:
        """Leading pages of `key` that are readable on the device, and that are known at all."""
        names = prefixes(key)
        known = next((i for i, prefix in enumerate(names) if prefix not in self.known), len(names))
        states = [self.known[prefix].states[0] for prefix in names[:known]]
        return next((i for i, state in enumerate(states) if state != "resident"), known), known

    def locked(self) -> Counter[Prefix]:
        return Counter(prefix for job in self.jobs for prefix in prefixes(job.key)[: job.locked])

    def filling(self) -> set[tuple[Tier, Prefix]]:
        return {(transfer.fill.tier, prefix) for transfer in self.transfers for prefix in transfer.prefixes}

    def check(self) -> None:
        check_tree(self.tree)
        locked, filling = self.locked(), self.filling()
        pins = Counter((Tier.DEVICE if tier is Tier.HOST else Tier.HOST, prefix) for tier, prefix in filling)
        seen = 0
        for node in self.tree.nodes():
            names = pages_of(node, self.tree.namespace_of(node))
            for index, prefix in enumerate(names):
                copies = self.known[prefix]
                assert [state.value for state in node.residency.states] == copies.states
                for tier, pages in ((Tier.DEVICE, node.device_pages), (Tier.HOST, node.host_pages)):
                    assert (None if pages is None else int(pages[index])) == copies.pages[tier]
                    assert node.residency.pins[tier] == pins[tier, prefix]
                assert node.lock_ref == locked[prefix]
            seen += len(names)
        assert seen == len(self.known)
        self.check_transfers()
        self.check_conservation()

    def check_transfers(self) -> None:
        for transfer in self.transfers:
            nodes = transfer.fill.nodes
            covered = [prefix for node in nodes for prefix in pages_of(node, self.tree.namespace_of(node))]
            assert covered == transfer.prefixes
            assert transfer.fill.doomed == transfer.doomed

    def check_conservation(self) -> None:
        for tier, pool in self.pools.items():
            owned = [page for copies in self.known.values() if (page := copies.pages[tier]) is not None]
            if tier is Tier.DEVICE:
                owned += [page for job in self.jobs for page in job.pages[job.locked :].tolist()]
            assert sorted(owned + pool.free_list().tolist()) == list(range(pool.num_pages))

    def teardown(self) -> None:
        """Everything ends: the tree, its orders and its tables are empty again."""
        self.rng = random.Random(0)
        while self.jobs:
            self.finish_job()
        while self.transfers:
            self.complete()
        for _ in range(200):
            self.evict_device()
            self.evict_host()
        self.check()
        assert not self.known and not self.tree.roots and not self.tree.fills
        assert not any(len(order) for _, order in self.tree.ledger.orders)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_the_tree_is_the_oracle(policy: str) -> None:
    machine = type("Machine", (TreeMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=12, stateful_step_count=10))


def test_long_walks_reach_everything() -> None:
    REACHED.clear()
    for seed in range(80):
        machine = TreeMachine()
        for part in range(10):
            machine.burst(seed * 1000 + part)
        machine.teardown()
    rare = [name for name in MUST_REACH if REACHED[name] < 5]
    assert not rare, f"the walks no longer reach {rare}: {REACHED}"
