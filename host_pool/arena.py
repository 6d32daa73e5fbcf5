"""Page-aligned anonymous memory: huge pages, NUMA placement, and pages that are there before they are used."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache.errors import CapacityError, ConfigError
from hicache.host_pool.numa import bind_to_node
from hicache.layout import round_up

HUGE_PAGE = 2 << 20
"""Bytes of a transparent huge page on x86-64 and on arm64 with 4 KiB pages."""

_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
_PREFAULT_BYTES = 256 << 20
_MAX_PREFAULT_THREADS = 16  # by then the kernel clears pages as fast as the memory takes them

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Placement:
    """Where and how the kernel is to place an arena: in transparent huge pages, on a NUMA node (None: anywhere).

    `populate`: all of it is there from the start; else memory comes page by page, with the first write to each.
    """

    huge_pages: bool = False
    numa_node: int | None = None
    populate: bool = False


ANYWHERE = Placement()


def allocate_aligned(nbytes: int, placement: Placement = ANYWHERE, fork: bool = True) -> npt.NDArray[np.uint8]:
    """Zeroed bytes, 1-D, that start with a page of the kernel (a multiple of HOST_ALIGNMENT), or a huge page.

    Private to this process and unmapped when the last view of it is gone, so a view that outlives its pool never
    points at foreign memory. A fork gets a copy of its own, with `fork` False it gets no such memory at all.

    Raises CapacityError if the kernel has no room, ConfigError if it refuses the placement.
    """
    if not nbytes:
        return np.empty(0, np.uint8)
    size = round_up(nbytes, mmap.PAGESIZE)
    arena = _map(size + HUGE_PAGE if placement.huge_pages else size)
    start = _address(arena)
    offset = round_up(start, HUGE_PAGE) - start if placement.huge_pages else 0
    if placement.huge_pages:
        _request_huge_pages(arena, offset, size)
    if placement.numa_node is not None:
        bind_to_node(start + offset, size, placement.numa_node)
    if not fork:
        arena.madvise(mmap.MADV_DONTFORK, offset, size)
    return np.frombuffer(arena, np.uint8, nbytes, offset)


def huge_page_problem() -> str | None:
    """Why this machine gives no transparent huge pages, None if it does or does not tell."""
    try:
        if "[never]" not in _THP.read_text():
            return None
    except OSError:
        return None
    return f"transparent huge pages are off: set {_THP} to madvise, or use huge_pages: false"


def prefault(array: npt.NDArray[np.uint8]) -> None:
    """Have every page of a fresh arena present. Several threads: the kernel clears about 1-3 GB/s in each.

    Raises CapacityError if the kernel runs out of memory.
    """
    spans = range(0, array.nbytes, _PREFAULT_BYTES)
    threads = min(len(os.sched_getaffinity(0)), _MAX_PREFAULT_THREADS, len(spans))
    if threads > 1:
        with ThreadPoolExecutor(threads, "prefault") as pool:
            list(pool.map(lambda start: _populate(array[start : start + _PREFAULT_BYTES]), spans))
    elif threads:
        _populate(array)


def _map(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise CapacityError(f"{size} bytes of host memory cannot be mapped: {error}: choose a smaller size") from error


def _address(arena: mmap.mmap) -> int:
    return np.frombuffer(arena, np.uint8).ctypes.data


def _request_huge_pages(arena: mmap.mmap, offset: int, size: int) -> None:
    if problem := huge_page_problem():
        raise ConfigError(problem)
    try:
        arena.madvise(mmap.MADV_HUGEPAGE, offset, size)
    except OSError as error:
        raise ConfigError(f"the kernel refuses huge pages ({error.strerror}), use huge_pages: false") from error


def _populate(array: npt.NDArray[np.uint8]) -> None:
    """Make the pages of `array` present and writable. Both ways run without the GIL."""
    code = _madvise(array.ctypes.data, array.nbytes, _MADV_POPULATE_WRITE)
    if code == errno.EINVAL:  # an older kernel
        array[:: mmap.PAGESIZE] = 0
    elif code:
        raise CapacityError(f"{array.nbytes} bytes of host memory are not to be had: {os.strerror(code)}")


def _madvise(address: int, nbytes: int, advice: int) -> int:
    """0 or an errno."""
    failed = _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(advice))
    return ctypes.get_errno() if failed else 0
