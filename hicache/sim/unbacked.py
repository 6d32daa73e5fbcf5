"""Pools that own pages and hold no bytes, and copies between them that take modelled time.

Allocators, tree, ledger and engines above them are those of the product: only the bytes are missing.
"""

from __future__ import annotations

from hicache.costs import Costs
from hicache.device_pool import DevicePool
from hicache.host_pool.pool import ArenaStartup, HostPool
from hicache.kernels.base import PageCopier, PageCopy
from hicache.layout import HostFormat, KVLayout
from hicache.pages import PageAllocator
from hicache.sim.virtual import VirtualStream
from hicache.types import PageIndices


class UnbackedDevicePool(DevicePool):
    """A device pool of `num_pages` pages without tensors: `k`, `v`, `planes` and `access` are not there."""

    def __init__(self, layout: KVLayout, num_pages: int) -> None:  # not the parent's: it allocates
        self.layout = layout
        self.num_pages = num_pages
        self.device = "cpu"
        self.nbytes = 0

    def poison(self, pages: PageIndices) -> None:
        """Nothing to overwrite."""


class UnbackedHostPool(HostPool):
    """A host pool of `num_pages` pages that are all the same one: right in length, and nothing to rely on."""

    def __init__(self, form: HostFormat, num_pages: int) -> None:  # not the parent's: it allocates
        self.format = form
        self.page_stride = form.page_stride
        self.num_pages = num_pages
        self.nbytes = 0
        self.pinned = False
        self.pages_per_registration = max(1, num_pages)
        self.allocator = PageAllocator(num_pages)
        self.startup = ArenaStartup(0.0, 0.0, 0, False, None)
        self._page = memoryview(bytearray(form.page_stride))

    def page(self, index: int) -> memoryview:
        """Scratch memory of the length of a page, shared by all pages."""
        return self._page

    def poison(self, pages: PageIndices) -> None:
        """Nothing to overwrite."""

    def close(self) -> None:
        """Nothing to give back."""


class TimedCopier:
    """Copies that take the time of `costs` on the streams that they run on; `inner` moves bytes, None moves none."""

    def __init__(
        self, form: HostFormat, costs: Costs, d2h: VirtualStream, h2d: VirtualStream, inner: PageCopier | None = None
    ) -> None:
        self.num_planes = form.layout.num_planes
        self.page_bytes = form.page_bytes
        self.costs = costs
        self.d2h = d2h
        self.h2d = h2d
        self._inner = inner

    def copy(self, device_pages: PageIndices, host_pages: PageIndices) -> PageCopy:
        inner = self._inner.copy(device_pages, host_pages) if self._inner is not None else None
        return _TimedCopy(self, len(device_pages), inner)


class _TimedCopy:
    def __init__(self, copier: TimedCopier, num_pages: int, inner: PageCopy | None) -> None:
        self._copier = copier
        self._num_pages = num_pages
        self._inner = inner

    def gather(self) -> None:
        if self._inner is not None:
            self._inner.gather()
        nbytes = self._num_pages * self._copier.page_bytes
        self._copier.d2h.spend(self._copier.costs.to_host.seconds(nbytes))

    def scatter(self, first_plane: int, count: int) -> None:
        if self._inner is not None:
            self._inner.scatter(first_plane, count)
        link = self._copier.costs.to_device
        nbytes = self._num_pages * self._copier.page_bytes * count / self._copier.num_planes
        seconds = nbytes / link.bytes_per_second
        self._copier.h2d.spend(seconds + (0.0 if first_plane else link.latency))
