"""Copies by the GPU's copy engines, many in one call of the CUDA driver.

cuMemcpyBatchAsync came with CUDA 12.8 and lost an argument in 13.0; older drivers get one call for each copy. Called
through ctypes, because neither torch nor CuPy has it. ctypes gives the GIL back during the calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.errors import TransferError

Addresses: TypeAlias = npt.NDArray[np.uint64]

CALL_COPIES = 128
"""Copies in one call. Larger and smaller batches are slower: on an H200, 0.95 of one large copy in calls of 128 pieces
of 64 KiB, 0.57 in one call of 4096, 0.75 in calls of 16."""

_BATCH_VERSION, _BATCH_WITHOUT_INDEX = 12080, 13000
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream gets there
_SUCCESS = 0


class _Location(ctypes.Structure):
    """CUmemLocation; of zeros it is no hint."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("order", ctypes.c_int), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


BatchCopy: TypeAlias = Callable[[Addresses, Addresses, Addresses, int], None]


def copy_batch(targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
    """Enqueue one copy for each element on a CUDA stream (its handle, not the legacy default stream's 0).

    The arrays are contiguous and read before this returns. Each side of a copy lies within one allocation or one
    registration of host memory. Raises TransferError if the driver refuses; copies may then have been enqueued.
    """
    call = _batch_copy()
    for at in range(0, len(targets), CALL_COPIES):
        part = slice(at, at + CALL_COPIES)
        call(targets[part], sources[part], sizes[part], stream)


def driver_version() -> int:
    """1000 * major + 10 * minor of the newest CUDA that the driver knows."""
    version = ctypes.c_int()
    _check("cuDriverGetVersion", _driver().cuDriverGetVersion(ctypes.byref(version)))
    return version.value


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _batch_copy() -> BatchCopy:
    version = driver_version()
    if version < _BATCH_VERSION:
        return _one_by_one
    call = _entry("cuMemcpyBatchAsync", _BATCH_WITHOUT_INDEX if version >= _BATCH_WITHOUT_INDEX else _BATCH_VERSION)
    tells_index = version < _BATCH_WITHOUT_INDEX
    attributes = _Attributes(order=_STREAM_ORDER)
    first = ctypes.c_size_t(0)  # the attributes hold from this copy on

    def batch(targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        failed = ctypes.c_size_t()
        index = (ctypes.byref(failed),) if tells_index else ()
        code = call(
            ctypes.c_void_p(targets.ctypes.data),
            ctypes.c_void_p(sources.ctypes.data),
            ctypes.c_void_p(sizes.ctypes.data),
            ctypes.c_size_t(len(targets)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            *index,
            ctypes.c_void_p(stream),
        )
        _check("cuMemcpyBatchAsync", code)

    return batch


def _one_by_one(targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
    call, handle = _driver().cuMemcpyAsync, ctypes.c_void_p(stream)
    for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist()):
        code = call(ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), handle)
        _check("cuMemcpyAsync", code)


def _entry(name: str, version: int) -> Callable[..., int]:
    """A function of the driver as it was in CUDA `version`."""
    address, status = ctypes.c_void_p(), ctypes.c_int()
    code = _driver().cuGetProcAddress_v2(
        name.encode(), ctypes.byref(address), ctypes.c_int(version), ctypes.c_uint64(0), ctypes.byref(status)
    )
    _check(f"cuGetProcAddress({name})", code)
    if not address.value:
        raise TransferError(f"the CUDA driver has no {name}: update it")
    function: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_int)(address.value)
    return function


def _check(call: str, code: int) -> None:
    if code != _SUCCESS:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
        raise TransferError(f"{call} failed: {(text.value or b'error').decode()} ({code})")
