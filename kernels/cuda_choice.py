"""Which path pages take, by measurement on the pools themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hicache.kernels.cuda_paths import CopyKernels, DirectPath, KernelPath, Path, StagedPath
from hicache.kernels.cuda_pools import CudaPools, PageBatch
from hicache.kernels.cuda_quantised import QuantiseKernels
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
    *direct, staged, kernel = paths(pools)
    by_plane = direct if pools.plane_bytes >= DIRECT_BYTES else []
    stream = create_stream(str(pools.device), "choice")

    def speeds(tried: Sequence[Path], work: Callable[[Path], None]) -> dict[Path, float]:
        return {path: nbytes / _seconds(stream, partial(work, path)) / 1e9 for path in tried}

    # First down, so that what comes up is what the device pages held. Each list begins with what costs the others
    # least: `direct` takes time of the calling thread for every plane, and multiprocessors that write to host memory
    # hold up all others, which reading does not.
    down = speeds([staged, *by_plane, kernel], lambda path: path.gather(batch))
    if pools.form is not None:  # there is one way up, and it would change the device pages
        return Choice(_best(down), kernel, _named("down", down))
    up = speeds([kernel, *by_plane], lambda path: _scatter_all(path, batch))
    return Choice(_best(down), _best(up), _named("down", down) | _named("up", up))


def paths(pools: CudaPools) -> tuple[Path, ...]:
    """All paths: direct, staged, kernel. For pages that are quantised on the way: staged, kernel."""
    kernels = CopyKernels(pools) if pools.form is None else QuantiseKernels(pools, pools.form)
    by_kernels = StagedPath(pools, kernels), KernelPath(pools, kernels)
    return by_kernels if pools.form is not None else (DirectPath(pools), *by_kernels)


def _named(direction: str, speeds: Mapping[Path, float]) -> dict[str, float]:
    return {f"{direction} {path.name}": speed for path, speed in speeds.items()}


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
