"""Which copy kernels a cache would use here, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hicache.kernels.cuda_source import FOLDER
from hicache.observability.doctor.finding import Finding
from hicache.observability.doctor.probes import Facts

AREA = "copies"


def check_copies(facts: Facts, others: Iterable[Finding]) -> Iterator[Finding]:
    """`others` are the findings on which device: cuda depends."""
    yield check_cpu_copies(facts)
    yield check_cuda_copies(facts, others, cuda_sources())


def check_cpu_copies(facts: Facts) -> Finding:
    name, numba = "device: cpu", facts.numba
    if not numba.version:
        value = "numpy: numba is not installed, batches of small pages take longer"
        return Finding(AREA, name, value, "note", "pip install 'hicache[compiled]'")
    if numba.error:
        value = f"numpy: numba {numba.version} fails: {numba.error}"
        return Finding(AREA, name, value, "broken", "pip install --upgrade 'hicache[compiled]' numpy")
    return Finding(AREA, name, f"compiled with numba {numba.version}")


def check_cuda_copies(facts: Facts, others: Iterable[Finding], sources: list[str]) -> Finding:
    name = "device: cuda"
    if not sources:
        value = "this installation lacks the .cu files of hicache.kernels"
        return Finding(AREA, name, value, "broken", "pip install --force-reinstall --no-deps hicache")
    needs = [finding.name for finding in others if finding.status in ("missing", "broken")]
    if not needs and facts.driver.gpus and facts.torch.available:
        return Finding(AREA, name, f"CUDA kernels from {', '.join(sources)}, compiled at first use")
    return Finding(AREA, name, "not on this machine", "missing", "see GPU and CuPy above")


def cuda_sources() -> list[str]:
    """Names of the .cu files that came with this installation."""
    return sorted(path.name for path in FOLDER.glob("*.cu"))
