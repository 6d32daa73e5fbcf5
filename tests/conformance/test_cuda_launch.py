"""The CUDA copiers through the conformance suite without a GPU: what they launch runs on the shim."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import numpy as np
import pytest

from hicache.kernels.base import Bytes2D, PageCopier
from hicache.kernels.cuda_paths import PathName
from hicache.testing.cuda_launch import PROCESSORS, ShimGpu
from hicache.testing.cuda_shim import Shim
from hicache.testing.kernels import Bind, CopyCase, check_gather, check_scatter

PATHS = get_args(PathName)
NUM_PLANES, DEVICE_PAGES, HOST_PAGES = 6, 9, 7


@pytest.fixture
def gpu(shim: Shim) -> Iterator[ShimGpu]:
    with ShimGpu(shim).in_use() as gpu:
        yield gpu


def on_shim(gpu: ShimGpu, path: PathName) -> Bind:
    def bind(planes: Sequence[Bytes2D], host: Bytes2D) -> tuple[PageCopier, Callable[[], None]]:
        copier, copied = gpu.copier(planes, host, path)

        def fetch() -> None:
            host[:] = copied

        return copier, fetch

    return bind


def case_of(plane_bytes: int, batch: int = 5, spare: int = 16) -> CopyCase:
    random = np.random.default_rng(plane_bytes)
    device, host = (random.permutation(count)[:batch].astype(np.int32) for count in (DEVICE_PAGES, HOST_PAGES))
    stride = NUM_PLANES * plane_bytes + spare
    return CopyCase(NUM_PLANES, plane_bytes, stride, DEVICE_PAGES, HOST_PAGES, device, host)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("plane_bytes", [1, 6, 16, 1000, 4096, 20_000])
def test_the_same_bytes_as_the_reference(gpu: ShimGpu, path: PathName, plane_bytes: int) -> None:
    case = case_of(plane_bytes)
    check_gather(on_shim(gpu, path), case)
    for first, count in ((0, NUM_PLANES), (2, 2), (NUM_PLANES - 1, 1), (3, 0)):
        check_scatter(on_shim(gpu, path), case, first, count)


@pytest.mark.parametrize("path", PATHS)
def test_no_pages_are_no_launches(gpu: ShimGpu, path: PathName) -> None:
    case = case_of(16, batch=0)
    check_gather(on_shim(gpu, path), case)
    check_scatter(on_shim(gpu, path), case, 0, NUM_PLANES)
    assert gpu.launches == [] and gpu.copies == 0


@pytest.mark.parametrize(
    "plane_bytes, spare, width", [(4096, 0, 16), (4096, 8, 8), (1000, 16, 8), (12, 8, 4), (6, 0, 2), (3, 0, 1)]
)
def test_accesses_are_as_wide_as_every_address_allows(gpu: ShimGpu, plane_bytes: int, spare: int, width: int) -> None:
    check_gather(on_shim(gpu, "kernel"), case_of(plane_bytes, spare=spare))
    assert gpu.macros["VECTOR_BYTES"] == width


def test_the_bus_gets_few_blocks_and_the_staging_all_processors(gpu: ShimGpu) -> None:
    case = case_of(20_000)
    check_gather(on_shim(gpu, "kernel"), case)
    check_scatter(on_shim(gpu, "staged"), case, 0, NUM_PLANES)
    assert [(name, blocks) for name, blocks, *_ in gpu.launches] == [("gather_pages", 2), ("scatter_pages", 2)]
    check_gather(on_shim(gpu, "staged"), case)
    assert {blocks for _, blocks, *_ in gpu.launches[2:]} == {PROCESSORS}


def test_small_copies_get_no_idle_blocks(gpu: ShimGpu) -> None:
    check_gather(on_shim(gpu, "staged"), case_of(16, batch=1))
    assert [launch[1:] for launch in gpu.launches] == [(1, 64, 1, NUM_PLANES)]


def test_staging_takes_a_copy_in_parts_and_the_engine_brings_whole_pages(gpu: ShimGpu) -> None:
    case = case_of(1000)  # one page fits
    check_gather(on_shim(gpu, "staged"), case)
    assert [pages for *_, pages, _ in gpu.launches] == [1, 1, 1, 1, 1] and gpu.copies == 5


def test_direct_copies_are_one_for_each_plane_of_each_page(gpu: ShimGpu) -> None:
    case = case_of(4096)
    check_gather(on_shim(gpu, "direct"), case)
    check_scatter(on_shim(gpu, "direct"), case, 2, 2)
    assert gpu.launches == [] and gpu.copies == 5 * NUM_PLANES + 5 * 2
