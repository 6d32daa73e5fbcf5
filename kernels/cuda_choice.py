"""Which path pages take, by measurement on the pools themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from hicache.kernels.cuda_paths import DirectPath, KernelPath, Path, StagedPath
from hicache.kernels.cuda_pools import CudaPools, PageBatch
from hicache.streams import Stream, create_stream
from hicache.types import PageIndices

MEASURED_BYTES = 64 << 20
"""Of each copy that is measured; a millisecond or two on PCIe 4 and 5."""

REPEATS = 3

_LAYER_PLANES = 2

GOOD_ENOUGH = 0.9
"""Of the fastest path's speed: then a path that keeps fewer multiprocessors busy is taken instead."""


@dataclass(frozen=True)
class Choice:
    """Paths from the device to the host and back. `gb_per_second` has what was measured, as "down kernel": 51.0."""

    down: Path
    up: Path
    gb_per_second: Mapping[str, float]


def measured_choice(pools: CudaPools) -> Choice:
    """Measure each path in each direction. Overwrites host pages; device pages keep what they hold."""
    batch = _batch(pools)
    nbytes = len(batch) * pools.page_bytes
    direct, staged, kernel = paths(pools)
    stream = create_stream(str(pools.device), "choice")
    # First down, so that what comes up is what the device pages held.
    down = {path: nbytes / _seconds(stream, partial(path.gather, batch)) / 1e9 for path in (direct, staged, kernel)}
    up = {path: nbytes / _seconds(stream, partial(_scatter_all, path, batch)) / 1e9 for path in (direct, kernel)}
    measured = {f"down {path.name}": speed for path, speed in down.items()}
    return Choice(_best(down), _best(up), measured | {f"up {path.name}": speed for path, speed in up.items()})


def paths(pools: CudaPools) -> tuple[Path, Path, Path]:
    """All paths, first those that keep the fewest multiprocessors busy."""
    return DirectPath(pools), StagedPath(pools), KernelPath(pools)


def _best(speeds: Mapping[Path, float]) -> Path:
    """The first, in their order, that is about as fast as the fastest."""
    fastest = max(speeds.values())
    return next(path for path, speed in speeds.items() if speed >= GOOD_ENOUGH * fastest)


def _batch(pools: CudaPools) -> PageBatch:
    """Pages spread over both pools: neighbours would measure what a running cache does not have."""
    most = max(1, MEASURED_BYTES // pools.page_bytes)
    count = min(most, pools.planes.num_pages, len(pools.host))
    return PageBatch(pools, _spread(count, pools.planes.num_pages), _spread(count, len(pools.host)))


def _spread(count: int, num_pages: int) -> PageIndices:
    random = np.random.default_rng(0)
    return (np.arange(count) * (num_pages // max(count, 1)))[random.permutation(count)].astype(np.int32)


def _scatter_all(path: Path, batch: PageBatch) -> None:
    """A few planes at a time, as layers have them."""
    total = batch.pools.num_planes
    for first in range(0, total, _LAYER_PLANES):
        path.scatter(batch, first, min(_LAYER_PLANES, total - first))


def _seconds(stream: Stream, work: Callable[[], None]) -> float:
    """The best of some runs, after one to warm up. On the CPU's clock: launching is part of the price."""
    _run(stream, work)
    return min(_run(stream, work) for _ in range(REPEATS))


def _run(stream: Stream, work: Callable[[], None]) -> float:
    start = time.perf_counter()
    stream.submit(work)
    stream.synchronize()
    return time.perf_counter() - start
