"""The tiers of one cache, wired: tree, pools, engines, counters. What the modules of the facade share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hicache.decisions import DecisionLog
from hicache.device_pool import DevicePool, TokenToKVPoolAllocator
from hicache.errors import TransferError
from hicache.hashing import StoreIdentity
from hicache.host_pool.pool import HostPool
from hicache.load_choice import LoadChoice
from hicache.policies.admission import AdmissionPolicy
from hicache.policies.write import WritePolicy
from hicache.stats import Counters
from hicache.transfer.breaker import Breaker
from hicache.transfer.copy_engine import CopyEngine
from hicache.transfer.storage_engine import StorageEngine
from hicache.tree.node import Node
from hicache.tree.plans import page_count
from hicache.tree.radix_tree import RadixTree
from hicache.types import PageIndices


@dataclass
class HostTier:
    """The host pool, the streams between it and the device, and when copies are made.

    Out of service while its breaker says so: after several failures in a row, until a copy that is tried later works.
    `clock` gives seconds.
    """

    pool: HostPool
    copies: CopyEngine
    write: WritePolicy = field(default_factory=WritePolicy)
    clock: Callable[[], float] = time.monotonic
    _breaker: Breaker = field(init=False)
    _counted: BaseException | None = None  # what made the copy fail that was counted last

    def __post_init__(self) -> None:
        self._breaker = Breaker("copies between device and host", self.clock)

    @property
    def degraded(self) -> bool:
        return not self._breaker.ready

    def copy_begins(self) -> None:
        """A copy is submitted; while the tier is being tried again it is the trial."""
        self._breaker.begin()

    def copy_arrived(self) -> None:
        self._breaker.succeeded("copy")

    def copy_failed(self, error: TransferError) -> bool:
        """Counts a failure, and says whether it is one of its own. What waited in the stream behind a copy that failed
        fails of the same cause: one fault is one failure, however many copies were in flight."""
        if error.__cause__ is not None and error.__cause__ is self._counted:
            return False
        self._counted = error.__cause__
        self._breaker.failed("copy", error)
        return True


@dataclass
class StorageTier:
    """The storage engine, when host pages are written to it, and which.

    `generation` is the store's as the tree knows it: what the tree believes to be stored was stored in it.
    """

    engine: StorageEngine
    write: WritePolicy = field(default_factory=WritePolicy)
    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)
    generation: int = field(init=False)

    def __post_init__(self) -> None:
        self.generation = self.engine.generation

    def admits(self, node: Node) -> bool:
        return self.admission.admits(node)


@dataclass
class Tiers:
    """Everything the scheduler thread owns.

    `poison` overwrites freed pages with a pattern, to catch late readers. Evictions take at least
    `fragment_tokens` tokens of a node, so that long nodes are not shredded into single pages. `eviction` are the
    names of the policies by tier, for reports.
    """

    identity: StoreIdentity
    tree: RadixTree
    device_pool: DevicePool
    device_allocator: TokenToKVPoolAllocator
    host: HostTier | None = None
    storage: StorageTier | None = None
    poison: bool = False
    fragment_tokens: int = 512
    eviction: dict[str, str] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    loads: LoadChoice = field(default_factory=LoadChoice)
    decisions: DecisionLog = field(default_factory=DecisionLog)
    request_pages: int = 0  # device pages handed out by the cache and not (yet) the tree's
    staged_host_pages: int = 0  # host pages of prefetches, not in the tree yet
    _seeds: dict[bytes, bytes] = field(default_factory=dict)

    def free_device(self, pages: PageIndices) -> None:
        if self.poison and len(pages):
            self.device_pool.poison(pages)
        self.device_allocator.free(pages)

    def free_host(self, pages: PageIndices) -> None:
        assert self.host is not None
        if self.poison and len(pages):
            self.host.pool.poison(pages)
        self.host.pool.allocator.free(pages)

    def copy_failed(self, error: TransferError) -> None:
        """A copy between host and device has failed; the streams go on with what comes next."""
        assert self.host is not None
        self.counters.failures["copy"] += self.host.copy_failed(error)
        self.host.copies.recover()

    @property
    def host_stride(self) -> int:
        """Bytes of a host page with its padding."""
        assert self.host is not None
        return self.host.pool.page_stride

    def host_buffers(self, pages: PageIndices | Sequence[int]) -> list[memoryview]:
        assert self.host is not None
        page = self.host.pool.page
        return [page(index) for index in (pages.tolist() if not isinstance(pages, Sequence) else pages)]

    def seed(self, namespace: bytes) -> bytes:
        """Start of the digest chain of a namespace of this store. Few namespaces are kept."""
        seed = self._seeds.get(namespace)
        if seed is None:
            if len(self._seeds) >= _MAX_SEEDS:
                self._seeds.clear()
            seed = self._seeds[namespace] = self.identity.seed(namespace)
        return seed

    @property
    def usable_host(self) -> HostTier | None:
        return self.host if self.host is not None and not self.host.degraded else None

    @property
    def readable_storage(self) -> StorageTier | None:
        """The storage tier, unless loads from it are stopped."""
        return self.storage if self.storage is not None and self.storage.engine.takes_loads else None

    @property
    def writable_storage(self) -> StorageTier | None:
        """The storage tier, unless stores to it are stopped."""
        return self.storage if self.storage is not None and self.storage.engine.takes_stores else None

    def watch_storage(self) -> None:
        """Count what failed there, look after deadlines, and forget what went with a store that was cleared."""
        storage = self.storage
        if storage is None:
            return
        failures = storage.engine.poll()
        if failures:
            self.counters.failures += failures
        generation = storage.engine.generation
        if storage.generation != generation:
            storage.generation = generation
            self.counters.forgotten_pages += self.forget_stored()

    def forget_stored(self) -> int:
        """Forget that storage has any page; stores in flight go on. Returns how many pages it was said to have."""
        stored = [node for node in self.tree.nodes() if node.residency.on_storage]
        for node in stored:
            self.tree.drop_storage(node)
        return sum(map(page_count, stored))


_MAX_SEEDS = 4096
