"""A rank's side of the connector: its host pages, its disk, and the copies.

It decides nothing: it runs the jobs of each step's plan and reports what came of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.kv_cache_interface import group_kernel_blocks

from hicache.build import build_storage
from hicache.config import CacheConfig
from hicache.errors import CapacityError, ConfigError, StorageError, TransferError
from hicache.host_pool.arena import Placement
from hicache.host_pool.budget import check_host_budget
from hicache.host_pool.numa import resolve_numa
from hicache.host_pool.pinning import CudaRegistrar, resolve_pinned
from hicache.host_pool.pool import HostPool
from hicache.integrations.vllm.jobs import (
    BlockCopy,
    Hello,
    Load,
    NamedPage,
    Persist,
    StepPlan,
    Store,
    WorkerReport,
)
from hicache.integrations.vllm.metrics import TierStats, WorkerMeter
from hicache.kernels.cuda_planes import CudaPlanes
from hicache.kernels.dispatch import Planes, bind
from hicache.storage_backends.base import PageRun
from hicache.streams import create_stream, record_compute
from hicache.transfer.breaker import BreakerState
from hicache.transfer.copy_engine import CopyEngine
from hicache.transfer.storage_engine import StorageEngine
from hicache.transfer.storage_tickets import LookupTicket, ReadTicket, WriteTicket
from hicache.transfer.tickets import CopyTicket
from hicache.types import PageIndices, Tier

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("vllm.hicache")

_REST_SECONDS = 200e-6

Blocks = Sequence[torch.Tensor]
"""One tensor a layer, uint8 (num_blocks, plane_bytes): the engine's own memory."""


