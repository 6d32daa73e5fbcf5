from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from hicache.errors import ConfigError, ProtocolError
from hicache.kernels.cpu import CpuCopier
from hicache.kernels.cuda_planes import CudaPlanes
from hicache.kernels.dispatch import bind
from hicache.kernels.quantised import QuantisedCopier
from hicache.layout import KVLayout
from hicache.storage_backends.codecs import create_quantiser

PLANES, HOST = [np.ones((2, 8), np.uint8)], np.zeros((3, 8), np.uint8)


def test_cpu_without_numba_gets_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hicache.kernels.compiled", None)
    assert isinstance(bind(PLANES, HOST), CpuCopier)


def test_cpu_with_numba_gets_the_compiled_kernels() -> None:
    compiled = pytest.importorskip("hicache.kernels.compiled", exc_type=ImportError)
    assert isinstance(bind(PLANES, HOST), compiled.CompiledCopier)


def test_a_quantised_host_pool_gets_the_copier_that_quantises() -> None:
    quantiser = create_quantiser("int8", KVLayout(1, 1, 4, 1, "float16", "mla"))
    assert isinstance(bind(PLANES, HOST, quantiser=quantiser), QuantisedCopier)


def test_planes_on_a_gpu_without_cupy_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    planes = CudaPlanes([torch.zeros(2, 8, dtype=torch.uint8)])  # where they lie does not matter so far
    with pytest.raises(ConfigError, match=r"a CUDA device needs CuPy.*install hicache\[cuda12\] or hicache\[cuda13\]"):
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
