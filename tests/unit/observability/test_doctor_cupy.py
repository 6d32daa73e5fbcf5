from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import pytest

from hicache.observability.doctor.cupy_wheel import check_cupy, extra_for
from hicache.observability.doctor.facts import CupyFacts, DriverFacts, Gpu, TorchFacts
from hicache.observability.doctor.finding import Finding, in_one_line
from hicache.observability.doctor.readers import cupy_wheels

GPU = Gpu("NVIDIA H200", 150_754_820_096, 132, (9, 0), "0000:1a:00.0")
DRIVER = DriverFacts(True, (13, 0), (GPU,))
TORCH = TorchFacts("2.11.0+cu130", (13, 0), True)
CUPY = CupyFacts(("cupy-cuda13x",), "14.2.0", (13, 2), (13, 0), devices=1)
NO_DRIVER = DriverFacts()
CPU_TORCH = TorchFacts("2.13.0+cpu")


def package(driver: DriverFacts, torch: TorchFacts, cupy: CupyFacts) -> Finding:
    return next(check_cupy(driver, torch, cupy))


def test_everything_fine() -> None:
    assert list(check_cupy(DRIVER, TORCH, CUPY)) == [
        Finding("CuPy", "package", "cupy-cuda13x 14.2.0, built for CUDA 13.2"),
        Finding("CuPy", "NVRTC", "13.0: compiles the copy kernels at run time"),
    ]


@pytest.mark.parametrize(
    ("driver", "torch", "extra"),
    [
        (DRIVER, TORCH, "cuda13"),
        (DRIVER, replace(TORCH, cuda=(12, 8)), "cuda12"),
        (replace(DRIVER, version=(12, 4)), CPU_TORCH, "cuda12"),
        (replace(DRIVER, version=(14, 0)), CPU_TORCH, "cuda13"),
        (replace(DRIVER, version=(11, 8)), CPU_TORCH, None),
        (NO_DRIVER, CPU_TORCH, None),
    ],
)
def test_the_extra_is_that_of_torch_else_of_the_driver(
    driver: DriverFacts, torch: TorchFacts, extra: str | None
) -> None:
    assert extra_for(driver, torch) == extra


@pytest.mark.parametrize(
    ("driver", "torch", "mend"),
    [
        (DRIVER, TORCH, "for device: cuda: pip install 'hicache[cuda13]'"),
        (NO_DRIVER, CPU_TORCH,
         "for device: cuda: pip install 'hicache[cuda13]' ('hicache[cuda12]' for a driver of CUDA 12)"),
    ],
)  # fmt: skip
def test_not_installed(driver: DriverFacts, torch: TorchFacts, mend: str) -> None:
    assert list(check_cupy(driver, torch, CupyFacts())) == [
        Finding("CuPy", "package", "not installed", "missing", mend)
    ]


MEND = "pip uninstall -y {} && pip install 'hicache[{}]'"


@pytest.mark.parametrize(
    ("driver", "torch", "wheels", "value", "mend"),
    [
        (DRIVER, TORCH, "cupy-cuda12x", "cupy-cuda12x 14.2.0: built for CUDA 12, torch for CUDA 13.0",
         MEND.format("cupy-cuda12x", "cuda13")),
        (replace(DRIVER, version=(12, 8)), CPU_TORCH, "cupy-cuda13x",
         "cupy-cuda13x 14.2.0: built for CUDA 13, the driver runs up to CUDA 12.8",
         MEND.format("cupy-cuda13x", "cuda12")),
        (DRIVER, TORCH, "cupy-cuda12x cupy-cuda13x", "cupy-cuda12x and cupy-cuda13x are installed over one another",
         MEND.format("cupy-cuda12x cupy-cuda13x", "cuda13")),
        (DRIVER, TORCH, "cupy-rocm-7-0", "cupy-rocm-7-0 14.2.0: not built for CUDA",
         MEND.format("cupy-rocm-7-0", "cuda13")),
    ],
)  # fmt: skip
def test_a_wheel_that_does_not_fit(driver: DriverFacts, torch: TorchFacts, wheels: str, value: str, mend: str) -> None:
    found = package(driver, torch, replace(CUPY, wheels=tuple(wheels.split())))
    assert found == Finding("CuPy", "package", value, "broken", mend)


@pytest.mark.parametrize(("cuda", "status"), [((13, 2), "ok"), ((12, 9), "broken")])
def test_a_build_without_cuda_in_its_name_says_it_itself(cuda: tuple[int, int], status: str) -> None:
    assert package(DRIVER, TORCH, replace(CUPY, wheels=("cupy",), cuda=cuda)).status == status


def test_an_import_that_fails_is_reported() -> None:
    broken = CupyFacts(("cupy-cuda13x",), error="ImportError: numpy.core.multiarray failed to import")
    assert list(check_cupy(DRIVER, TORCH, broken)) == [
        Finding(
            "CuPy",
            "package",
            "cupy-cuda13x does not import: ImportError: numpy.core.multiarray failed to import",
            "broken",
            MEND.format("cupy-cuda13x", "cuda13"),
        )
    ]


def test_an_import_that_only_lacks_the_driver_is_not_broken() -> None:
    facts = CupyFacts(("cupy-cuda12x",), error="ImportError: libcuda.so.1: cannot open shared object file")
    assert package(NO_DRIVER, CPU_TORCH, facts).status == "note"
    assert package(DRIVER, TORCH, facts).status == "broken"


def test_a_gpu_that_only_the_driver_sees() -> None:
    found = package(DRIVER, TORCH, replace(CUPY, devices=0, error="CUDARuntimeError: cudaErrorUnknown"))
    assert found.status == "broken"
    assert found.value == "cupy-cuda13x 14.2.0 finds no GPU: CUDARuntimeError: cudaErrorUnknown"


def test_nothing_to_do_for_a_wheel_without_a_gpu() -> None:
    cupy = replace(CUPY, devices=0, error="CUDARuntimeError: cudaErrorInsufficientDriver")
    found = package(NO_DRIVER, CPU_TORCH, cupy)
    assert found == Finding("CuPy", "package", "cupy-cuda13x 14.2.0, built for CUDA 13.2, unused without a GPU", "note")


def test_no_run_time_compiler() -> None:
    found = list(check_cupy(DRIVER, TORCH, replace(CUPY, nvrtc=None, nvrtc_error="OSError: libnvrtc.so.13")))[1]
    assert (found.name, found.status, found.value) == ("NVRTC", "missing", "does not load: OSError: libnvrtc.so.13")
    assert found.mend == "pip install 'cupy-cuda13x[ctk]', or a torch built for CUDA 13, which brings it"


def test_wheels_are_found_by_their_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["numpy", "CuPy-cuda13x", "cupy-cuda12x", "cupyx-tools", None, "cupy"]

    def distributions() -> Iterator[SimpleNamespace]:
        yield from (SimpleNamespace(metadata={"Name": name}) for name in names)

    monkeypatch.setattr(metadata, "distributions", distributions)
    assert cupy_wheels() == ("cupy", "cupy-cuda12x", "cupy-cuda13x")


def test_the_cause_is_taken_out_of_a_framed_message() -> None:
    frame = "=" * 64
    text = f"\n{frame}\nFailed to import CuPy.\n\nOriginal error:\n  ImportError: libcuda.so.1: no such file\n{frame}\n"
    assert in_one_line(ImportError(text)) == "ImportError: libcuda.so.1: no such file"
    assert in_one_line(KeyError()) == "KeyError"
