"""CuPy: which build, does it fit torch and the driver, does its compiler load."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hicache.observability.doctor.facts import CupyFacts, DriverFacts, TorchFacts
from hicache.observability.doctor.finding import Finding, dotted

AREA = "CuPy"


def check_cupy(driver: DriverFacts, torch: TorchFacts, cupy: CupyFacts) -> Iterator[Finding]:
    yield check_wheel(driver, torch, cupy)
    if cupy.version and len(cupy.wheels) == 1:
        yield check_nvrtc(cupy)


def extra_for(driver: DriverFacts, torch: TorchFacts) -> str | None:
    """The extra that fits torch, or the driver where torch has no CUDA; None if neither tells."""
    version = torch.cuda or driver.version
    return None if version is None or version[0] < 12 else f"cuda{min(version[0], 13)}"


def check_wheel(driver: DriverFacts, torch: TorchFacts, cupy: CupyFacts) -> Finding:
    install = _install(extra_for(driver, torch))
    if not cupy.wheels:
        return Finding(AREA, "package", "not installed", "missing", f"for device: cuda: {install}")
    if len(cupy.wheels) > 1:
        value = f"{' and '.join(cupy.wheels)} are installed over one another"
        return Finding(AREA, "package", value, "broken", _replace(cupy, install))
    wheel = f"{cupy.wheels[0]} {cupy.version}".strip()
    if not cupy.version:
        return _not_imported(driver, cupy, _replace(cupy, install))
    if problem := _mismatch(driver, torch, cupy):
        return Finding(AREA, "package", f"{wheel}: {problem}", "broken", _replace(cupy, install))
    if driver.gpus and not cupy.devices:
        value = f"{wheel} finds no GPU: {cupy.error or 'it gives no reason'}"
        return Finding(AREA, "package", value, "broken", _replace(cupy, install))
    if not driver.gpus:
        return Finding(AREA, "package", f"{wheel}, built for CUDA {dotted(cupy.cuda)}, unused without a GPU", "note")
    return Finding(AREA, "package", f"{wheel}, built for CUDA {dotted(cupy.cuda)}")


def check_nvrtc(cupy: CupyFacts) -> Finding:
    if cupy.nvrtc is not None:
        return Finding(AREA, "NVRTC", f"{dotted(cupy.nvrtc)}: compiles the copy kernels at run time")
    major = _major(cupy)
    package = f"cupy-cuda{major}x[ctk]" if major else "cuda-toolkit[nvrtc,cudart]"
    mend = f"pip install '{package}', or a torch built for CUDA {major or ''}".rstrip() + ", which brings it"
    return Finding(AREA, "NVRTC", f"does not load: {cupy.nvrtc_error}", "missing", mend)


def _not_imported(driver: DriverFacts, cupy: CupyFacts, mend: str) -> Finding:
    value = f"{cupy.wheels[0]} does not import: {cupy.error}"
    if not driver.installed and "libcuda" in cupy.error:  # CuPy 13 and older ones
        return Finding(AREA, "package", value, "note", "needs the driver, like device: cuda")
    return Finding(AREA, "package", value, "broken", mend)


def _mismatch(driver: DriverFacts, torch: TorchFacts, cupy: CupyFacts) -> str:
    """Why this build does not fit the others; empty if it does."""
    major = _major(cupy)
    if major is None:
        return "not built for CUDA"
    if torch.cuda and major != torch.cuda[0]:
        return f"built for CUDA {major}, torch for CUDA {dotted(torch.cuda)}"
    if driver.version and major > driver.version[0]:
        return f"built for CUDA {major}, the driver runs up to CUDA {dotted(driver.version)}"
    return ""


def _major(cupy: CupyFacts) -> int | None:
    """From the wheel's name; a build without CUDA in its name (`cupy`: from source or conda) says it itself."""
    named = re.match(r"cupy-cuda(\d\d)", cupy.wheels[0])
    if named:
        return int(named[1])
    return cupy.cuda[0] if cupy.cuda and cupy.wheels[0] == "cupy" else None


def _install(extra: str | None) -> str:
    if extra is None:
        return "pip install 'hicache[cuda13]' ('hicache[cuda12]' for a driver of CUDA 12)"
    return f"pip install 'hicache[{extra}]'"


def _replace(cupy: CupyFacts, install: str) -> str:
    return f"pip uninstall -y {' '.join(cupy.wheels)} && {install}"
