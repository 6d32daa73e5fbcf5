"""Which path pages take, by measurement on the pools themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hicache.kernels.cuda_paths import DirectPath, KernelPath, Path, StagedPath
from hicache.kernels.cuda_pools import CudaPools, PageBatch
from hicache.streams import Stream, create_stream
from hicache.types import PageIndices

MEASURED_BYTES = 64 << 20
"""Of each copy that is measured; a millisecond or two on PCIe 4 and 5."""

REPEATS = 3

GOOD_ENOUGH = 0.9
"""Of the fastest path's speed: then one that costs less elsewhere is taken instead."""

DIRECT_BYTES = 16 << 10
"""Smaller planes are not worth trying by themselves: a copy engine takes a microsecond for each, at best."""

_LAYER_PLANES = 2

_EVENT: Callable[..., torch.cuda.Event] = torch.cuda.Event  # its constructor has no types


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
    by_plane = [direct] if pools.plane_bytes >= DIRECT_BYTES else []
    stream = create_stream(str(pools.device), "choice")

    def speeds(tried: Sequence[Path], work: Callable[[Path], None]) -> dict[Path, float]:
        return {path: nbytes / _seconds(stream, partial(work, path)) / 1e9 for path in tried}

    # First down, so that what comes up is what the device pages held. Each list begins with what costs the others
    # least: `direct` takes time of the calling thread for every plane, and multiprocessors that write to host memory
    # hold up all others, which reading does not.
    down = speeds([staged, *by_plane, kernel], lambda path: path.gather(batch))
    up = speeds([kernel, *by_plane], lambda path: _scatter_all(path, batch))
    measured = {f"down {path.name}": speed for path, speed in down.items()}
    return Choice(_best(down), _best(up), measured | {f"up {path.name}": speed for path, speed in up.items()})


def paths(pools: CudaPools) -> tuple[Path, Path, Path]:
    """All paths: direct, staged, kernel."""
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
    """The best of some runs, after one to warm up; launching is part of the price."""
    return min([_run(stream, work) for _ in range(REPEATS + 1)][1:])


def _run(stream: Stream, work: Callable[[], None]) -> float:
    start, end = _EVENT(enable_timing=True), _EVENT(enable_timing=True)

    def timed() -> None:
        start.record()
        work()
        end.record()

    stream.submit(timed)
    stream.synchronize()
    return max(float(start.elapsed_time(end)), 1e-3) / 1e3