def block_views(cache: KVCacheConfig, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The engine's KV tensors as rows of bytes, one a block. Raises ConfigError for blocks not in one piece."""
    (group,) = cache.kv_cache_groups
    return [
        _block_view(name, tensors[name], cache.num_blocks, group.kv_cache_spec.page_size_bytes)
        for name in group.layer_names
    ]


def _block_view(name: str, tensor: torch.Tensor, num_blocks: int, page: int) -> torch.Tensor:
    blocks = group_kernel_blocks(tensor, num_blocks)
    item = blocks.element_size()
    extent = item * (
        1 + sum((size - 1) * step for size, step in zip(blocks.shape[1:], blocks.stride()[1:], strict=True))
    )
    if extent > page:
        raise ConfigError(f"the blocks of {name} are not in one piece (layout of the KV cache): use another layout")
    view = torch.empty(0, dtype=torch.uint8, device=blocks.device)
    offset, stride = blocks.storage_offset() * item, blocks.stride(0) * item
    return view.set_(blocks.untyped_storage(), offset, (num_blocks, page), (stride, 1))  # type: ignore[call-overload, no-any-return]


class RankWorker:
    """The host pool, the copy streams and the storage engine of one rank."""

    def __init__(self, settings: CacheConfig, blocks: Blocks) -> None:
        self._device = str(blocks[0].device)
        self._identity = settings.identity()
        self._seed = self._identity.seed()
        self._storage = build_storage(settings)
        self._pool = _host_pool(settings, self._device)
        self._copies = _copy_engine(blocks, self._pool, self._device)
        self._loads: dict[int, tuple[Load, CopyTicket | None]] = {}
        self._asked: dict[int, LookupTicket | ReadTicket] = {}
        self._writes: dict[int, WriteTicket] = {}
        self._ended: set[str] = set()  # requests whose load has ended
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()  # whose load failed in this step
        self._report = WorkerReport()
        self._meter = WorkerMeter()

    @property
    def hello(self) -> Hello:
        return Hello(self._identity, self._pool.num_pages)

    # ---- before the forward pass ------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Ask the disk, which goes on beside the forward pass."""
        self._failed_requests.clear()
        for job in plan.cancelled:
            if job in self._asked:
                self._asked[job].cancelled = True
        engine = self._storage.engine if self._storage is not None else None
        for lookup in plan.lookups:
            self._ask(lookup.job, engine.find(self._names(lookup.keys)) if engine else None)
        for read in plan.reads:
            self._ask(read.job, engine.read(*self._named_buffers(read.pages)) if engine else None)

    def _ask(self, job: int, ticket: LookupTicket | ReadTicket | None) -> None:
        if ticket is None:
            self._done(job, 0)
        else:
            self._asked[job] = ticket

    def load(self, plan: StepPlan) -> None:
        """Begin the loads; the engine asks for their end with `finished_loads`."""
        after = record_compute(self._device)  # the blocks' last readers
        for load in plan.loads:
            try:
                ticket = self._copies.load_back(_pages(load.copies), _blocks(load.copies), after)
            except TransferError:
                log.warning("hicache: a load could not begin", exc_info=True)
                self._loads[load.job] = (load, None)
            else:
                self._loads[load.job] = (load, ticket)

    # ---- after the forward pass -------------------------------------------------------------

    def store(self, plan: StepPlan) -> None:
        """Copy what the step has computed to the host, then hand to the disk what goes there. Ends with the copies:
        the engine may reuse its blocks."""
        self._look_at_loads()
        bad = set[int]()
        after = record_compute(self._device)
        tickets = [(store, self._backup(store, after)) for store in plan.stores]
        for store, ticket in tickets:
            stored = ticket is not None and self._succeeded(ticket)
            if not stored:
                bad.update(copy.page for copy in store.copies)
            self._done(store.job, int(stored))
        for persist in plan.persists:
            self._persist(persist, bad)

    def _backup(self, store: Store, after: object) -> CopyTicket | None:
        """None for what was computed on a load that has failed: it is not what its name says."""
        failed = self._failed_blocks
        if store.request in self._failed_requests or not failed.isdisjoint(copy.block for copy in store.copies):
            return None
        try:
            return self._copies.backup(_blocks(store.copies), _pages(store.copies), after)  # type: ignore[arg-type]
        except TransferError:
            log.warning("hicache: a store could not begin", exc_info=True)
            return None

    def _succeeded(self, ticket: CopyTicket) -> bool:
        try:
            ticket.synchronize()
        except TransferError as error:
            self._copies.recover()
            log.warning("hicache: a store failed: %s", error)
            return False
        return True

    def _persist(self, persist: Persist, bad: set[int]) -> None:
        if self._storage is None or not bad.isdisjoint(named.page for named in persist.pages):
            self._done(persist.job, 0)
            return
        engine = self._storage.engine
        names, buffers = self._named_buffers(persist.pages)
        parent = None if persist.parent is None else self._name(persist.parent)
        run = PageRun(names, buffers, parent, _generation(engine))
        ticket = engine.write([run], len(buffers) * self._pool.page_stride)
        if ticket is None:
            self._done(persist.job, 0)
        else:
            self._writes[persist.job] = ticket

    # ---- reporting --------------------------------------------------------------------------

    def rest(self, plan: StepPlan) -> None:
        """Between two looks at what is under way, in a step that computes nothing. An engine within its caller's
        process takes step after step then, and would keep the interpreter's lock from the threads it waits for."""
        if plan.idle and (self._loads or self._asked):
            time.sleep(_REST_SECONDS)

    def finished_loads(self) -> set[str]:
        """Requests whose load has ended, well or not, since the last call."""
        self._look_at_loads()
        ended, self._ended = self._ended, set()
        return ended

    def _look_at_loads(self) -> None:
        for job, (load, ticket) in list(self._loads.items()):
            try:
                if ticket is not None and not ticket.query():
                    continue
                loaded = ticket is not None
            except TransferError as error:
                self._copies.recover()
                log.warning("hicache: a load failed, its tokens are computed: %s", error)
                loaded = False
            del self._loads[job]
            self._ended.add(load.request)
            self._done(job, int(loaded))
            if not loaded:
                self._failed_blocks.update(copy.block for copy in load.copies)
                self._failed_requests.add(load.request)

    def failed_blocks(self) -> set[int]:
        """Device blocks whose load has failed since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self) -> WorkerReport | None:
        """What has ended since the last call; None if nothing has."""
        if self._storage is not None:
            self._meter.failed(self._storage.engine.poll())
        for job, asked in list(self._asked.items()):
            if asked.done:
                del self._asked[job]
                self._done(job, asked.hits if isinstance(asked, LookupTicket) else asked.count)
        for job, write in list(self._writes.items()):
            if write.done:
                del self._writes[job]
                self._done(job, write.counts[0])
        report, self._report = self._report, WorkerReport()
        return report if report.results else None

    def stats(self) -> TierStats | None:
        """What has changed on the disk's side since the last call."""
        if self._storage is None:
            return None
        loads, stores = self._storage.engine.states
        return self._meter.report(loads is BreakerState.ON, stores is BreakerState.ON)

    def _done(self, job: int, result: int) -> None:
        self._report.add(job, 1, result)

    def _name(self, key: bytes) -> bytes:
        return sha256(self._seed + key).digest()

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [self._name(key) for key in keys]

    def _named_buffers(self, pages: Sequence[NamedPage]) -> tuple[list[bytes], list[memoryview]]:
        """The pages' names on this rank's disk, and their bytes."""
        return [self._name(named.key) for named in pages], [self._pool.page(named.page) for named in pages]

    def close(self) -> None:
        """Finish the stores, close the disk, give the memory back. Idempotent."""
        self._copies.close()
        if self._storage is not None:
            self._storage.engine.close()
        self._pool.close()


def _blocks(copies: Sequence[BlockCopy]) -> PageIndices:
    return np.array([copy.block for copy in copies], np.int32)


def _pages(copies: Sequence[BlockCopy]) -> PageIndices:
    return np.array([copy.page for copy in copies], np.int32)


def _generation(engine: StorageEngine) -> int:
    """The store's as of now: another process may have cleared it since the engine looked."""
    try:
        return engine.backend.generation()
    except StorageError:
        return engine.generation


def _host_pool(settings: CacheConfig, device: str) -> HostPool:
    host, capacity = settings.host, settings.capacity(Tier.HOST)
    assert host is not None and capacity is not None
    pinned = resolve_pinned(host.pinned, device)
    # A step would wait for the kernel to clear each page that is stored to for the first time.
    placement = Placement(host.huge_pages, resolve_numa(host.numa, device), populate=True)
    try:
        check_host_budget(host.local_ranks * capacity.nbytes)
        registrar = CudaRegistrar(device) if pinned else None
        return HostPool(settings.layout(), capacity.num_pages, pinned, placement, registrar)
    except CapacityError as error:
        index = settings.index_of(Tier.HOST)
        assert index is not None
        raise ConfigError(f"{settings.where('tiers', index, 'size')}: {error}") from None


def _copy_engine(blocks: Blocks, pool: HostPool, device: str) -> CopyEngine:
    planes: Planes = [block.numpy() for block in blocks] if device == "cpu" else CudaPlanes(blocks)
    side = device if pool.pinned else "cpu"
    copier = bind(planes, pool.array, pool.pinned)
    return CopyEngine(pool.format, copier, create_stream(side, "d2h"), create_stream(side, "h2d", priority=-1))
