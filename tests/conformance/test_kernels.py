"""Every copy kernel against the reference, over layouts, page sizes and orders of pages."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ProtocolError
from hicache.kernels.cpu import CpuCopier
from hicache.kernels.reference import ReferenceCopier
from hicache.testing.kernels import Bind, CopyCase, check_gather, check_scatter, in_place

KERNELS = [pytest.param(in_place(CpuCopier), id="cpu"), pytest.param(in_place(ReferenceCopier), id="reference")]
if find_spec("numba"):
    compiled = importlib.import_module("hicache.kernels.compiled")
    KERNELS.append(pytest.param(in_place(compiled.CompiledCopier), id="compiled"))
if find_spec("cupy") and torch.cuda.is_available():
    on_gpu = importlib.import_module("hicache.testing.kernels_cuda").on_gpu
    PATHS = ("kernel", "direct", "staged", "auto", "unpinned")
    KERNELS += [pytest.param(on_gpu(path), id=f"cuda-{path}", marks=pytest.mark.gpu) for path in PATHS]


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
def test_gather_moves_the_same_bytes_as_the_reference(kernels: Bind, case: CopyCase) -> None:
    check_gather(kernels, case)


@pytest.mark.parametrize("kernels", KERNELS)
@given(case=copy_cases(), data=st.data())
def test_scatter_of_some_planes_moves_the_same_bytes_as_the_reference(
    kernels: Bind, case: CopyCase, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, case.num_planes - 1))
    check_scatter(kernels, case, first, data.draw(st.integers(1, case.num_planes - first)))


def test_the_reference_itself_puts_planes_one_after_the_other() -> None:
    planes = [np.full((2, 2), 10 * plane, np.uint8) + np.array([[0], [1]], np.uint8) for plane in range(3)]
    host = np.zeros((2, 8), np.uint8)
    ReferenceCopier(planes, host).copy(_indices(0, 1), _indices(1, 0)).gather()
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
    kernels: Bind, device_pages: list[int], host_pages: list[int], message: str
) -> None:
    planes, host = [np.ones((4, 8), np.uint8) for _ in range(2)], np.zeros((5, 16), np.uint8)
    copier, fetch = kernels(planes, host)
    fetch()
    before = host.copy()  # a copier that measures its paths has used the host pool
    with pytest.raises(ProtocolError, match=message):
        copier.copy(_indices(*device_pages), _indices(*host_pages))
    fetch()
    assert (host == before).all() and all(plane.all() for plane in planes)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("first_plane, count", [(-1, 1), (1, 2), (2, 1), (0, -1)])
def test_planes_that_there_are_not_are_refused(kernels: Bind, first_plane: int, count: int) -> None:
    planes, host = [np.ones((4, 8), np.uint8) for _ in range(2)], np.zeros((5, 20), np.uint8)
    copier, fetch = kernels(planes, host)
    copy = copier.copy(_indices(0), _indices(0))
    with pytest.raises(ProtocolError, match=f"planes {first_plane} .. {first_plane + count - 1} leave the 2 planes"):
        copy.scatter(first_plane, count)
    fetch()
    assert all(plane.all() for plane in planes)


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_pages_of_a_copy_are_its_own(kernels: Bind) -> None:
    planes, host = [np.arange(32, dtype=np.uint8).reshape(4, 8)], np.zeros((4, 8), np.uint8)
    copier, fetch = kernels(planes, host)
    device_pages, host_pages = _indices(1, 2), _indices(3, 0)
    copy = copier.copy(device_pages, host_pages)
    device_pages[:], host_pages[:] = 0, 1
    copy.gather()
    fetch()
    assert (host[3] == planes[0][1]).all() and (host[0] == planes[0][2]).all()


@pytest.mark.parametrize("kernels", KERNELS)
def test_pools_that_do_not_fit_are_refused(kernels: Bind) -> None:
    with pytest.raises(ProtocolError, match="planes differ"):
        kernels([np.ones((4, 8), np.uint8), np.ones((3, 8), np.uint8)], np.zeros((5, 16), np.uint8))
    with pytest.raises(ProtocolError, match="2 planes of 8 bytes leave the 15 byte page"):
        kernels([np.ones((4, 8), np.uint8)] * 2, np.zeros((5, 15), np.uint8))


def _indices(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)
