"""The copy kernels of kernels/cuda/copy.cu, run on the CPU, against the reference; and the shim that runs them."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.kernels.base import Bytes2D
from hicache.kernels.reference import ReferenceCopier
from hicache.testing.cuda_shim import Launch, Pools, Shim, ShimError
from hicache.types import PageIndices

COPY = Path(__file__).parents[2] / "kernels" / "cuda" / "copy.cu"
WIDTHS = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class Case:
    """Two pools, a batch of page pairs, and how the kernels are compiled."""

    num_planes: int
    plane_bytes: int
    page_stride: int
    vector: int
    num_pages: tuple[int, int]
    pages: tuple[PageIndices, PageIndices]
    macros: dict[str, int] = field(default_factory=dict)

    def pools(self) -> Pools:
        """The same random bytes at every call, at addresses that are multiples of `vector` and of nothing more."""
        random = np.random.default_rng(self.num_planes)
        planes = [misaligned((self.num_pages[0], self.plane_bytes), self.vector) for _ in range(self.num_planes)]
        pools = Pools(planes, misaligned((self.num_pages[1], self.page_stride), self.vector))
        for array in (*pools.planes, pools.host):
            array[:] = random.integers(0, 256, array.shape, np.uint8)
        return pools

    def defines(self) -> dict[str, int]:
        sizes = {"VECTOR_BYTES": self.vector, "PLANE_BYTES": self.plane_bytes, "PAGE_STRIDE": self.page_stride}
        return sizes | self.macros


def misaligned(shape: tuple[int, int], vector: int) -> Bytes2D:
    raw = np.zeros(shape[0] * shape[1] + 64, np.uint8)
    start = -raw.ctypes.data % 32 + vector
    return raw[start : start + shape[0] * shape[1]].reshape(shape)


def check_gather(shim: Shim, case: Case, launch: Launch) -> None:
    """All bytes of both pools are as after the reference's gather."""
    pools, wanted = case.pools(), case.pools()
    stores = shim.module(COPY, case.defines()).launch("gather_pages", launch, pools, case.pages, 0)
    ReferenceCopier(wanted.planes, wanted.host).copy(*case.pages).gather()
    expect_equal(pools, wanted)
    assert stores == len(case.pages[0]) * case.num_planes * case.plane_bytes // case.vector


def check_scatter(shim: Shim, case: Case, launch: Launch, first: int, count: int) -> None:
    """The same for a scatter of `count` planes from `first` on."""
    pools, wanted = case.pools(), case.pools()
    some = Pools(pools.planes[first : first + count], pools.host)
    shim.module(COPY, case.defines()).launch("scatter_pages", launch, some, case.pages, first * case.plane_bytes)
    ReferenceCopier(wanted.planes, wanted.host).copy(*case.pages).scatter(first, count)
    expect_equal(pools, wanted)


def expect_equal(actual: Pools, wanted: Pools) -> None:
    np.testing.assert_array_equal(actual.host, wanted.host, "host pool")
    for index, (plane, right) in enumerate(zip(actual.planes, wanted.planes)):
        np.testing.assert_array_equal(plane, right, f"plane {index}")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_planes = draw(st.integers(1, 6))
    plane_bytes = draw(
        st.one_of(st.integers(1, 20000), st.sampled_from([1, 64, 512, 1000, 2032, 2048, 4096, 4112, 8192, 16384]))
    )
    vector = draw(st.sampled_from([width for width in WIDTHS if plane_bytes % width == 0][:2]))
    stride = num_planes * plane_bytes + vector * draw(st.integers(0, 8))
    sizes = draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    batch = draw(st.integers(1, min(sizes)))
    pages = [np.array(draw(st.permutations(range(size)))[:batch], np.int32) for size in sizes]
    macros = {"UNROLL": draw(st.sampled_from([1, 3, 8])), "LANE_LINEAR": draw(st.sampled_from([0, 1]))}
    chosen = {name: value for name, value in macros.items() if draw(st.booleans())}
    return Case(num_planes, plane_bytes, stride, vector, sizes, (pages[0], pages[1]), chosen)


launches = st.builds(Launch, st.integers(1, 40), st.sampled_from([32, 64, 96, 256]), st.integers(0, 99))


@settings(max_examples=25)
@given(case=cases(), launch=launches)
def test_gather_moves_the_same_bytes_as_the_reference(shim: Shim, case: Case, launch: Launch) -> None:
    check_gather(shim, case, launch)


@settings(max_examples=25)
@given(case=cases(), launch=launches, data=st.data())
def test_scatter_of_some_planes_moves_the_same_bytes_as_the_reference(
    shim: Shim, case: Case, launch: Launch, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, case.num_planes - 1))
    check_scatter(shim, case, launch, first, data.draw(st.integers(1, case.num_planes - first)))


# One row of a warp is 32 vectors, a tile up to 8 rows: sizes at, below and above these edges.
EDGES = [1, 2, 31, 32, 33, 127, 128, 129, 255, 256, 257, 511, 512, 513, 769]


