"""Registering host memory with CUDA, so that a GPU copies from and to it by itself ("pinned" memory)."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import resource
from collections.abc import Iterator
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from hicache.errors import CapacityError, ConfigError
from hicache.kernels.cuda_source import load_cupy

REGISTRATION_BYTES = 1 << 30
"""Registered in one call. The kernel pins page by page: one call over a whole arena holds its lock for minutes."""

_PORTABLE, _MAPPED = 1, 2

MIB = 1 << 20


class Registrar(Protocol):
    """Registers memory with the driver of a device."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin the pages of these bytes. Raises CapacityError, with the driver's reason, and pins nothing."""

    def unregister(self, address: int) -> None:
        """Give back what was registered at `address`; also fine if the driver has let go of it by itself."""


class CudaRegistrar:
    """cudaHostRegister, for all contexts ("portable") and for kernels, too ("mapped").

    A kernel uses the host's own addresses. That takes cudaDevAttrCanUseHostPointerForRegisteredMem, which every driver
    for 64-bit Linux has, on every GPU that CUDA 12 and 13 know; so nothing here asks for it.

    CuPy's binding and not torch's: it drops the error that a refused call leaves behind in the CUDA runtime. Otherwise
    the next kernel launch reports it as its own.
    """

    def __init__(self, device: str = "cuda") -> None:
        from hicache.streams.cuda import cuda_index  # here: it brings in torch

        cupy = load_cupy()
        self._runtime = cupy.cuda.runtime
        self._device = cupy.cuda.Device(cuda_index(device))

    def register(self, address: int, nbytes: int) -> None:
        try:
            with self._device:
                self._runtime.hostRegister(address, nbytes, _PORTABLE | _MAPPED)
        except self._runtime.CUDARuntimeError as error:
            raise CapacityError(str(error)) from error

    def unregister(self, address: int) -> None:
        # An error means that the context is gone, as at exit, or lost after a fault or a reset. Then so is the
        # registration; and a close that follows a fault must not fail, too.
        with contextlib.suppress(self._runtime.CUDARuntimeError), self._device:
            self._runtime.hostUnregister(address)


class Registration:
    """An arena that is registered in pieces of whole pages. It keeps the arena mapped until it is released.

    Raises CapacityError, with the numbers and the mends and with nothing left registered, if a piece is refused.
    """

    def __init__(self, arena: npt.NDArray[np.uint8], page_stride: int, registrar: Registrar) -> None:
        self._arena: npt.NDArray[np.uint8] | None = arena
        self._process = os.getpid()
        self._pieces = contextlib.ExitStack()
        self.pages = pages_per_registration(page_stride)
        self.nbytes = 0
        try:
            for start, nbytes in registration_plan(arena.nbytes, page_stride):
                address = arena.ctypes.data + start
                registrar.register(address, nbytes)
                self._pieces.callback(registrar.unregister, address)
                self.nbytes += nbytes
        except BaseException as error:
            self.release()
            if isinstance(error, CapacityError):
                raise CapacityError(_refusal(arena.nbytes, self.nbytes, error)) from error
            raise

    def release(self) -> None:
        """Unregister every piece, the last one first, then let the arena go. Idempotent.

        A forked process has neither the memory nor a usable driver: there it only forgets.
        """
        pieces = self._pieces.pop_all()
        if os.getpid() == self._process:
            pieces.close()
        self._arena = None


def resolve_pinned(pinned: bool | Literal["auto"], device: str) -> bool:
    """Whether host memory for `device` is registered with CUDA: "auto" means with a CUDA device.

    Raises ConfigError if it cannot be: only a CUDA device has a driver to register it with.
    """
    on_cuda = device.partition(":")[0] == "cuda"
    if pinned is True and not on_cuda:
        raise ConfigError(f"pinned: true needs a CUDA device, this one is {device}: use pinned: auto")
    return on_cuda if pinned == "auto" else pinned


def pages_per_registration(page_stride: int) -> int:
    """Host pages in one piece: about REGISTRATION_BYTES, at least one.

    A copy over two registrations is refused by CUDA, therefore no page lies in two; nor does a page of the kernel,
    which matters where those are larger than 4 KiB.
    """
    step = math.lcm(page_stride, mmap.PAGESIZE) // page_stride
    return max(step, REGISTRATION_BYTES // page_stride // step * step)


def registration_plan(nbytes: int, page_stride: int) -> Iterator[tuple[int, int]]:
    """Start and length in bytes of each piece of an arena of whole pages."""
    piece = pages_per_registration(page_stride) * page_stride
    for start in range(0, nbytes, piece):
        yield start, min(piece, nbytes - start)


def _refusal(asked: int, pinned: int, error: CapacityError) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memlock = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / MIB:.1f} MiB"
    return (
        f"{asked / MIB:.1f} MiB of host memory to be pinned, {pinned / MIB:.1f} MiB were when CUDA refused: {error} "
        f"(memlock limit: {memlock}): raise the limit (ulimit -l), choose a smaller size, "
        "or use pinned: false for slower, unpinned copies"
    )
