from __future__ import annotations

import sys

import pytest

from hicache.errors import ConfigError
from hicache.kernels.cpu import CpuKernels
from hicache.kernels.dispatch import select_kernels


def test_cpu_without_numba_gets_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hicache.kernels.compiled", None)
    assert isinstance(select_kernels("cpu"), CpuKernels)


def test_cpu_with_numba_gets_the_compiled_kernels() -> None:
    compiled = pytest.importorskip("hicache.kernels.compiled", exc_type=ImportError)
    assert isinstance(select_kernels("cpu"), compiled.CompiledKernels)


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'cuda:0'.*use device: cpu"):
        select_kernels("cuda:0")
