"""The kernels of quantise.cu for one pair of pools: they quantise pages on the way to host memory, and back."""

from __future__ import annotations

from math import gcd

import torch

from hicache.kernels.cuda_paths import Target, gather_arguments, scatter_arguments
from hicache.kernels.cuda_pools import CudaPools, PageBatch
from hicache.kernels.cuda_source import kernel
from hicache.layout import HostFormat, round_up

THREADS = 512
"""At most; a block takes one plane of a page at a time, and small planes have no work for so many."""

_IN_FLIGHT_BYTES = 256 << 10
"""What has to be under way to fill PCIe 5: 60 GB/s for 2 µs, twice, since a block waits for the scale of a plane before
its codes."""

_MANY = 2
"""Blocks for each multiprocessor that gather into device memory."""

_WARP = 32


class QuantiseKernels:
    """See PageKernels. Host pages are those of `form`, byte for byte."""

    def __init__(self, pools: CudaPools, form: HostFormat) -> None:
        index, width = pools.device.index, _vector_bytes(pools, form)
        macros = (
            ("DTYPE", f"DTYPE_{form.layout.dtype}"),
            ("FORMAT", f"FORMAT_{form.codec}"),
            ("PLANE_BYTES", pools.plane_bytes),
            ("PAGE_STRIDE", pools.page_stride),
            ("CODES_OFFSET", form.codes_offset),
            ("VECTOR_BYTES", width),
            ("MAX_THREADS", THREADS),
        )
        self._gather = kernel("quantise.cu", "gather_quantised", index, macros)
        self._scatter = kernel("quantise.cu", "scatter_quantised", index, macros)
        processors = torch.cuda.get_device_properties(pools.device).multi_processor_count
        self._threads = min(THREADS, round_up(-(-form.plane_values // width), _WARP))
        under_way = min(self._threads * width, form.plane_values)
        self.few = min(processors, -(-_IN_FLIGHT_BYTES // under_way))
        self.many = _MANY * processors

    def gather(self, batch: PageBatch, start: int, count: int, target: Target, blocks: int) -> None:
        """See PageKernels."""
        arguments = gather_arguments(batch, start, count, target)
        self._gather.launch(min(blocks, count * batch.pools.num_planes), self._threads, arguments, batch.stream)

    def scatter(self, batch: PageBatch, first_plane: int, count: int) -> None:
        """See PageKernels."""
        if not count:
            return
        arguments = scatter_arguments(batch, first_plane, count, first_plane)
        self._scatter.launch(min(self.few, len(batch) * count), self._threads, arguments, batch.stream)


def _vector_bytes(pools: CudaPools, form: HostFormat) -> int:
    """Codes that a thread takes at once: as many as the addresses of both sides allow."""
    width = gcd(16, form.codes_offset, form.plane_values, pools.page_stride, pools.host_address)
    value_bytes = pools.plane_bytes // form.plane_values
    address = gcd(16, *pools.planes.addresses.tolist())
    while min(width * value_bytes, 16) > address:  # the values of a thread are loaded 16 bytes at a time
        width //= 2
    return width
