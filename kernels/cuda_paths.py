"""Three ways for pages between a GPU and pinned host memory.

| path | who moves the bytes | seen on an H200, PCIe 5, of one large cudaMemcpyAsync |
|---|---|---|
| kernel | a few multiprocessors read or write host memory | 0.94 down, 0.92 up from 1 KiB a plane on |
| staged | pages are gathered on the GPU, a copy engine brings each to the host | 0.92 to 0.96 from 512 KiB a page on |
| direct | a copy engine, one copy for each plane of each page | 0.1 at 4 KiB a plane, 0.5 at 32, 0.95 from 64 on |

Multiprocessors that write to host memory slow down all others by a third to two thirds meanwhile, since writes queue
up on the way; reads do not, nor do copy engines. So device to host goes by `staged` where that is about as fast.

Everything runs on the calling thread's current stream, which must not be the legacy default one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch

from hicache.errors import CapacityError
from hicache.kernels.cuda_driver import copy_batch
from hicache.kernels.cuda_pools import CudaPools, PageBatch
from hicache.kernels.cuda_source import Kernel, kernel

PathName = Literal["direct", "staged", "kernel"]

Arguments: TypeAlias = tuple[object, ...]
"""Of a kernel: table, host memory, device pages, host pages, their number, the number of planes, where these begin."""

THREADS = 1024
STAGING_BYTES = 64 << 20
"""Of device memory for `staged`. Gathering on the GPU waits for the copy of what was staged before: with less, the
copy engine pauses more often."""

_SHARE = 64
"""One of so many multiprocessors copies, and at least two: enough to fill PCIe 5 in both directions."""


@dataclass(frozen=True)
class Target:
    """Page-first memory and the numbers of pages in it, by their addresses on the GPU."""

    memory: int
    pages: int


class PageKernels(Protocol):
    """Kernels that gather and scatter pages. `few` blocks fill the bus, `many` fill the GPU."""

    few: int
    many: int

    def gather(self, batch: PageBatch, start: int, count: int, target: Target, blocks: int) -> None:
        """All planes of a batch's device pages, `count` from number `start` on."""
        ...

    def scatter(self, batch: PageBatch, first_plane: int, count: int) -> None:
        """Some planes of a batch's host pages to its device pages."""
        ...


def gather_arguments(batch: PageBatch, start: int, count: int, target: Target) -> Arguments:
    """Of a kernel that gathers all planes of `count` pages of a batch, from number `start` on."""
    planes, pages = batch.pools.planes, batch.on_gpu[0] + 4 * start
    numbers = np.uint32(count), np.uint32(len(planes)), np.uint64(0)
    return planes.table_address, target.memory, pages, target.pages, *numbers


def scatter_arguments(batch: PageBatch, first_plane: int, count: int, first: int) -> Arguments:
    """Of a kernel that scatters `count` planes of a batch; `first` says where they begin in a host page, in the
    kernel's own terms."""
    table = batch.pools.planes.table_address + 8 * first_plane
    numbers = np.uint32(len(batch)), np.uint32(count), np.uint64(first)
    return table, batch.pools.host_address, *batch.on_gpu, *numbers


class Path(ABC):
    """One way. `name` is its name in reports."""

    name: PathName

    @abstractmethod
    def gather(self, batch: PageBatch) -> None:
        """Enqueue the copy of all planes, device to host."""

    @abstractmethod
    def scatter(self, batch: PageBatch, first_plane: int, count: int) -> None:
        """Enqueue the copy of some planes, host to device."""


class KernelPath(Path):
    """Multiprocessors read and write host memory."""

    name = "kernel"

    def __init__(self, pools: CudaPools, kernels: PageKernels) -> None:
        self._pools = pools
        self._kernels = kernels

    def gather(self, batch: PageBatch) -> None:
        """See Path."""
        self._kernels.gather(batch, 0, len(batch), Target(self._pools.host_address, batch.on_gpu[1]), self._kernels.few)

    def scatter(self, batch: PageBatch, first_plane: int, count: int) -> None:
        """See Path."""
        self._kernels.scatter(batch, first_plane, count)