@pytest.mark.parametrize("grid", [1, 3, 200], ids=lambda grid: f"grid{grid}")
@pytest.mark.parametrize("vectors", EDGES, ids=lambda vectors: f"{vectors}vectors")
def test_planes_at_the_edges_of_rows_and_tiles(shim: Shim, vectors: int, grid: int) -> None:
    pages = np.array([4, 0, 3], np.int32), np.array([1, 5, 2], np.int32)
    case = Case(5, vectors * 16, vectors * 80 + 48, 16, (5, 6), pages)
    check_gather(shim, case, Launch(grid, 64))
    check_scatter(shim, case, Launch(grid, 64), 1, 3)


@pytest.mark.parametrize("vector", WIDTHS)
def test_every_width_of_an_access(shim: Shim, vector: int) -> None:
    pages = np.array([1, 0], np.int32), np.array([0, 2], np.int32)
    for vectors in (3, 300):
        case = Case(3, vectors * vector, vectors * vector * 3, vector, (2, 3), pages)
        check_gather(shim, case, Launch(2, 32))
        check_scatter(shim, case, Launch(2, 32), 2, 1)


@pytest.mark.parametrize("lane_linear", [0, 1], ids=["tiles", "lanes"])
def test_pools_of_more_than_4_gib(shim: Shim, lane_linear: int) -> None:
    """Offsets on both sides go over 2^31 and 2^32 bytes; only the pages that are copied take memory."""
    plane_bytes, stride = 1 << 20, 1 << 22
    planes = [reserved(5000, plane_bytes) for _ in range(2)]
    host = reserved(1300, stride)
    pages = np.array([0, 2047, 2048, 4095, 4096, 4999], np.int32), np.array([1299, 0, 511, 512, 1023, 1024], np.int32)
    random = np.random.default_rng(7)
    for plane in planes:
        plane[pages[0]] = random.integers(0, 256, (len(pages[0]), plane_bytes), np.uint8)
    macros = {"VECTOR_BYTES": 16, "PLANE_BYTES": plane_bytes, "PAGE_STRIDE": stride, "LANE_LINEAR": lane_linear}
    module, launch = shim.module(COPY, macros), Launch(2, 64)
    module.launch("gather_pages", launch, Pools(planes, host), pages, plane_bytes)
    for number, plane in enumerate(planes, 1):
        copied = host[pages[1], number * plane_bytes : (number + 1) * plane_bytes]
        np.testing.assert_array_equal(copied, plane[pages[0]], f"plane {number - 1} on the host")
    backwards = pages[0][::-1].copy(), pages[1]
    before = [plane[pages[0]] for plane in planes]
    module.launch("scatter_pages", launch, Pools(planes, host), backwards, plane_bytes)
    for plane, rows in zip(planes, before):
        np.testing.assert_array_equal(plane[backwards[0]], rows, "plane on the device")


def reserved(num_pages: int, page_bytes: int) -> Bytes2D:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, num_pages * page_bytes, flags=flags), np.uint8).reshape(num_pages, page_bytes)


HEAD = """
#include "memory.cuh"
typedef unsigned char Byte;
extern "C" __global__ void gather(const unsigned long long* planes, Byte* host, const int*, const int*, unsigned,
                                  unsigned, unsigned long long) {
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    const Byte* plane = reinterpret_cast<const Byte*>(planes[0]);
"""
BROKEN = [
    ("a byte was written twice: 1 bytes", "store(host + thread / 2, load(plane));"),
    ("a load outside the pools: 4 bytes", "store(host + thread, Byte(load((const unsigned*)(plane + 4 * thread))));"),
    ("a store outside what may be written: 1 bytes", "store(host + thread + 1, load(plane + thread));"),
    ("a store outside what may be written: 1 bytes", "store((Byte*)(plane + thread), load(host + thread));"),
    ("an unaligned access: 2 bytes", "store((unsigned short*)(host + 2 * thread + 1), (unsigned short)(0));"),
    ("threads of a block wait at different", "if (thread % 2) __syncthreads(); else __shfl_xor_sync(~0u, 1, 1);"),
    ("undefined behaviour", "store(host + thread, load(plane + (1 << (31 + *plane))));"),
]


@pytest.mark.parametrize("failure, statement", BROKEN)
def test_the_shim_finds_what_a_kernel_does_wrong(shim: Shim, tmp_path: Path, failure: str, statement: str) -> None:
    source = tmp_path / "broken.cu"
    head = HEAD.replace("memory.cuh", str(COPY.with_name("memory.cuh")))
    source.write_text(f"{head}(void)plane; (void)host; {statement} }}")
    pools = Pools([np.ones((1, 64), np.uint8)], misaligned((1, 64), 16))
    pages = np.zeros(1, np.int32), np.zeros(1, np.int32)
    with pytest.raises(ShimError, match=f"gather: {failure}"):
        shim.module(source, {}).launch("gather", Launch(2, 32), pools, pages, 0)


def test_a_source_that_does_not_compile_says_so(shim: Shim) -> None:
    with pytest.raises(ShimError, match="PLANE_BYTES is no multiple of VECTOR_BYTES"):
        shim.module(COPY, {"VECTOR_BYTES": 16, "PLANE_BYTES": 40, "PAGE_STRIDE": 4096})
