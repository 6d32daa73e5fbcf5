"""What the driver, torch, CuPy and numba say of themselves: plain data, that of the parts that fail included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

CudaVersion: TypeAlias = tuple[int, int]
"""Major and minor, as in CUDA 13.0."""


@dataclass(frozen=True)
class Gpu:
    """`pci` is the bus id, such as "0000:1a:00.0"."""

    name: str
    total_bytes: int
    multiprocessors: int
    capability: tuple[int, int]
    pci: str


@dataclass(frozen=True)
class DriverFacts:
    """`installed`: libcuda.so.1 loads. `version`: the newest CUDA it runs. `error`: why it fails, if it does."""

    installed: bool = False
    version: CudaVersion | None = None
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class TorchFacts:
    """`version` is empty where torch cannot be imported, `cuda` is None for a build without CUDA."""

    version: str = ""
    cuda: CudaVersion | None = None
    available: bool = False
    error: str = ""


@dataclass(frozen=True)
class CupyFacts:
    """`wheels`: the installed distributions that bring the package. `version` is empty where it cannot be imported.

    `cuda` is what it was built for. `nvrtc` is None where the run-time compiler does not load, for `nvrtc_error`.
    """

    wheels: tuple[str, ...] = ()
    version: str = ""
    cuda: CudaVersion | None = None
    nvrtc: CudaVersion | None = None
    nvrtc_error: str = ""
    devices: int = 0
    error: str = ""


@dataclass(frozen=True)
class NumbaFacts:
    """Whether the compiled copy kernels can be built. `version` is empty where numba is not installed."""

    version: str = ""
    error: str = ""


def cuda_version(number: int) -> CudaVersion:
    """CUDA's way to write a version: 13020 is 13.2."""
    return number // 1000, number % 1000 // 10
