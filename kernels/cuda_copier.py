"""Copies between planes on a GPU and a pinned host pool, on the calling thread's current CUDA stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hicache.errors import ProtocolError
from hicache.kernels.base import Bytes2D, check_planes, checked_pairs
from hicache.kernels.cuda_choice import Choice, measured_choice, paths
from hicache.kernels.cuda_paths import Path, PathName
from hicache.kernels.cuda_planes import CudaPlanes
from hicache.kernels.cuda_pools import CudaPools, PageBatch
from hicache.layout import HostFormat
from hicache.types import PageIndices


@dataclass(frozen=True)
class CudaCopy:
    """A batch and the paths it takes. Both methods enqueue and return."""

    batch: PageBatch
    down: Path
    up: Path

    def gather(self) -> None:
        """See PageCopy."""
        if len(self.batch):
            self.down.gather(self.batch)

    def scatter(self, first_plane: int, count: int) -> None:
        """See PageCopy."""
        check_planes(first_plane, count, self.batch.pools.num_planes)
        if len(self.batch):
            self.up.scatter(self.batch, first_plane, count)


class CudaCopier:
    """See PageCopier. `host` is pinned. With `form`, its pages are quantised.

    `path` "auto" measures all paths now and takes the best for each direction (`choice`). That overwrites host pages,
    so the host pool must not hold anything yet; device pages come through unchanged. Gathers of one copier go on
    one stream, scatters on one, too. Raises ConfigError if a kernel cannot be compiled or memory is short.
    """

    def __init__(
        self,
        planes: CudaPlanes,
        host: Bytes2D,
        path: Literal["auto"] | PathName = "auto",
        form: HostFormat | None = None,
    ) -> None:
        self._pools = pools = CudaPools(planes, host, form)
        if path == "auto":
            self.choice = measured_choice(pools)
        else:
            named = {candidate.name: candidate for candidate in paths(pools)}
            if path not in named:
                raise ProtocolError(f"there is no path {path!r} for quantised pages, use {' or '.join(named)}")
            self.choice = Choice(named[path], named[path], {})

    def copy(self, device_pages: PageIndices, host_pages: PageIndices) -> CudaCopy:
        """See PageCopier."""
        pairs = checked_pairs(device_pages, self._pools.planes.num_pages, host_pages, len(self._pools.host))
        return CudaCopy(PageBatch(self._pools, *pairs), self.choice.down, self.choice.up)
