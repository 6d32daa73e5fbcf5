"""Moves pages between the device pool and the host pool, on one stream for each direction."""

from __future__ import annotations

from functools import partial

import numpy as np

from hicache.device_pool import DevicePool
from hicache.errors import ProtocolError
from hicache.host_pool.pool import HostPool
from hicache.kernels.dispatch import CopyKernels
from hicache.kernels.reference import check_pages
from hicache.streams.base import Event, Stream
from hicache.transfer.tickets import CopyTicket, LoadTicket
from hicache.types import PageIndices


class CopyEngine:
    """Copies batches of pages; every call returns at once with a ticket.

    Index arrays are copied when a call is made, so callers may reuse theirs. Pages that are outside a
    pool or do not pair up are the caller's bug and raise ProtocolError at once: on a ticket they would
    look like a copy that failed, and be retried or counted as one. The pages of a batch stay
    allocated until its ticket is complete. After a failure both tickets and streams stay failed until
    `recover`; tickets handed out before it never turn good.
    """

    def __init__(
        self, device_pool: DevicePool, host_pool: HostPool, d2h: Stream, h2d: Stream, kernels: CopyKernels
    ) -> None:
        if device_pool.layout != host_pool.layout:
            raise ProtocolError("the device pool and the host pool have different layouts")
        self._device_pool = device_pool
        self._host_pool = host_pool
        self._d2h = d2h
        self._h2d = h2d
        self._kernels = kernels
        self._layout = device_pool.layout

    def backup(self, device_pages: PageIndices, host_pages: PageIndices, after: Event | None = None) -> CopyTicket:
        """Copy device pages to host pages, as one piece of work; starts when `after` is complete."""
        device_pages, host_pages = self._snapshot(device_pages, host_pages)
        if after is not None:
            self._d2h.wait(after)
        self._d2h.submit(
            partial(self._kernels.gather, self._device_pool.planes, device_pages, self._host_pool.array, host_pages)
        )
        return CopyTicket(self._d2h.record(), len(host_pages) * self._layout.page_bytes)

    def load_back(self, host_pages: PageIndices, device_pages: PageIndices, after: Event | None = None) -> LoadTicket:
        """Copy host pages to device pages, layer by layer; starts when `after` is complete."""
        device_pages, host_pages = self._snapshot(device_pages, host_pages)
        if after is not None:
            self._h2d.wait(after)
        events = [self._load_layer(layer, host_pages, device_pages) for layer in range(self._layout.num_layers)]
        return LoadTicket(events, len(host_pages) * self._layout.page_bytes)

    def _load_layer(self, layer: int, host_pages: PageIndices, device_pages: PageIndices) -> Event:
        width = self._layout.planes_per_layer
        first = layer * width
        planes = self._device_pool.planes[first : first + width]
        self._h2d.submit(partial(self._kernels.scatter, planes, device_pages, self._host_pool.array, host_pages, first))
        return self._h2d.record()

    def _snapshot(self, device_pages: PageIndices, host_pages: PageIndices) -> tuple[PageIndices, PageIndices]:
        if len(device_pages) != len(host_pages):
            raise ProtocolError(f"{len(device_pages)} device pages are paired with {len(host_pages)} host pages")
        check_pages("device", device_pages, self._device_pool.num_pages)
        check_pages("host", host_pages, self._host_pool.num_pages)
        return np.array(device_pages, np.int32), np.array(host_pages, np.int32)

    def recover(self) -> None:
        """Let copies submitted from now on run again after a failure."""
        self._d2h.clear_error()
        self._h2d.clear_error()

    def close(self) -> None:
        """Finish what was submitted and stop both streams. Idempotent."""
        self._d2h.close()
        self._h2d.close()
