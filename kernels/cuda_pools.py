"""The two pools of a CUDA copy, batches of their pages, and where the bytes of a batch lie."""

from __future__ import annotations

from functools import cached_property
from math import gcd

import numpy as np
import torch

from hicache.kernels.base import Bytes2D, check_width
from hicache.kernels.cuda_driver import Addresses
from hicache.kernels.cuda_planes import CudaPlanes
from hicache.kernels.quantised import check_quantised
from hicache.layout import HostFormat
from hicache.types import PageIndices


class CudaPools:
    """Device planes and a pinned host pool, uint8 (num_pages, page_stride), which the GPU addresses directly.

    Memory that is registered with CUDA has the same address on both sides (unified addressing, on all 64-bit
    systems). It may be registered piece by piece, as long as no page lies in two pieces: a copy engine refuses to go
    over the end of one, so no copy is of more than a page.

    `form` is given for a pool that holds quantised pages. `page_bytes` are those of a host page. Raises ProtocolError
    if the pools do not fit together.
    """

    def __init__(self, planes: CudaPlanes, host: Bytes2D, form: HostFormat | None = None) -> None:
        if form is None:
            check_width(len(planes), planes.plane_bytes, host.shape[1])
        else:
            check_quantised(len(planes), planes.plane_bytes, host.shape[1], form)
        self.form = form
        self.planes = planes
        self.host = host
        self.num_planes = len(planes)
        self.plane_bytes = planes.plane_bytes
        self.page_bytes = form.page_bytes if form else self.num_planes * planes.plane_bytes
        self.page_stride = host.shape[1]
        self.host_address = host.ctypes.data
        self.device = planes.device

    @cached_property
    def vector_bytes(self) -> int:
        """The widest access that every address allows."""
        return gcd(16, self.plane_bytes, self.page_stride, self.host_address, *self.planes.addresses.tolist())


class PageBatch:
    """Pairs of pages: device page i and host page i."""

    def __init__(self, pools: CudaPools, device_pages: PageIndices, host_pages: PageIndices) -> None:
        self.pools = pools
        self.device_pages = device_pages
        self.host_pages = host_pages

    def __len__(self) -> int:
        return len(self.device_pages)

    @cached_property
    def stream(self) -> int:
        """Handle of the stream of this batch: the one that was current at its first use. It takes all work of it."""
        return torch.cuda.current_stream(self.pools.device.index).cuda_stream

    @cached_property
    def on_gpu(self) -> tuple[int, int]:
        """Addresses of both arrays on the GPU. The first use uploads them, on the current stream."""
        pinned = torch.from_numpy(np.stack((self.device_pages, self.host_pages))).pin_memory()
        self._uploaded = pinned.to(self.pools.device, non_blocking=True)
        address = self._uploaded.data_ptr()
        return address, address + self._uploaded.stride(0) * self._uploaded.element_size()

    def host_addresses(self) -> Addresses:
        """Where the host pages begin, (pages,)."""
        offsets: Addresses = self.host_pages.astype(np.uint64) * np.uint64(self.pools.page_stride)
        return offsets + np.uint64(self.pools.host_address)

    def pieces(self, first_plane: int, count: int) -> tuple[Addresses, Addresses]:
        """Where each plane of each page begins on the device and on the host, (pages * count,)."""
        size = np.uint64(self.pools.plane_bytes)
        planes = self.pools.planes.addresses[first_plane : first_plane + count]
        device = planes[np.newaxis] + (self.device_pages.astype(np.uint64) * size)[:, np.newaxis]
        offsets = np.arange(first_plane, first_plane + count, dtype=np.uint64) * size
        return device.ravel(), (self.host_addresses()[:, np.newaxis] + offsets[np.newaxis]).ravel()