class DirectPath(Path):
    """A copy engine reads and writes the planes where they are."""

    name = "direct"

    def __init__(self, pools: CudaPools) -> None:
        self._pools = pools

    def gather(self, batch: PageBatch) -> None:
        """See Path."""
        device, host = batch.pieces(0, self._pools.num_planes)
        copy_batch(host, device, np.full(len(host), self._pools.plane_bytes, np.uint64), batch.stream)

    def scatter(self, batch: PageBatch, first_plane: int, count: int) -> None:
        """See Path."""
        device, host = batch.pieces(first_plane, count)
        copy_batch(device, host, np.full(len(host), self._pools.plane_bytes, np.uint64), batch.stream)


class StagedPath(Path):
    """Device to host by way of pages on the device; one stream at a time may use it. The way back is a kernel's.

    Raises CapacityError if the device has no memory for the staging.
    """

    name = "staged"

    def __init__(self, pools: CudaPools, kernels: PageKernels) -> None:
        self._pools = pools
        self._kernels = kernels
        self._pages = min(max(1, STAGING_BYTES // pools.page_stride), pools.planes.num_pages)
        try:
            self.staging = torch.empty(self._pages * pools.page_stride, dtype=torch.uint8, device=pools.device)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"no memory is left on {pools.device} to stage copies in: make the device tier smaller"
            ) from error
        # From host memory: that is over when the call returns, for whatever stream comes first.
        self._identity = torch.arange(self._pages, dtype=torch.int32).to(pools.device)
        self._target = Target(self.staging.data_ptr(), self._identity.data_ptr())
        self._slots = np.arange(self._pages, dtype=np.uint64) * np.uint64(pools.page_stride)
        self._slots += np.uint64(self.staging.data_ptr())

    def gather(self, batch: PageBatch) -> None:
        """See Path."""
        targets = batch.host_addresses()
        for start in range(0, len(batch), self._pages):
            count = min(self._pages, len(batch) - start)
            self._kernels.gather(batch, start, count, self._target, self._kernels.many)
            sizes = np.full(count, self._pools.page_bytes, np.uint64)
            copy_batch(targets[start : start + count], self._slots[:count], sizes, batch.stream)

    def scatter(self, batch: PageBatch, first_plane: int, count: int) -> None:
        """See Path."""
        self._kernels.scatter(batch, first_plane, count)


class CopyKernels:
    """The kernels of copy.cu for one pair of pools, see PageKernels."""

    def __init__(self, pools: CudaPools) -> None:
        self._pools = pools
        index = pools.device.index
        macros = (
            ("VECTOR_BYTES", pools.vector_bytes),
            ("PLANE_BYTES", pools.plane_bytes),
            ("PAGE_STRIDE", pools.page_stride),
            ("MAX_THREADS", THREADS),
            ("UNROLL", 4),
        )
        self._gather = kernel("copy.cu", "gather_pages", index, macros)
        self._scatter = kernel("copy.cu", "scatter_pages", index, macros)
        self.many = torch.cuda.get_device_properties(pools.device).multi_processor_count
        self.few = max(2, self.many // _SHARE)
        self._block_bytes = THREADS * pools.vector_bytes

    def gather(self, batch: PageBatch, start: int, count: int, target: Target, blocks: int) -> None:
        """See PageKernels."""
        arguments = gather_arguments(batch, start, count, target)
        self._launch(self._gather, blocks, count * self._pools.page_bytes, arguments, batch.stream)

    def scatter(self, batch: PageBatch, first_plane: int, count: int) -> None:
        """See PageKernels."""
        size = self._pools.plane_bytes
        arguments = scatter_arguments(batch, first_plane, count, first_plane * size)
        self._launch(self._scatter, self.few, len(batch) * count * size, arguments, batch.stream)

    def _launch(self, function: Kernel, blocks: int, nbytes: int, arguments: Arguments, stream: int) -> None:
        """No more blocks than have something to copy."""
        useful = -(-nbytes // self._block_bytes)
        if useful:
            function.launch(min(blocks, useful), THREADS, arguments, stream)
