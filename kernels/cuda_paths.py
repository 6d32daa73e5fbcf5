"""Three ways for pages between a GPU and pinned host memory.

| path | who moves the bytes | seen on an H200, PCIe 5, of one large cudaMemcpyAsync |
|---|---|---|
| kernel | a few multiprocessors read or write host memory | 0.93 to 0.97 from 1 KiB a plane on |
| staged | pages are gathered on the GPU, a copy engine brings each to the host | 0.88 to 0.96 from 256 KiB a page on |
| direct | a copy engine, one copy for each plane of each page | 0.03 at 4 KiB a plane, 0.7 at 32, 0.9 at 256 |

Multiprocessors that write to host memory slow down all others by a third to two thirds meanwhile, since writes queue
up on the way; reads do not, nor do copy engines. So device to host goes by `staged` where that is about as fast.

Everything runs on the calling thread's current stream, which must not be the legacy default one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import torch

from hicache.errors import CapacityError
from hicache.kernels.cuda_driver import copy_batch
from hicache.kernels.cuda_pools import CudaPools, PageBatch
from hicache.kernels.cuda_source import Kernel, kernel

PathName = Literal["direct", "staged", "kernel"]

THREADS = 512
STAGING_BYTES = 64 << 20
"""Of device memory for `staged`. Gathering on the GPU waits for the copy of what was staged before: with less, the
copy engine pauses more often."""

_SHARE = 32
"""One of so many multiprocessors copies, and at least four: enough to fill PCIe 5 in both directions."""


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

    def __init__(self, pools: CudaPools) -> None:
        self._pools = pools
        self._kernels = CopyKernels(pools)

    def gather(self, batch: PageBatch) -> None:
        """See Path."""
        device_pages, host_pages = batch.on_device
        self._kernels.gather(device_pages, host_pages, len(batch), self._pools.host_address, self._kernels.few)

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
        copy_batch(host, device, np.full(len(host), self._pools.plane_bytes, np.uint64), self._pools.stream)

    def scatter(self, batch: PageBatch, first_plane: int, count: int) -> None:
        """See Path."""
        device, host = batch.pieces(first_plane, count)
        copy_batch(device, host, np.full(len(host), self._pools.plane_bytes, np.uint64), self._pools.stream)


class StagedPath(Path):
    """Device to host by way of pages on the device; one stream at a time may use it. The way back is a kernel's.

    Raises CapacityError if the device has no memory for the staging.
    """

    name = "staged"

    def __init__(self, pools: CudaPools) -> None:
        self._pools = pools
        self._kernels = CopyKernels(pools)
        self._pages = min(max(1, STAGING_BYTES // pools.page_stride), pools.planes.num_pages)
        try:
            self._staging = torch.empty(self._pages * pools.page_stride, dtype=torch.uint8, device=pools.device)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"no memory is left on {pools.device} to stage copies in: make the device tier smaller"
            ) from error
        # From host memory: that is over when the call returns, for whatever stream comes first.
        self._identity = torch.arange(self._pages, dtype=torch.int32).to(pools.device)
        self._slots = np.arange(self._pages, dtype=np.uint64) * np.uint64(pools.page_stride)
        self._slots += np.uint64(self._staging.data_ptr())

    def gather(self, batch: PageBatch) -> None:
        """See Path."""
        device_pages, targets = batch.on_device[0], batch.host_addresses()
        for start in range(0, len(batch), self._pages):
            count = min(self._pages, len(batch) - start)
            self._kernels.gather(
                device_pages[start:], self._identity, count, self._staging.data_ptr(), self._kernels.many
            )
            sizes = np.full(count, self._pools.page_bytes, np.uint64)
            copy_batch(targets[start : start + count], self._slots[:count], sizes, self._pools.stream)

    def scatter(self, batch: PageBatch, first_plane: int, count: int) -> None:
        """See Path."""
        self._kernels.scatter(batch, first_plane, count)


class CopyKernels:
    """The kernels of copy.cu for one pair of pools. `few` blocks fill the bus, `many` fill the GPU."""

    def __init__(self, pools: CudaPools) -> None:
        self._pools = pools
        index = pools.device.index
        macros = (
            ("VECTOR_BYTES", pools.vector_bytes),
            ("PLANE_BYTES", pools.plane_bytes),
            ("PAGE_STRIDE", pools.page_stride),
            ("MAX_THREADS", THREADS),
        )
        self._gather = kernel("copy.cu", "gather_pages", index, macros)
        self._scatter = kernel("copy.cu", "scatter_pages", index, macros)
        self.many = torch.cuda.get_device_properties(pools.device).multi_processor_count
        self.few = max(4, self.many // _SHARE)

    def gather(self, device_pages: torch.Tensor, targets: torch.Tensor, count: int, address: int, blocks: int) -> None:
        """All planes of `count` pages to the pages `targets` of page-first memory that begins at `address`."""
        table, planes = self._pools.planes.table.data_ptr(), self._pools.num_planes
        arguments = self._arguments(table, address, (device_pages, targets), count, planes, 0)
        self._launch(self._gather, blocks, count * self._pools.page_bytes, arguments)

    def scatter(self, batch: PageBatch, first_plane: int, count: int) -> None:
        """Some planes of a batch's host pages to its device pages."""
        table = self._pools.planes.table.data_ptr() + 8 * first_plane
        device_pages, host_pages = batch.on_device
        first_byte = first_plane * self._pools.plane_bytes
        arguments = self._arguments(
            table, self._pools.host_address, (device_pages, host_pages), len(batch), count, first_byte
        )
        self._launch(self._scatter, self.few, len(batch) * count * self._pools.plane_bytes, arguments)

    def _arguments(
        self, table: int, host: int, pages: tuple[torch.Tensor, torch.Tensor], count: int, planes: int, first_byte: int
    ) -> tuple[object, ...]:
        device_pages, host_pages = pages
        return (
            table,
            host,
            device_pages.data_ptr(),
            host_pages.data_ptr(),
            np.uint32(count),
            np.uint32(planes),
            np.uint64(first_byte),
        )

    def _launch(self, function: Kernel, blocks: int, nbytes: int, arguments: tuple[object, ...]) -> None:
        """No more blocks than have something to copy."""
        useful = -(-nbytes // (THREADS * self._pools.vector_bytes))
        if useful:
            function.launch(min(blocks, useful), THREADS, arguments, self._pools.stream)
