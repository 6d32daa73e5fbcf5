"""The choice of copy kernels by where the planes lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from hicache.kernels.base import Bytes2D, PageCopier
from hicache.kernels.cpu import CpuCopier
from hicache.kernels.cuda_bounce import BouncingCopier
from hicache.kernels.cuda_copier import CudaCopier
from hicache.kernels.cuda_planes import CudaPlanes
from hicache.kernels.quantised import QuantisedCopier, Quantiser

Planes: TypeAlias = Sequence[Bytes2D] | CudaPlanes
"""All planes of a device pool, in the order of the layout."""


def bind(planes: Planes, host: Bytes2D, pinned: bool = False, quantiser: Quantiser | None = None) -> PageCopier:
    """The fastest copier between these pools. They must not hold anything yet: see CudaCopier.

    `host` is uint8 (num_host_pages, page_stride); with a `quantiser` it holds pages of its format. For planes on a
    GPU, `pinned` says that it is: copies of memory that is not block the calling thread. Raises ProtocolError for
    pools that do not fit together, ConfigError if CuPy is missing.
    """
    if not isinstance(planes, CudaPlanes):
        return QuantisedCopier(planes, host, quantiser) if quantiser else _fastest_cpu_copier(planes, host)
    form = quantiser.format if quantiser else None
    return CudaCopier(planes, host, form=form) if pinned else BouncingCopier(planes, host, form)


def _fastest_cpu_copier(planes: Sequence[Bytes2D], host: Bytes2D) -> PageCopier:
    try:  # here, not above: numba is an optional extra and slow to import
        from hicache.kernels.compiled import CompiledCopier
    except ImportError:
        return CpuCopier(planes, host)
    return CompiledCopier(planes, host)
