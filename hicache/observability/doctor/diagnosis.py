"""All checks, and one sentence on what they come to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hicache.observability.doctor import copies, cupy_wheel, disk, gpu, machine, software
from hicache.observability.doctor.finding import Finding
from hicache.observability.doctor.probes import Facts, probe_all


def diagnose(path: Path | None = None, facts: Facts | None = None) -> list[Finding]:
    """Every check, grouped by area. `path`: a folder for the disk tier. The facts are probed unless they are given."""
    facts = facts or probe_all()
    cuda = [*gpu.check_gpu(facts.driver, facts.torch), *cupy_wheel.check_cupy(facts.driver, facts.torch, facts.cupy)]
    return [
        *software.check_versions(facts.torch),
        *cuda,
        *copies.check_copies(facts, cuda),
        *machine.check_memory(),
        *disk.check_disk(path),
        *software.check_extras(),
    ]


def is_broken(findings: Sequence[Finding]) -> bool:
    return any(finding.status == "broken" for finding in findings)


def verdict(findings: Sequence[Finding]) -> str:
    """One sentence: what is broken, how copies run on the CPU, whether device: cuda works."""
    parts = [f"broken: {', '.join(names)}"] if (names := _names(findings, "broken")) else []
    cpu = _find(findings, copies.AREA, "device: cpu")
    parts.append(f"device: cpu copies with {'numba' if cpu.value.startswith('compiled') else 'numpy'}")
    return "; ".join([*parts, _cuda_part(findings)])


def _cuda_part(findings: Sequence[Finding]) -> str:
    if _find(findings, copies.AREA, "device: cuda").status == "ok":
        cards = [finding for finding in findings if finding.area == gpu.AREA and finding.name.startswith("GPU ")]
        return f"device: cuda works, {len(cards)} x {cards[0].value.partition(',')[0]}"
    driver = _find(findings, gpu.AREA, "driver")
    if driver.status != "ok":
        lacks = "no GPU driver" if driver.value.startswith("none") else "no usable GPU"
        needs = "an NVIDIA GPU with its driver, a torch built for CUDA, and CuPy (hicache[cuda12] or hicache[cuda13])"
        return f"{lacks} found: device: cuda needs {needs}"
    areas = (gpu.AREA, cupy_wheel.AREA, copies.AREA)
    mends = [f"{f.area}: {f.mend}" for f in findings if f.area in areas and f.status in ("missing", "broken")]
    return f"device: cuda does not work yet: {mends[0]}"


def _names(findings: Sequence[Finding], status: str) -> list[str]:
    return [f"{finding.area} {finding.name}" for finding in findings if finding.status == status]


def _find(findings: Sequence[Finding], area: str, name: str) -> Finding:
    return next(finding for finding in findings if (finding.area, finding.name) == (area, name))
