"""The quantising CUDA copier as it launches its kernels, with the shim in the GPU's place: the same sources, arguments
and macros, run block by block on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hicache.errors import ProtocolError
from hicache.kernels.cuda_paths import PathName
from hicache.layout import HostFormat, KVLayout
from hicache.testing.cuda_launch import ShimGpu
from hicache.testing.cuda_shim import Shim
from hicache.testing.kernels import QuantisedCase


@pytest.fixture
def gpu(shim: Shim) -> Iterator[ShimGpu]:
    with ShimGpu(shim).in_use() as gpu:  # a staging buffer of fewer pages than a copy has
        yield gpu


def case_of(codec: str, dtype: str, layers: int, head_dim: int) -> QuantisedCase:
    form = HostFormat(KVLayout(layers, 1, head_dim, 4, dtype), codec)
    return QuantisedCase(form, 6, 5, np.array([5, 0, 3], np.int32), np.array([1, 4, 0], np.int32))


@pytest.mark.parametrize("path", ["kernel", "staged"])
@pytest.mark.parametrize(
    "case, width",
    [
        (case_of("fp8", "float16", 4, 16), 16),
        (case_of("int8", "bfloat16", 1, 6), 8),
        (case_of("fp8", "float32", 3, 1), 4),
    ],
    ids=["whole vectors", "few scales", "short planes"],
)
def test_launches_make_what_the_cpu_makes(gpu: ShimGpu, path: PathName, case: QuantisedCase, width: int) -> None:
    """`width`: codes that a thread takes at once, limited by where the codes begin and by the values of a plane."""
    layers = case.form.layout.num_layers
    wanted_planes, wanted = case.pools()
    planes, given = case.pools()
    oracle, _ = case.oracle(wanted_planes, wanted)
    copier, host = gpu.copier(planes, given, path, case.form)
    assert gpu.macros["VECTOR_BYTES"] == width
    oracle.copy(case.device_pages, case.host_pages).gather()
    copier.copy(case.device_pages, case.host_pages).gather()
    np.testing.assert_array_equal(host, wanted)
    back = case.device_pages[::-1].copy()
    for first, count in ((0, 1), (1, 1), (2 * layers - 1, 1), (0, 2 * layers)):
        oracle.copy(back, case.host_pages).scatter(first, count)
        copier.copy(back, case.host_pages).scatter(first, count)
        np.testing.assert_array_equal(planes, wanted_planes, f"planes {first} to {first + count - 1}")


def test_planes_that_begin_anywhere_are_read_in_smaller_pieces(gpu: ShimGpu) -> None:
    """An engine's own tensors, of which one begins at a multiple of 8 bytes only."""
    case = case_of("fp8", "float16", 4, 16)
    planes, given = case.pools()
    wanted_planes, wanted = case.pools()
    raw = np.zeros(planes[0].size + 32, np.uint8)
    start = -raw.ctypes.data % 16 + 8
    shifted = raw[start : start + planes[0].size].reshape(planes[0].shape)
    shifted[:] = planes[0]
    copier, host = gpu.copier([shifted, *planes[1:]], given, "kernel", case.form)
    assert gpu.macros["VECTOR_BYTES"] == 4
    copier.copy(case.device_pages, case.host_pages).gather()
    oracle, _ = case.oracle(wanted_planes, wanted)
    oracle.copy(case.device_pages, case.host_pages).gather()
    np.testing.assert_array_equal(host, wanted)


def test_nothing_is_launched_for_nothing(gpu: ShimGpu) -> None:
    case = case_of("fp8", "float16", 4, 16)
    copier, _ = gpu.copier(*case.pools(), "kernel", case.form)
    copier.copy(case.device_pages, case.host_pages).scatter(3, 0)
    copier.copy(case.device_pages[:0], case.host_pages[:0]).gather()
    assert gpu.launches == []


def test_there_is_no_direct_path(gpu: ShimGpu) -> None:
    case = case_of("fp8", "float16", 4, 16)
    with pytest.raises(ProtocolError, match="no path 'direct' for quantised pages, use staged or kernel"):
        gpu.copier(*case.pools(), "direct", case.form)
