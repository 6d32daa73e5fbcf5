"""Speed of the CUDA copy paths, as a ratio to one large cudaMemcpyAsync in the same direction from or to the same
pinned memory, in the same run.

Times are those of CUDA events around all calls of a copy, launches included. After each path has been measured, pages
go from the device to the host and to other pages of the device, and have to be the same there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Literal

import numpy as np
import torch

from hicache.bench.progress import Progress
from hicache.device_pool import DevicePool, resolve_device
from hicache.errors import IntegrityError
from hicache.host_pool.pinning import CudaRegistrar
from hicache.host_pool.pool import HostPool
from hicache.kernels.cuda_copier import CudaCopier, CudaCopy
from hicache.kernels.cuda_planes import CudaPlanes
from hicache.layout import KVLayout
from hicache.storage_backends.codecs import create_quantiser
from hicache.types import PageIndices

LAYERS = 16
PLANE_BYTES = tuple(kib << 10 for kib in (1, 2, 4, 16, 32, 64, 256))
MOVED_BYTES = 256 << 20
REPEATS, ENOUGH_SECONDS = 5, 0.5
"""A copy is measured so often, or until all its runs have taken so long."""

LARGE_TARGET, LARGE_BYTES = 0.9, 32 << 10
SMALL_TARGET, SMALL_BYTES = 0.7, 4 << 10
"""Ratios aimed at, and from how many bytes a page and layer on: K and V plane together."""

PathName = Literal["auto", "kernel", "direct", "staged"]
PATHS: tuple[PathName, ...] = ("kernel", "staged", "direct", "auto")
CODEC = "fp8"
QUANTISED_PATHS: tuple[PathName, ...] = ("kernel", "staged")

_STREAM: Callable[..., torch.cuda.Stream] = torch.cuda.Stream  # their constructors have no types
_EVENT: Callable[..., torch.cuda.Event] = torch.cuda.Event

_TOKEN = (4, 128)
"""Heads and their length: 1 KiB a token and plane."""


@dataclass(frozen=True)
class _Pools:
    device: DevicePool
    planes: CudaPlanes
    host: HostPool
    stream: torch.cuda.Stream
    batch: int  # pages in one copy; the pools are twice as large

    @property
    def moved(self) -> int:
        """Bytes of a copy in host memory."""
        return self.batch * self.host.format.page_bytes


def run(device: str = "cuda", moved: int = MOVED_BYTES, progress: Progress = lambda what: None) -> dict[str, Any]:
    """{layers, moved_bytes, results: [{plane_bytes, layer_bytes, page_bytes, pages, path, chose, memcpy_down_gb_s,
    memcpy_up_gb_s, gather_gb_s, gather, scatter_gb_s, scatter, by_layer_gb_s, by_layer, target, met}]}.

    `gather`, `scatter` and `by_layer` are ratios to memcpy: down of all planes, up of all planes in one call, up with
    one call for each layer. The path staged has only the first, since it goes up by the kernel. `pages` are random or
    contiguous; the targets are for random ones on the path "auto", what it takes is in `chose`. The paths "fp8 kernel"
    and "fp8 staged" quantise: their speeds are of the bytes in host memory, half of those on the device. Raises
    IntegrityError for wrong bytes.
    """
    results: list[dict[str, Any]] = []
    for plane_bytes in PLANE_BYTES:
        progress(f"{plane_bytes >> 10} KiB a plane")
        with _pools(resolve_device(device), plane_bytes, moved) as pools:
            results += _measure(pools)
    return {"layers": LAYERS, "moved_bytes": moved, "results": results}


@contextmanager
def _pools(device: str, plane_bytes: int, moved: int) -> Iterator[_Pools]:
    heads, length = _TOKEN
    layout = KVLayout(LAYERS, heads, length, plane_bytes // (heads * length * 2), "bfloat16")
    batch = max(1, moved // layout.page_bytes)
    pool = DevicePool(layout, 2 * batch, device)
    host = HostPool(layout, 2 * batch, pinned=True, registrar=CudaRegistrar(device))
    planes = pool.planes
    assert isinstance(planes, CudaPlanes)
    try:
        for tensor in planes.tensors:
            tensor.random_(0, 256)
        torch.cuda.current_stream(planes.device).synchronize()  # the copies go on another stream
        yield _Pools(pool, planes, host, _STREAM(planes.device), batch)
    finally:
        host.close()


def _measure(pools: _Pools) -> Iterator[dict[str, Any]]:
    memcpy = _memcpy(pools)
    for path in PATHS:
        with torch.cuda.stream(pools.stream):
            copier = CudaCopier(pools.planes, pools.host.array, path)
        chosen = (copier.choice.down.name, copier.choice.up.name)
        for name in ("random", "contiguous"):
            with torch.cuda.stream(pools.stream):
                speeds = _speeds(pools, copier, name, path != "staged")
                _check(pools, copier, name)
            yield _row(pools, path, chosen, name, memcpy, speeds)
    yield from _measure_quantised(pools, memcpy)


def _measure_quantised(plain: _Pools, memcpy: tuple[float, float]) -> Iterator[dict[str, Any]]:
    """Random pages only."""
    layout, registrar = plain.device.layout, CudaRegistrar(plain.device.device)
    host = HostPool(layout, 2 * plain.batch, pinned=True, registrar=registrar, codec=CODEC)
    pools = replace(plain, host=host)
    try:
        for path in QUANTISED_PATHS:
            with torch.cuda.stream(pools.stream):
                copier = CudaCopier(pools.planes, host.array, path, host.format)
                speeds = _speeds(pools, copier, "random", path != "staged")
                _check_quantised(pools, copier)
            yield _row(pools, f"{CODEC} {path}", (path, path), "random", memcpy, speeds)
    finally:
        host.close()


def _row(
    pools: _Pools,
    path: str,
    chosen: tuple[str, str],
    pages: str,
    memcpy: tuple[float, float],
    speeds: dict[str, float],
) -> dict[str, Any]:
    layout = pools.device.layout
    down, up = memcpy
    layer_bytes = layout.planes_per_layer * layout.plane_bytes
    ratios = {name: speed / (down if name == "gather" else up) for name, speed in speeds.items()}
    target = next((aim for aim, size in _TARGETS if layer_bytes >= size), None)
    aimed = path == "auto" and pages == "random" and target is not None
    return {
        "plane_bytes": layout.plane_bytes,
        "layer_bytes": layer_bytes,
        "page_bytes": layout.page_bytes,
        "pages": pages,
        "path": path,
        "chose": f"down {chosen[0]}, up {chosen[1]}" if path == "auto" else None,
        "memcpy_down_gb_s": down,
        "memcpy_up_gb_s": up,
        **{f"{name}_gb_s": speed for name, speed in speeds.items()},
        **ratios,
        "target": target if aimed else None,
        "met": min(ratios.values()) >= target if aimed and target is not None else None,
    }


_TARGETS = ((LARGE_TARGET, LARGE_BYTES), (SMALL_TARGET, SMALL_BYTES))


def _memcpy(pools: _Pools) -> tuple[float, float]:
    """GB/s down and up of one copy, as large as a registration of the host pool allows."""
    nbytes = min(pools.moved, pools.host.pages_per_registration * pools.host.page_stride)
    host = torch.from_numpy(pools.host.array.reshape(-1)[:nbytes])
    device = torch.empty(nbytes, dtype=torch.uint8, device=pools.planes.device)
    with torch.cuda.stream(pools.stream):
        down, up = (
            nbytes / _seconds(partial(target.copy_, source, non_blocking=True)) / 1e9
            for target, source in ((host, device), (device, host))
        )
    return down, up


def _speeds(pools: _Pools, copier: CudaCopier, name: str, both: bool) -> dict[str, float]:
    """GB/s of each copy on the current stream."""
    copy = copier.copy(*(_pages(name, pools.batch, seed)[0] for seed in (0, 1)))
    width = pools.device.layout.planes_per_layer
    work: dict[str, Callable[[], object]] = {"gather": copy.gather}
    if both:
        work["scatter"] = partial(copy.scatter, 0, LAYERS * width)
        work["by_layer"] = partial(_by_layer, copy, width)
    return {what: pools.moved / _seconds(call) / 1e9 for what, call in work.items()}


def _by_layer(copy: CudaCopy, width: int) -> None:
    for layer in range(LAYERS):
        copy.scatter(layer * width, width)


def _check(pools: _Pools, copier: CudaCopier, name: str) -> None:
    """Some pages, down and up again to other pages, all on the current stream."""
    (there, elsewhere), (on_host, _) = _pages(name, pools.batch, 2), _pages(name, pools.batch, 3)
    copier.copy(there, on_host).gather()
    torch.cuda.current_stream(pools.planes.device).synchronize()
    first = pools.host.array[on_host[0]][: pools.device.layout.plane_bytes]
    if not np.array_equal(first, pools.planes.tensors[0][int(there[0])].cpu().numpy()):
        raise IntegrityError(f"the first plane of a page differs on the host, pages {name}")
    copier.copy(elsewhere, on_host).scatter(0, len(pools.planes))
    source, target = (torch.from_numpy(pages.astype(np.int64)).to(pools.planes.device) for pages in (there, elsewhere))
    for number, tensor in enumerate(pools.planes.tensors):
        if not torch.equal(tensor[source], tensor[target]):
            raise IntegrityError(f"plane {number} differs after its way to the host and back, pages {name}")


def _check_quantised(pools: _Pools, copier: CudaCopier) -> None:
    """A page, down and up again to another one, against the codec on the CPU."""
    (there, elsewhere), (on_host, _) = _pages("random", pools.batch, 2), _pages("random", pools.batch, 3)
    codec, form = create_quantiser(CODEC, pools.device.layout), pools.host.format
    copier.copy(there, on_host).gather()
    copier.copy(elsewhere, on_host).scatter(0, len(pools.planes))
    torch.cuda.current_stream(pools.planes.device).synchronize()
    before, after = (
        np.concatenate([tensor[int(pages[0])].cpu().numpy() for tensor in pools.planes.tensors])
        for pages in (there, elsewhere)
    )
    encoded, decoded = np.zeros(form.page_stride, np.uint8), np.zeros_like(before)
    codec.encode(before.data, encoded.data)
    codec.decode(encoded[: form.page_bytes].data, decoded.data)
    if not np.array_equal(encoded[: form.page_bytes], pools.host.array[on_host[0]][: form.page_bytes]):
        raise IntegrityError(f"a page differs on the host from what {CODEC} makes of it")
    if not np.array_equal(decoded, after):
        raise IntegrityError(f"a page differs on the device from what {CODEC} gives back")


def _pages(name: str, batch: int, seed: int) -> tuple[PageIndices, PageIndices]:
    """Half of the pages of a pool, and the other half."""
    order = np.random.default_rng(seed).permutation(2 * batch) if name == "random" else np.arange(2 * batch)
    return order[:batch].astype(np.int32), order[batch:].astype(np.int32)


def _seconds(work: Callable[[], object]) -> float:
    """Median of some runs on the current stream, after one to warm up."""
    _event_seconds(work)
    taken: list[float] = []
    while len(taken) < REPEATS and sum(taken) < ENOUGH_SECONDS:
        taken.append(_event_seconds(work))
    return median(taken)


def _event_seconds(work: Callable[[], object]) -> float:
    start, end = _EVENT(enable_timing=True), _EVENT(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
