"""The interface of the copy kernels and the choice of one by device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hicache.errors import ConfigError
from hicache.kernels.cpu import CpuKernels
from hicache.kernels.reference import Bytes2D
from hicache.types import PageIndices


class CopyKernels(Protocol):
    """Copies pages between layer-first device planes and the page-first host pool.

    `planes` are uint8 (num_device_pages, plane_bytes), `host` is uint8 (num_host_pages, page_stride).
    Page `device_pages[i]` is paired with `host_pages[i]`; the pages that are written are all different.
    Bounds are checked before anything is written: ProtocolError.
    """

    def gather(
        self, planes: Sequence[Bytes2D], device_pages: PageIndices, host: Bytes2D, host_pages: PageIndices
    ) -> None:
        """Device to host: `planes` are all planes of the layout, in order."""
        ...

    def scatter(
        self,
        planes: Sequence[Bytes2D],
        device_pages: PageIndices,
        host: Bytes2D,
        host_pages: PageIndices,
        first_plane: int,
    ) -> None:
        """Host to device: `planes` are some consecutive planes, `first_plane` is the number of the first in a page."""
        ...


def select_kernels(device: str) -> CopyKernels:
    """The fastest kernels for `device`. Raises ConfigError if this build has none."""
    if device == "cpu":
        return _fastest_cpu_kernels()
    raise ConfigError(f"device {device!r}: this build has CPU copy kernels only, use device: cpu")


def _fastest_cpu_kernels() -> CopyKernels:
    try:  # here, not above: numba is an optional extra and slow to import
        from hicache.kernels.compiled import CompiledKernels
    except ImportError:
        return CpuKernels()
    return CompiledKernels()
