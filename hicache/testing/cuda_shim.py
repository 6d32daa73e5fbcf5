"""Runs page-copy kernels written for CUDA on the CPU: the same .cu file, compiled by g++, block by block.

The C++ half, `shim.hpp` and `driver.cpp`, lies in tests/conformance/cuda_shim of the repository. Each access to
payload is checked: whether it is aligned, inside the pools and on the side that is written, and that no byte is
written twice.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache.kernels.base import Bytes2D
from hicache.types import PageIndices

_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fsanitize=undefined", "-static-libubsan")
_WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
_POISON_PAGE, _POISON_PLANE = 0x7FFFFFFF, 1 << 60
_POISON_COUNT = 64


class ShimError(AssertionError):
    """A kernel does what it must not do."""


@dataclass(frozen=True)
class Launch:
    """`grid` blocks of `block` threads, a multiple of 32; `seed` chooses the order in which threads take turns."""

    grid: int
    block: int
    seed: int = 0


@dataclass(frozen=True)
class Pools:
    """Planes to copy, each uint8 (num_device_pages, plane_bytes), and the host pool, uint8 (num_pages, page_stride)."""

    planes: Sequence[Bytes2D]
    host: Bytes2D


class _Region(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("writable", ctypes.c_uint32))


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("planes", ctypes.c_void_p),
        ("host", ctypes.c_void_p),
        ("device_pages", ctypes.c_void_p),
        ("host_pages", ctypes.c_void_p),
        ("num_pages", ctypes.c_uint32),
        ("num_planes", ctypes.c_uint32),
        ("first", ctypes.c_uint64),
    )


class ShimModule:
    """The kernels of one .cu file with one set of macros."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.shim_launch.restype = ctypes.c_char_p

    def launch(
        self, kernel: str, launch: Launch, pools: Pools, pages: tuple[PageIndices, PageIndices], first: int
    ) -> int:
        """Run `kernel` over (device pages, host pages); `first` is its last argument. Returns the number of stores.

        Kernels named gather_* may write the host pool, others the planes. Raises ShimError.
        """
        planes = _guarded([plane.ctypes.data for plane in pools.planes], np.uint64, _POISON_PLANE)
        device_pages, host_pages = (_guarded(indices, np.int32, _POISON_PAGE) for indices in pages)
        arguments = _Arguments(
            planes.ctypes.data,
            pools.host.ctypes.data,
            device_pages.ctypes.data,
            host_pages.ctypes.data,
            len(pages[0]),
            len(pools.planes),
            first,
        )
        stores = ctypes.c_uint64()
        regions = _regions(pools, gathers=kernel.startswith("gather"))
        function = ctypes.cast(getattr(self._library, kernel), ctypes.c_void_p)
        failure: bytes = self._library.shim_launch(
            function,
            ctypes.c_uint32(launch.grid),
            ctypes.c_uint32(launch.block),
            ctypes.c_uint32(launch.seed),
            regions,
            ctypes.c_uint32(len(regions)),
            ctypes.byref(arguments),
            ctypes.byref(stores),
        )
        if failure:
            raise ShimError(f"{kernel}: {failure.decode()}")
        return stores.value


class Shim:
    """Compiles .cu files into `folder`, each once for a set of macros. `sources`: folder of shim.hpp, driver.cpp."""

    def __init__(self, compiler: str, sources: Path, folder: Path) -> None:
        self._command = (compiler, *_FLAGS, *_WARNINGS, f"-I{sources}")
        self._folder = folder
        self._driver = folder / "driver.o"
        self._modules: dict[tuple[object, ...], ShimModule] = {}
        _compile(*self._command, "-c", str(sources / "driver.cpp"), "-o", str(self._driver))

    def module(self, source: Path, macros: Mapping[str, int | str]) -> ShimModule:
        """The kernels of `source`. Raises ShimError with the compiler's words if it does not compile."""
        key = (source, *sorted(macros.items()))
        if key not in self._modules:
            library = self._folder / f"{source.stem}{len(self._modules)}.so"
            defines = (f"-D{name}={value}" for name, value in macros.items())
            inputs = (str(self._driver), "-x", "c++", str(source))
            _compile(*self._command, "-shared", "-include", "shim.hpp", *defines, "-o", str(library), *inputs)
            self._modules[key] = ShimModule(library)
        return self._modules[key]


def _regions(pools: Pools, gathers: bool) -> ctypes.Array[_Region]:
    host = _Region(pools.host.ctypes.data, pools.host.nbytes, gathers)
    planes = [_Region(plane.ctypes.data, plane.nbytes, not gathers) for plane in pools.planes]
    return (_Region * (len(planes) + 1))(host, *planes)


def _guarded(values: npt.ArrayLike, dtype: npt.DTypeLike, poison: int) -> npt.NDArray[np.generic]:
    """A copy, followed by elements that lead out of every pool."""
    return np.concatenate([np.asarray(values, dtype), np.full(_POISON_COUNT, poison, dtype)])


def _compile(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise ShimError(f"{' '.join(command)}\n{result.stderr}")
