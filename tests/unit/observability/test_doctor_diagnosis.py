from __future__ import annotations

from dataclasses import replace

import pytest

from hicache.observability.doctor.copies import check_copies, check_cpu_copies, check_cuda_copies, cuda_sources
from hicache.observability.doctor.diagnosis import diagnose, is_broken, verdict
from hicache.observability.doctor.facts import CupyFacts, DriverFacts, Gpu, NumbaFacts, TorchFacts
from hicache.observability.doctor.finding import Finding
from hicache.observability.doctor.probes import Facts

H200 = Gpu("NVIDIA H200", 150_754_820_096, 132, (9, 0), "0000:1a:00.0")
NUMBA = NumbaFacts("0.68.1")
NO_GPU = Facts(DriverFacts(), TorchFacts("2.13.0+cpu"), CupyFacts(), NUMBA)
ALL_FINE = Facts(
    DriverFacts(True, (13, 0), (H200, H200)),
    TorchFacts("2.11.0+cu130", (13, 0), True),
    CupyFacts(("cupy-cuda13x",), "14.2.0", (13, 2), (13, 0), devices=2),
    NUMBA,
)
NEEDS = "an NVIDIA GPU with its driver, a torch built for CUDA, and CuPy (hicache[cuda12] or hicache[cuda13])"


def test_copies_on_the_cpu() -> None:
    assert check_cpu_copies(NO_GPU) == Finding("copies", "device: cpu", "compiled with numba 0.68.1")
    plain = check_cpu_copies(replace(NO_GPU, numba=NumbaFacts()))
    assert (plain.status, plain.mend) == ("note", "pip install 'hicache[compiled]'")
    assert plain.value.startswith("numpy: numba is not installed")
    broken = check_cpu_copies(replace(NO_GPU, numba=NumbaFacts("0.60", "ImportError: Numba needs NumPy 2.0")))
    assert (broken.status, broken.value) == ("broken", "numpy: numba 0.60 fails: ImportError: Numba needs NumPy 2.0")


def test_copies_on_a_gpu() -> None:
    found = check_cuda_copies(ALL_FINE, [], ["copy.cu", "quantise.cu"])
    assert (found.status, found.value) == ("ok", "CUDA kernels from copy.cu, quantise.cu, compiled at first use")
    assert check_cuda_copies(ALL_FINE, [], []).status == "broken"
    assert check_cuda_copies(ALL_FINE, [Finding("CuPy", "NVRTC", "no", "missing")], ["copy.cu"]).status == "missing"
    assert check_cuda_copies(NO_GPU, [], ["copy.cu"]).status == "missing"


def test_the_cuda_sources_are_found() -> None:
    assert "copy.cu" in cuda_sources()
    assert [finding.name for finding in check_copies(NO_GPU, [])] == ["device: cpu", "device: cuda"]


def test_without_a_gpu_nothing_is_broken() -> None:
    findings = diagnose(facts=NO_GPU)
    assert not is_broken(findings)
    assert verdict(findings) == (f"device: cpu copies with numba; no GPU driver found: device: cuda needs {NEEDS}")


def test_with_everything() -> None:
    findings = diagnose(facts=ALL_FINE)
    assert not is_broken(findings)
    assert verdict(findings) == "device: cpu copies with numba; device: cuda works, 2 x NVIDIA H200"


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (replace(ALL_FINE, cupy=CupyFacts(), numba=NumbaFacts()),
         "device: cpu copies with numpy; device: cuda does not work yet: "
         "CuPy: for device: cuda: pip install 'hicache[cuda13]'"),
        (replace(ALL_FINE, torch=TorchFacts("2.13.0+cpu")),
         "device: cpu copies with numba; device: cuda does not work yet: "
         "GPU: install a torch built for CUDA 13: https://pytorch.org/get-started"),
        (replace(ALL_FINE, driver=DriverFacts(True, (13, 0))),
         f"device: cpu copies with numba; no usable GPU found: device: cuda needs {NEEDS}"),
    ],
)  # fmt: skip
def test_something_is_missing(facts: Facts, sentence: str) -> None:
    findings = diagnose(facts=facts)
    assert not is_broken(findings)
    assert verdict(findings) == sentence


def test_something_is_broken() -> None:
    two = replace(ALL_FINE, cupy=replace(ALL_FINE.cupy, wheels=("cupy-cuda12x", "cupy-cuda13x")))
    findings = diagnose(facts=two)
    assert is_broken(findings)
    assert verdict(findings) == (
        "broken: CuPy package; device: cpu copies with numba; device: cuda does not work yet: CuPy: "
        "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'hicache[cuda13]'"
    )
    assert is_broken(diagnose(facts=replace(NO_GPU, torch=TorchFacts(error="ImportError: no"))))


def test_a_check_is_named_once() -> None:
    names = [(finding.area, finding.name) for finding in diagnose(facts=ALL_FINE)]
    assert len(set(names)) == len(names)
    areas = [area for area, _ in names]
    assert sorted(set(areas), key=areas.index) == ["software", "GPU", "CuPy", "copies", "memory", "disk", "extras"]
    assert areas == sorted(areas, key=areas.index), "areas are together"
