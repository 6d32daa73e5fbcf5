from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable

import pytest


@pytest.fixture
def is_mapped() -> Callable[[int], bool]:
    """Whether anything is mapped at an address. Not by /proc/self/maps, which shows neighbours as one mapping."""

    def ask(address: int) -> bool:
        gc.collect()
        seen = ctypes.c_ubyte()
        libc = ctypes.CDLL(None)
        return bool(libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), ctypes.byref(seen)) == 0)

    return ask
