"""Page-aligned anonymous memory."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from hicache.layout import HOST_ALIGNMENT, round_up


def allocate_aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes, 1-D, that start at a multiple of HOST_ALIGNMENT.

    Private to this process (a fork gets its own copy) and unmapped when the last view of it is gone,
    so a view that outlives its pool never points at foreign memory.
    """
    if not nbytes:
        return np.empty(0, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    arena = mmap.mmap(-1, round_up(nbytes, HOST_ALIGNMENT), flags=flags)
    return np.frombuffer(arena, np.uint8, nbytes)
