"""Moves pages between the device pool and the host pool, on one stream for each direction."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from hicache.device_pool import DevicePool
from hicache.errors import ProtocolError
from hicache.host_pool.pool import HostPool
from hicache.kernels.base import PageCopier
from hicache.kernels.dispatch import bind
from hicache.layout import HostFormat
from hicache.storage_backends.codecs import quantiser_of
from hicache.streams import create_stream
from hicache.streams.base import Event, Stream
from hicache.transfer.tickets import CopyTicket, LoadTicket
from hicache.types import PageIndices

AnyCopier = TypeVar("AnyCopier", bound=PageCopier)


class CopyEngine:
    """Copies batches of pages; every call returns at once with a ticket.

    Index arrays are copied when a call is made, so callers may reuse theirs. Pages that are outside a
    pool or do not pair up are the caller's bug and raise ProtocolError at once: on a ticket they would
    look like a copy that failed, and be retried or counted as one. The pages of a batch stay
    allocated until its ticket is complete. After a failure both tickets and streams stay failed until
    `recover`; tickets handed out before it never turn good.
    """

    def __init__(self, form: HostFormat, copier: PageCopier, d2h: Stream, h2d: Stream) -> None:
        """`form`: of the pages in host memory."""
        self._layout = form.layout
        self._page_bytes = form.page_bytes  # that a copy takes to the host or from there
        self._copier: PageCopier | None = copier
        self._d2h = d2h
        self._h2d = h2d

    @classmethod
    def between(cls, device_pool: DevicePool, host_pool: HostPool) -> CopyEngine:
        """An engine with the fastest kernels and streams for two pools that hold nothing yet.

        Loads go first where the device knows priorities: requests wait for them. Memory that is not pinned is copied
        by worker threads. Raises ProtocolError for pools of different layouts, ConfigError if the device's extra is
        missing.
        """
        check_layouts(device_pool, host_pool)
        form = host_pool.format
        device = device_pool.device if host_pool.pinned else "cpu"
        copier = bind(device_pool.planes, host_pool.array, host_pool.pinned, quantiser_of(form))
        return cls(form, copier, create_stream(device, "d2h"), create_stream(device, "h2d", priority=-1))

    def backup(self, device_pages: PageIndices, host_pages: PageIndices, after: Event | None = None) -> CopyTicket:
        """Copy device pages to host pages, as one piece of work; starts when `after` is complete."""
        copy = self._open().copy(device_pages, host_pages)
        if after is not None:
            self._d2h.wait(after)
        self._d2h.submit(copy.gather)
        return CopyTicket(self._d2h.record(), len(host_pages) * self._page_bytes)

    def load_back(self, host_pages: PageIndices, device_pages: PageIndices, after: Event | None = None) -> LoadTicket:
        """Copy host pages to device pages, layer by layer; starts when `after` is complete."""
        copy = self._open().copy(device_pages, host_pages)
        if after is not None:
            self._h2d.wait(after)
        width = self._layout.planes_per_layer
        layers = [partial(copy.scatter, layer * width, width) for layer in range(self._layout.num_layers)]
        return LoadTicket(self._h2d.submit_all(layers), len(host_pages) * self._page_bytes)

    def wrap_copier(self, wrap: Callable[[PageCopier], AnyCopier]) -> AnyCopier:
        """Let copies from now on go through what `wrap` makes of the copier in use: to inject faults, to count."""
        self._copier = copier = wrap(self._open())
        return copier

    def recover(self) -> None:
        """Let copies submitted from now on run again after a failure."""
        self._d2h.clear_error()
        self._h2d.clear_error()

    def close(self) -> None:
        """Finish what was submitted, stop both streams and let go of the pools. Idempotent."""
        self._d2h.close()
        self._h2d.close()
        self._copier = None

    def _open(self) -> PageCopier:
        if self._copier is None:
            raise ProtocolError("the copy engine is closed")
        return self._copier


def check_layouts(device_pool: DevicePool, host_pool: HostPool) -> None:
    """Raise ProtocolError if the pools' pages are of different layouts."""
    if device_pool.layout != host_pool.format.layout:
        raise ProtocolError("the device pool and the host pool have different layouts")
