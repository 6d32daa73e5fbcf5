"""Every copy kernel against the reference, over layouts, page sizes and orders of pages."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ProtocolError
from hicache.kernels.cpu import CpuKernels
from hicache.kernels.dispatch import CopyKernels
from hicache.kernels.reference import ReferenceKernels
from hicache.testing.kernels import CopyCase, check_gather, check_scatter

KERNELS = [pytest.param(CpuKernels(), id="cpu"), pytest.param(ReferenceKernels(), id="reference")]
if find_spec("numba"):
    compiled = importlib.import_module("hicache.kernels.compiled")
    KERNELS.append(pytest.param(compiled.CompiledKernels(), id="compiled"))


@st.composite
def copy_cases(draw: st.DrawFn) -> CopyCase:
    num_planes = draw(st.integers(1, 6))
    plane_bytes = draw(st.sampled_from([1, 3, 16, 64, 1000, 4096, 16384, 20000]))
    sizes = draw(st.tuples(st.integers(1, 24), st.integers(1, 24)))
    batch = draw(st.integers(0, min(sizes)))
    pages = [draw(_pages(size, batch)) for size in sizes]
    stride = num_planes * plane_bytes + draw(st.integers(0, 64))
    return CopyCase(num_planes, plane_bytes, stride, sizes[0], sizes[1], pages[0], pages[1])


def _pages(size: int, batch: int) -> st.SearchStrategy[np.ndarray]:
    runs = st.integers(0, size - batch).map(lambda first: np.arange(first, first + batch, dtype=np.int32))
    mixed = st.permutations(range(size)).map(lambda order: np.array(order[:batch], np.int32))
    return st.one_of(runs, mixed)


@pytest.mark.parametrize("kernels", KERNELS)
@given(case=copy_cases())
def test_gather_moves_the_same_bytes_as_the_reference(kernels: CopyKernels, case: CopyCase) -> None:
    check_gather(kernels, case)


@pytest.mark.parametrize("kernels", KERNELS)
@given(case=copy_cases(), data=st.data())
def test_scatter_of_some_planes_moves_the_same_bytes_as_the_reference(
    kernels: CopyKernels, case: CopyCase, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, case.num_planes - 1))
    check_scatter(kernels, case, first, data.draw(st.integers(1, case.num_planes - first)))


def test_the_reference_itself_puts_planes_one_after_the_other() -> None:
    planes = [np.full((2, 2), 10 * plane, np.uint8) + np.array([[0], [1]], np.uint8) for plane in range(3)]
    host = np.zeros((2, 8), np.uint8)
    ReferenceKernels().gather(planes, _indices(0, 1), host, _indices(1, 0))
    assert host.tolist() == [[1, 1, 11, 11, 21, 21, 0, 0], [0, 0, 10, 10, 20, 20, 0, 0]]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "device_pages, host_pages, message",
    [
        ([0, 4], [0, 1], r"device page outside 0 \.\. 3: \[4\]"),
        ([0, -1], [0, 1], r"device page outside 0 \.\. 3: \[-1\]"),
        ([0, 1], [0, 5], r"host page outside 0 \.\. 4: \[5\]"),
        ([0, 1], [0, -2], r"host page outside 0 \.\. 4: \[-2\]"),
        ([0, 1], [0], "2 device pages are paired with 1 host pages"),
    ],
)
def test_bad_pages_are_refused_before_anything_is_written(
    kernels: CopyKernels, device_pages: list[int], host_pages: list[int], message: str
) -> None:
    planes, host = [np.ones((4, 8), np.uint8) for _ in range(2)], np.zeros((5, 16), np.uint8)
    with pytest.raises(ProtocolError, match=message):
        kernels.gather(planes, _indices(*device_pages), host, _indices(*host_pages))
    with pytest.raises(ProtocolError, match=message):
        kernels.scatter(planes, _indices(*device_pages), host, _indices(*host_pages), 0)
    assert not host.any() and all(plane.all() for plane in planes)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("first_plane", [-1, 1])
def test_planes_beyond_the_host_page_are_refused(kernels: CopyKernels, first_plane: int) -> None:
    planes, host = [np.ones((4, 8), np.uint8) for _ in range(2)], np.zeros((5, 20), np.uint8)
    with pytest.raises(ProtocolError, match="leave the 20 byte page"):
        kernels.scatter(planes, _indices(0), host, _indices(0), first_plane)
    assert all(plane.all() for plane in planes)


@pytest.mark.parametrize("kernels", KERNELS)
def test_planes_of_different_shapes_are_refused(kernels: CopyKernels) -> None:
    planes = [np.ones((4, 8), np.uint8), np.ones((3, 8), np.uint8)]
    with pytest.raises(ProtocolError, match="planes differ in shape"):
        kernels.gather(planes, _indices(0), np.zeros((5, 16), np.uint8), _indices(0))


def _indices(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)
