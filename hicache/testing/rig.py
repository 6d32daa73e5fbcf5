"""A small three-tier cache whose every copy waits for the test: streams and storage are stepped by hand.

KV bytes are a function of namespace, token prefix and plane, so every wrong byte is attributable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hicache.cache import HiCache
from hicache.costs import Costs
from hicache.device_pool import DevicePool, ReqToTokenPool, TokenToKVPoolAllocator
from hicache.errors import IntegrityError, StorageError
from hicache.hashing import DIGEST_BYTES, StoreIdentity
from hicache.host_pool.pool import POISON_BYTE, HostPool
from hicache.kernels.dispatch import bind
from hicache.layout import KVLayout
from hicache.lifecycle import DetachReport
from hicache.load_choice import LoadChoice, LoadPolicy, PageSizes
from hicache.plane_access import HostPlanes, PlaneAccess
from hicache.policies.admission import AdmissionPolicy
from hicache.policies.write import WritePolicy
from hicache.prefetch import PrefetchPolicy
from hicache.requests import Admission, Request, RequestManager
from hicache.sim.prefix_hash import PrefixHasher
from hicache.sim.standin import StandIn
from hicache.storage_backends.base import PageRun, StorageBackend
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.stepped import SteppedStream, drain
from hicache.tiers import HostTier, StorageTier, Tiers
from hicache.transfer.copy_engine import CopyEngine
from hicache.transfer.storage_engine import EngineLimits, StorageEngine
from hicache.tree.node import Node
from hicache.tree.radix_tree import RadixTree
from hicache.types import Tier


@dataclass(frozen=True)
class RigOptions:
    """Sizes in pages; `host_pages` or `storage_pages` of 0 leave the tier out."""

    page_size: int = 2
    device_pages: int = 12
    host_pages: int = 8
    storage_pages: int = 16
    eviction: str = "lru"
    host_write: WritePolicy = field(default_factory=WritePolicy)
    storage_write: WritePolicy = field(default_factory=WritePolicy)
    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)
    prefetch: PrefetchPolicy = field(default_factory=lambda: PrefetchPolicy("timeout", 1.0))
    queue_aware: bool = False
    load: LoadPolicy = "always"
    costs: Costs | None = None  # for the load policy auto


class FlakyBackend(MemoryBackend):
    """A memory backend whose next loads (lookups and reads) or stores fail: as many as it is told to."""

    failing_loads = 0
    failing_stores = 0
    error: Exception = StorageError("injected failure")

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        self._trip_load()
        return super().contains_prefix(keys)

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        self._trip_load()
        return super().read_into(keys, buffers)

    def write(self, runs: Sequence[PageRun]) -> list[int]:
        if self.failing_stores:
            self.failing_stores -= 1
            raise self.error
        return super().write(runs)

    def _trip_load(self) -> None:
        if self.failing_loads:
            self.failing_loads -= 1
            raise self.error


@dataclass(frozen=True)
class _Planes:
    """Any bytes in the shape that the stand-in checks."""

    layout: KVLayout
    access: PlaneAccess


class Rig:
    """The cache under test with its hands and eyes: `step` and `settle` move copies, `check` looks at every byte."""

    def __init__(self, options: RigOptions = RigOptions()) -> None:
        self.options = options
        self.layout = KVLayout(2, 1, 4, options.page_size)
        self.now = 0.0
        self.hanging: list[Callable[[], None]] = []
        self.d2h, self.h2d = SteppedStream("d2h"), SteppedStream("h2d")
        self.compute = SteppedStream("compute")
        pool = DevicePool(self.layout, options.device_pages)
        allocator = TokenToKVPoolAllocator(options.device_pages, options.page_size)
        aware = (Tier.DEVICE, Tier.HOST) if options.queue_aware else ()
        tree = RadixTree(options.page_size, options.eviction, options.eviction, aware)
        self.tiers = Tiers(StoreIdentity(self.layout, "rig"), tree, pool, allocator, poison=True, fragment_tokens=1)
        sizes = PageSizes(options.page_size, self.layout.page_stride, self.layout.page_stride)
        self.tiers.loads = LoadChoice(options.load, options.costs, sizes, overlap=4)
        self.backend: FlakyBackend | None = None
        self.engine: StorageEngine | None = None
        if options.host_pages:
            host = HostPool(self.layout, options.host_pages)
            copies = CopyEngine(host.format, bind(pool.planes, host.array), self.d2h, self.h2d)
            self.tiers.host = HostTier(host, copies, options.host_write, clock=lambda: self.now)
        if options.storage_pages:
            self.backend = FlakyBackend(self.tiers.identity, options.storage_pages * self.layout.page_stride)
            self.tiers.storage = self.storage_tier()
        self.cache = HiCache(self.tiers, prefetch=options.prefetch, clock=lambda: self.now)
        table = ReqToTokenPool(16, options.device_pages * options.page_size, options.page_size)
        self.requests = RequestManager(self.cache, table)
        self._standin = StandIn(self.layout, POISON_BYTE)

    def storage_tier(self, backend: StorageBackend | None = None) -> StorageTier:
        """A tier as the options have it, to be stepped, over another backend or the rig's own; `engine` is its own."""
        backend = backend if backend is not None else self.backend
        assert backend is not None
        limits = EngineLimits(8 * self.layout.page_stride)
        self.engine = StorageEngine(backend, self.layout.page_size, limits, threads=0, clock=lambda: self.now)
        return StorageTier(self.engine, self.options.storage_write, self.options.admission)

    def detach(self) -> DetachReport:
        """Take the storage tier away as it is: what waits to be stored is stored, what hangs goes on hanging."""
        report = self.cache.detach_storage(0.0)
        self.backend = self.engine = None
        return report

    def attach(self) -> None:
        """A new, empty storage tier."""
        self.backend = FlakyBackend(self.tiers.identity, self.options.storage_pages * self.layout.page_stride)
        self.cache.attach_storage(self.storage_tier())

    # ---- moving copies ----------------------------------------------------------------------

    def step(self) -> bool:
        """Move whatever can move by one piece; False if nothing can."""
        moved = [stream.step() for stream in (self.compute, self.d2h, self.h2d)]
        return any(moved) or (self.engine is not None and self.engine.run_next())

    def hang(self) -> bool:
        """Begin the next storage call and leave it hanging until `release`; False if there is none."""
        call = self.engine.begin_next() if self.engine is not None else None
        if call is not None:
            self.hanging.append(call)
        return call is not None

    def release(self) -> None:
        """The storage calls that hang go on."""
        while self.hanging:
            self.hanging.pop(0)()

    def settle(self) -> None:
        """Run and commit until nothing is in flight; storage calls that hang go on."""
        self.release()
        for _ in range(200):
            self.cache.end_step(None)
            while self.step():
                pass
            self.cache.poll()
            if not self.cache.in_flight:
                return
        raise IntegrityError("copies are still in flight after 200 rounds")

    def drain_streams(self) -> None:
        drain(self.compute, self.d2h, self.h2d)

    # ---- requests ---------------------------------------------------------------------------

    def write_kv(self, req: Request, start: int, stop: int) -> None:
        """What the model does: write the KV of tokens start .. stop-1 into the request's pages."""
        hashes = PrefixHasher(req.namespace).extend(req.tokens[:stop])[start:]
        self._standin.write(self.tiers.device_pool, self.requests.pages(req), start, hashes)

    def serve(self, tokens: Sequence[int], namespace: bytes = b"", rid: str = "r") -> Admission:
        """Run a whole request, waiting for everything it needs; returns what the tiers served of it."""
        req = Request(rid, tokens, namespace)
        self.cache.prefetch(rid, req.key())
        while not self.cache.prefetch_ready(rid):
            self.settle()
            self.now += 0.1
        admission = self.admit(req)
        self.finish(req)
        return admission

    def admit(self, req: Request) -> Admission:
        """Admit, make room as long as it takes, wait for the loads and check their bytes."""
        for _ in range(50):
            admission = self.requests.admit(req)
            if admission is not None and self.requests.extend(req, len(req.tokens)):
                break
            if admission is not None:
                self.requests.retract(req)
            self.settle()
        else:
            raise IntegrityError("a request found no room in 50 rounds")
        while self.step():
            pass
        self.check_pages(req, admission.prefix_len)
        return admission

    def finish(self, req: Request) -> None:
        """Compute what is missing and release the request."""
        self.write_kv(req, req.kv_committed_len, len(req.tokens))
        self.requests.commit(req, len(req.tokens))
        self.requests.cache_finished_req(req)
        self.cache.end_step(None)

    # ---- looking ----------------------------------------------------------------------------

    def check_pages(self, req: Request, num_tokens: int) -> None:
        """Raise IntegrityError unless the first `num_tokens` tokens of an admitted request have the right KV."""
        pages = self.requests.pages(req)[: num_tokens // self.layout.page_size]
        prefix = req.tokens[: len(pages) * self.layout.page_size].tobytes()
        self._check("device", self.tiers.device_pool.access, pages, prefix, req.namespace)

    def check(self) -> None:
        """All invariants, and every byte that any tier calls readable."""
        self.cache.check_integrity()
        for namespace, root in self.tiers.tree.roots.items():
            for prefix, node in _prefixes(root):
                self._check_node(prefix, node, namespace)

    def _check_node(self, prefix: bytes, node: Node, namespace: bytes) -> None:
        host = self.tiers.host
        if node.residency.on_device and node.device_pages is not None:
            self._check("device", self.tiers.device_pool.access, node.device_pages, prefix, namespace)
        if node.residency.on_host and node.host_pages is not None and host is not None:
            self._check("host", self._planes(host.pool.array), node.host_pages, prefix, namespace)
        if self.backend is not None:
            self._check_stored(prefix, node, namespace)

    def _check_stored(self, prefix: bytes, node: Node, namespace: bytes) -> None:
        assert self.backend is not None
        names = self.tiers.tree.digests(node, self.tiers.seed(namespace))
        for index in range(len(node.key) // self.tiers.tree.page_bytes):
            digest = names[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            page = np.empty((1, self.layout.page_stride), np.uint8)
            if MemoryBackend.read_into(self.backend, [digest], [memoryview(page[0])]):
                end = len(prefix) - len(node.key) + (index + 1) * self.tiers.tree.page_bytes
                self._check("storage", self._planes(page), np.zeros(1, np.int32), prefix[:end], namespace)

    def _planes(self, pages: npt.NDArray[np.uint8]) -> HostPlanes:
        size = self.layout.plane_bytes
        return HostPlanes([pages[:, plane * size : (plane + 1) * size] for plane in range(self.layout.num_planes)])

    def _check(
        self,
        tier: str,
        access: PlaneAccess,
        pages: npt.NDArray[np.int32],
        prefix: bytes,
        namespace: bytes,
    ) -> None:
        """`pages` hold the last tokens of `prefix`."""
        hashes = PrefixHasher(namespace).extend(np.frombuffer(prefix, np.int32))
        last = len(pages) * self.layout.page_size
        hashes = hashes[len(hashes) - last :]
        view = _Planes(self.layout, access)
        wrong = self._standin.count_wrong(view, pages, hashes, range(self.layout.num_planes))
        if wrong:
            what = next(iter(self._standin.explain(view, pages, hashes, range(self.layout.num_planes))), "")
            raise IntegrityError(f"{wrong} wrong pages on the {tier}: {what}")


def _prefixes(node: Node, prefix: bytes = b"") -> Iterator[tuple[bytes, Node]]:
    for child in (node.children or {}).values():
        yield prefix + child.key, child
        yield from _prefixes(child, prefix + child.key)
