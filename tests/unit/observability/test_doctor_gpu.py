from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache.observability.doctor.driver import read_driver
from hicache.observability.doctor.facts import DriverFacts, Gpu, TorchFacts, cuda_version
from hicache.observability.doctor.finding import Finding
from hicache.observability.doctor.gpu import check_card, check_driver, check_gpu, check_torch_cuda

H200 = Gpu("NVIDIA H200", 150_754_820_096, 132, (9, 0), "0000:1a:00.0")
DRIVER = DriverFacts(True, (13, 0), (H200,))
TORCH = TorchFacts("2.11.0+cu130", (13, 0), True)
UNUSABLE = replace(TORCH, available=False)


class FakeDriver:
    """Two GPUs, asked like libcuda: results go to what the first argument points to, the return is an error code."""

    init = 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 12080
        return 0

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 40 + ordinal
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, device: int) -> int:
        total._obj.value = device << 30
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        value._obj.value = {16: 108, 75: 8, 76: 0}[attribute]
        return 0

    def cuDeviceGetName(self, buffer: Any, size: int, device: int) -> int:
        buffer.value = f"Card {device}".encode()
        return 0

    def cuDeviceGetPCIBusId(self, buffer: Any, size: int, device: int) -> int:
        buffer.value = f"0000:{device}:00.0".upper().encode() + b"A"
        return 0

    def cuGetErrorName(self, code: int, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_UNKNOWN"
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"unknown error"
        return 0


def test_the_driver_is_read_without_a_context() -> None:
    facts = read_driver(lambda name: FakeDriver())
    cards = tuple(Gpu(f"Card {n}", n << 30, 108, (8, 0), f"0000:{n}:00.0a") for n in (40, 41))
    assert facts == DriverFacts(True, (12, 8), cards)


@pytest.mark.parametrize(("code", "error"), [(100, ""), (999, "CUDA_ERROR_UNKNOWN: unknown error")])
def test_a_driver_that_does_not_start(code: int, error: str) -> None:
    driver = FakeDriver()
    driver.init = code
    assert read_driver(lambda name: driver) == DriverFacts(True, (12, 8), error=error)


def test_a_library_that_is_not_there_or_not_loadable() -> None:
    assert read_driver(lambda name: ctypes.CDLL(f"{name}.that-is-not-there")) == DriverFacts()

    def damaged(name: str) -> Any:
        raise OSError(f"{name}: invalid ELF header")

    facts = read_driver(damaged)
    assert facts == DriverFacts(error="OSError: libcuda.so.1: invalid ELF header")
    assert check_driver(facts, Path("/")).status == "broken"


def test_cuda_versions() -> None:
    assert (cuda_version(13020), cuda_version(12080)) == ((13, 2), (12, 8))


def test_no_driver_and_no_card(tmp_path: Path) -> None:
    assert check_driver(DriverFacts(), tmp_path) == Finding(
        "GPU", "driver", "none: there is no libcuda.so.1", "missing", "device: cuda needs an NVIDIA GPU and its driver"
    )


@pytest.mark.parametrize(("kind", "found"), [("0x030200", True), ("0x060400", False)])
def test_a_card_without_a_driver_is_seen_on_the_bus(tmp_path: Path, kind: str, found: bool) -> None:
    card = tmp_path / "sys/bus/pci/devices/0000:1a:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text(f"{kind}\n")
    assert ("start a container with --gpus all" in check_driver(DriverFacts(), tmp_path).mend) is found


def test_a_driver_that_shows_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = check_driver(DriverFacts(True, (13, 0)), tmp_path)
    assert (found.status, found.value) == ("missing", "runs up to CUDA 13.0, shows no GPU")
    assert found.mend.startswith("start a container with --gpus all")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check_driver(DriverFacts(True, (13, 0)), tmp_path).mend.startswith("CUDA_VISIBLE_DEVICES is '': unset it")


@pytest.mark.parametrize(("node", "note"), [("1", ", NUMA node 1"), ("-1", "")])
def test_a_card(tmp_path: Path, node: str, note: str) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:1a:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{node}\n")
    value = "NVIDIA H200, 140.40 GiB, 132 multiprocessors, compute capability 9.0, PCI 0000:1a:00.0"
    assert check_card(0, H200, tmp_path) == Finding("GPU", "GPU 0", value + note)


def test_everything_fine(tmp_path: Path) -> None:
    findings = list(check_gpu(DRIVER, TORCH, tmp_path))
    assert [(finding.name, finding.status, finding.mend) for finding in findings] == [
        ("driver", "ok", ""), ("GPU 0", "ok", ""), ("torch.cuda", "ok", ""),
    ]  # fmt: skip
    assert findings[2].value == "yes: torch is built for CUDA 13.0"


@pytest.mark.parametrize(
    ("driver", "torch", "status", "value", "mend"),
    [
        (DRIVER, TorchFacts(error="no"), "missing", "no: torch cannot be imported", "mend torch first"),
        (DRIVER, TorchFacts("2.13.0+cpu"), "missing", "no: this torch is built without CUDA",
         "install a torch built for CUDA 13: https://pytorch.org/get-started"),
        (DriverFacts(), UNUSABLE, "missing", "no: torch is built for CUDA 13.0, there is no driver",
         "install the driver"),
        (replace(DRIVER, version=(12, 4)), UNUSABLE, "broken",
         "no: torch is built for CUDA 13.0, the driver is too old, it runs up to CUDA 12.4",
         "install driver 580 or newer, or install a torch built for CUDA 12: https://pytorch.org/get-started"),
        (replace(DRIVER, gpus=()), UNUSABLE, "missing", "no: torch is built for CUDA 13.0, the driver shows no GPU",
         "mend the driver first"),
        (DRIVER, replace(UNUSABLE, error="RuntimeError: forked"), "broken",
         "no: torch is built for CUDA 13.0; RuntimeError: forked",
         "install a torch built for CUDA 13: https://pytorch.org/get-started"),
    ],
)  # fmt: skip
def test_why_torch_cannot_use_it(driver: DriverFacts, torch: TorchFacts, status: str, value: str, mend: str) -> None:
    found = check_torch_cuda(driver, torch)
    assert (found.status, found.value, found.mend) == (status, value, mend)


def test_an_older_minor_version_of_the_driver_is_no_failure() -> None:
    """CUDA promises that a driver runs what is built for its own major version."""
    assert check_torch_cuda(replace(DRIVER, version=(12, 4)), replace(TORCH, cuda=(12, 8))).status == "ok"
