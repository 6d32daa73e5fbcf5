"""What torch, CuPy and numba say when they are imported here. A broken installation may raise anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any

from hicache.observability.doctor.facts import CupyFacts, NumbaFacts, TorchFacts, cuda_version
from hicache.observability.doctor.finding import in_one_line


def read_torch() -> TorchFacts:
    try:
        import torch
    except Exception as error:
        return TorchFacts(error=in_one_line(error))
    built = torch.version.cuda
    if built is None:
        return TorchFacts(torch.__version__)
    major, minor = built.split(".")[:2]
    facts = TorchFacts(torch.__version__, (int(major), int(minor)), torch.cuda.is_available())
    return facts if facts.available else replace(facts, error=_failure(torch.cuda.init))


def read_cupy() -> CupyFacts:
    try:
        import cupy
    except Exception as error:
        return CupyFacts(error=in_one_line(error))
    facts = CupyFacts(version=cupy.__version__)
    try:
        facts = replace(facts, cuda=cuda_version(cupy.cuda.driver.get_build_version()))
        facts = replace(facts, devices=cupy.cuda.runtime.getDeviceCount())
    except Exception as error:
        facts = replace(facts, error=in_one_line(error))
    try:
        major, minor = cupy.cuda.nvrtc.getVersion()
        return replace(facts, nvrtc=(major, minor))
    except Exception as error:
        return replace(facts, nvrtc_error=in_one_line(error))


def read_numba() -> NumbaFacts:
    try:
        import hicache.kernels.compiled  # noqa: F401 - the copies are compiled when it is imported
    except Exception as error:
        return NumbaFacts(error=in_one_line(error))
    return NumbaFacts()


def cupy_wheels() -> tuple[str, ...]:
    """The installed distributions that bring the package cupy; more than one overwrite each other's files."""
    names = {str(distribution.metadata["Name"]).lower() for distribution in metadata.distributions()}
    prefixes = ("cupy-cuda", "cupy-rocm")
    return tuple(sorted(name for name in names if name in ("cupy", "amd-cupy") or name.startswith(prefixes)))


def installed(distribution: str) -> str:
    """The version of an installed distribution; empty if there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _failure(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return in_one_line(error)
    return ""
