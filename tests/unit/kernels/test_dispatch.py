from __future__ import annotations

import pytest

from hicache.errors import ConfigError
from hicache.kernels.cpu import CpuKernels
from hicache.kernels.dispatch import select_kernels


def test_cpu_gets_the_cpu_kernels() -> None:
    assert isinstance(select_kernels("cpu"), CpuKernels)


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'cuda:0'.*use device: cpu"):
        select_kernels("cuda:0")
