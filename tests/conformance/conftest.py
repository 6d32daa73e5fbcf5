"""The shim that runs CUDA sources on the CPU, compiled once for a run of the tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hicache.testing.cuda_shim import Shim


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile the CUDA sources with")
    return Shim(compiler, Path(__file__).parent / "cuda_shim", tmp_path_factory.mktemp("shim"))
