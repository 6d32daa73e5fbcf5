"""Batches of copies as the driver gets them, over a stand-in for libcuda."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hicache.errors import TransferError
from hicache.kernels import cuda_driver
from hicache.kernels.cuda_driver import copy_batch

STREAM = 77


class FakeDriver:
    """libcuda of one version; `fails_with` is what its copies return."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.fails_with = 0
        self.asked: list[tuple[bytes, int]] = []
        self.calls: list[list[tuple[int, int, int]]] = []  # of each call: target, source, size
        self.attributes: list[tuple[int, int, int]] = []  # order, first, count
        # Kept here: the address is of no use once the callback object is gone.
        self._batch = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * (8 if version >= 13000 else 9))(self._copies)

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cuGetProcAddress_v2(self, name: bytes, address: Any, version: Any, flags: Any, status: Any) -> int:
        self.asked.append((name, version.value))
        address._obj.value = ctypes.cast(self._batch, ctypes.c_void_p).value
        return 0

    def _copies(self, *arguments: int) -> int:
        count, attributes, first, num_attributes, *rest = arguments[3:]
        assert rest[-1] == STREAM and len(rest) == (1 if self.version >= 13000 else 2)
        arrays = [np.frombuffer((ctypes.c_uint64 * count).from_address(at), np.uint64) for at in arguments[:3]]
        self.calls.append(list(zip(*(array.tolist() for array in arrays))))
        order = ctypes.c_int.from_address(attributes).value
        self.attributes.append((order, ctypes.c_size_t.from_address(first).value, num_attributes))
        return self.fails_with

    def cuMemcpyAsync(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        assert stream.value == STREAM
        self.calls.append([(target.value, source.value, size.value)])
        return self.fails_with

    def cuGetErrorName(self, code: Any, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


@pytest.fixture
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver(request.param)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: fake)
    cuda_driver._batch_copy.cache_clear()
    yield fake
    cuda_driver._batch_copy.cache_clear()


def arrays(count: int) -> list[cuda_driver.Addresses]:
    """Targets, sources and sizes of copies, all different."""
    numbers = np.arange(count, dtype=np.uint64)
    return [numbers + np.uint64(1 << 33), numbers + np.uint64(1 << 40), numbers + np.uint64(4096)]


@pytest.mark.parametrize(
    "driver, asked", [(12080, 12080), (12090, 12080), (13000, 13000), (13020, 13000)], indirect=["driver"]
)
def test_the_call_of_the_drivers_own_time_is_taken(driver: FakeDriver, asked: int) -> None:
    copies = arrays(5)
    copy_batch(*copies, STREAM)
    assert driver.asked == [(b"cuMemcpyBatchAsync", asked)]
    assert driver.calls == [list(zip(*(array.tolist() for array in copies)))]
    assert driver.attributes == [(1, 0, 1)]  # in the order of the stream, one set for all


@pytest.mark.parametrize("driver", [13000], indirect=True)
@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 300])
def test_long_batches_are_several_calls(driver: FakeDriver, count: int) -> None:
    copies = arrays(count)
    copy_batch(*copies, STREAM)
    assert [len(call) for call in driver.calls] == [min(128, count - at) for at in range(0, count, 128)]
    assert [copy for call in driver.calls for copy in call] == list(zip(*(array.tolist() for array in copies)))


@pytest.mark.parametrize("driver", [12070], indirect=True)
def test_an_older_driver_gets_one_copy_at_a_time(driver: FakeDriver) -> None:
    copies = arrays(3)
    copy_batch(*copies, STREAM)
    assert driver.asked == [] and [copy for call in driver.calls for copy in call] == list(
        zip(*(array.tolist() for array in copies))
    )


@pytest.mark.parametrize("driver, call", [(13000, "cuMemcpyBatchAsync"), (12040, "cuMemcpyAsync")], indirect=["driver"])
def test_a_refusal_is_a_failed_transfer(driver: FakeDriver, call: str) -> None:
    driver.fails_with = 1
    with pytest.raises(TransferError, match=rf"{call} failed: CUDA_ERROR_INVALID_VALUE \(1\)"):
        copy_batch(*arrays(2), STREAM)
