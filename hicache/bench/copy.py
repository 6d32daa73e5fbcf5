"""Speed of the CPU copy kernels, as a ratio to one contiguous memcpy of the same bytes in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hicache.kernels.base import Bytes2D
from hicache.kernels.cpu import CpuCopier
from hicache.layout import HOST_ALIGNMENT, round_up
from hicache.types import PageIndices

PLANE_BYTES = (64, 1 << 10, 4 << 10, 64 << 10, 1 << 20)
NUM_PLANES = 4
MAX_PAGES = 4096


@dataclass(frozen=True)
class _Pools:
    planes: list[Bytes2D]
    host: Bytes2D
    batch: int  # pages in one copy; the pools are twice as large


def run(quick: bool = False) -> dict[str, Any]:
    """Gather and scatter for each plane size, random and contiguous pages.

    Each result has plane_bytes, pages, num_pages, memcpy_gb_s, and gather and scatter as ratios to
    memcpy (1.0 = as fast). `quick` moves fewer bytes, fewer times.
    """
    total, repeats = (8 << 20, 2) if quick else (128 << 20, 5)
    results = [row for plane_bytes in PLANE_BYTES for row in _measure(plane_bytes, total, repeats)]
    return {"planes": NUM_PLANES, "results": results}


def _measure(plane_bytes: int, total: int, repeats: int) -> list[dict[str, Any]]:
    pools = _make_pools(plane_bytes, total)
    moved = pools.batch * NUM_PLANES * plane_bytes
    memcpy = _memcpy_seconds(moved, repeats)
    rows = []
    for name in ("random", "contiguous"):
        gather, scatter = _kernel_seconds(pools, name, repeats)
        row = {"plane_bytes": plane_bytes, "pages": name, "num_pages": pools.batch, "memcpy_gb_s": moved / memcpy / 1e9}
        rows.append({**row, "gather": memcpy / gather, "scatter": memcpy / scatter})
    return rows


def _make_pools(plane_bytes: int, total: int) -> _Pools:
    batch = max(1, min(MAX_PAGES, total // (plane_bytes * NUM_PLANES)))
    stride = round_up(plane_bytes * NUM_PLANES, HOST_ALIGNMENT)
    # Ones, not zeros: pages never written all share one page of zeros, which would flatter the reads.
    planes = [np.ones((2 * batch, plane_bytes), np.uint8) for _ in range(NUM_PLANES)]
    return _Pools(planes, np.ones((2 * batch, stride), np.uint8), batch)


def _kernel_seconds(pools: _Pools, name: str, repeats: int) -> tuple[float, float]:
    random = np.random.default_rng(0)
    device_pages, host_pages = (_pages(name, pools.batch, random) for _ in range(2))
    copier = CpuCopier(pools.planes, pools.host)
    # A copy of its own each time: working out its runs is part of the price.
    return (
        _best_seconds(lambda: copier.copy(device_pages, host_pages).gather(), repeats),
        _best_seconds(lambda: copier.copy(device_pages, host_pages).scatter(0, NUM_PLANES), repeats),
    )


def _pages(name: str, batch: int, random: np.random.Generator) -> PageIndices:
    pages = random.permutation(2 * batch) if name == "random" else np.arange(2 * batch)
    return pages[:batch].astype(np.int32)


def _memcpy_seconds(nbytes: int, repeats: int) -> float:
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    return _best_seconds(partial(np.copyto, target, source), repeats)


def _best_seconds(work: Callable[[], object], repeats: int) -> float:
    """The best of `repeats` runs after one to warm up: the others were disturbed."""
    work()
    return min(_seconds(work) for _ in range(repeats))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
