from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from hicache.errors import ConfigError, ProtocolError
from hicache.kernels.cpu import CpuCopier
from hicache.kernels.cuda_planes import CudaPlanes
from hicache.kernels.dispatch import bind

PLANES, HOST = [np.ones((2, 8), np.uint8)], np.zeros((3, 8), np.uint8)


def test_cpu_without_numba_gets_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hicache.kernels.compiled", None)
    assert isinstance(bind(PLANES, HOST), CpuCopier)


def test_cpu_with_numba_gets_the_compiled_kernels() -> None:
    compiled = pytest.importorskip("hicache.kernels.compiled", exc_type=ImportError)
    assert isinstance(bind(PLANES, HOST), compiled.CompiledCopier)


def test_planes_on_a_gpu_without_cupy_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for name in ("cuda_copier", "cuda_bounce", "cuda_choice", "cuda_paths", "cuda_source"):
        monkeypatch.delitem(sys.modules, f"hicache.kernels.{name}", raising=False)
    planes = CudaPlanes([torch.zeros(2, 8, dtype=torch.uint8)])  # where they lie does not matter so far
    with pytest.raises(ConfigError, match=r"copies on cpu need CuPy: pip install 'hicache\[cuda12\]'"):
        bind(planes, HOST, pinned=True)


@pytest.mark.parametrize(
    "tensors, message",
    [
        ([], "there are no planes"),
        ([torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(3, 8, dtype=torch.uint8)], "planes differ"),
        ([torch.zeros(2, 8)], "not rows of bytes"),
        ([torch.zeros(2, 16, dtype=torch.uint8)[:, ::2]], "not rows of bytes"),
    ],
)
def test_tensors_that_are_no_planes_are_refused(tensors: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        CudaPlanes(tensors)
