"""Driver, GPUs, and whether torch can use them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hicache.config.units import format_bytes
from hicache.host_pool.budget import read_text
from hicache.host_pool.numa import node_of_bus
from hicache.observability.doctor.facts import DriverFacts, Gpu, TorchFacts
from hicache.observability.doctor.finding import Finding, dotted

AREA = "GPU"

BRANCHES = {12: "525", 13: "580"}
"""The first driver branch that runs each major version of CUDA."""

_NVIDIA = "0x10de"


def check_gpu(driver: DriverFacts, torch: TorchFacts, root: Path = Path("/")) -> Iterator[Finding]:
    """`root` is where /sys is read."""
    yield check_driver(driver, root)
    yield from (check_card(index, gpu, root) for index, gpu in enumerate(driver.gpus))
    yield check_torch_cuda(driver, torch)


def check_driver(driver: DriverFacts, root: Path) -> Finding:
    if not driver.installed and not driver.error:
        mend = "device: cuda needs an NVIDIA GPU and its driver"
        if _has_nvidia_card(root):
            mend = "the machine has an NVIDIA GPU: install its driver; start a container with --gpus all"
        return Finding(AREA, "driver", "none: there is no libcuda.so.1", "missing", mend)
    if driver.error:
        mend = "see whether nvidia-smi works; restart the machine if the driver was just updated"
        return Finding(AREA, "driver", f"fails: {driver.error}", "broken", mend)
    value = f"runs up to CUDA {dotted(driver.version)}"
    if driver.gpus:
        return Finding(AREA, "driver", value)
    return Finding(AREA, "driver", f"{value}, shows no GPU", "missing", _why_no_gpu())


def check_card(index: int, gpu: Gpu, root: Path) -> Finding:
    value = (
        f"{gpu.name}, {format_bytes(gpu.total_bytes)}, {gpu.multiprocessors} multiprocessors, "
        f"compute capability {dotted(gpu.capability)}, PCI {gpu.pci}{_numa_node(gpu.pci, root)}"
    )
    return Finding(AREA, f"GPU {index}", value)


def check_torch_cuda(driver: DriverFacts, torch: TorchFacts) -> Finding:
    name = "torch.cuda"
    if not torch.version:
        return Finding(AREA, name, "no: torch cannot be imported", "missing", "mend torch first")
    if torch.cuda is None:
        return Finding(AREA, name, "no: this torch is built without CUDA", "missing", _torch_for(driver))
    built = f"torch is built for CUDA {dotted(torch.cuda)}"
    if torch.available:
        return Finding(AREA, name, f"yes: {built}")
    if not driver.installed:
        return Finding(AREA, name, f"no: {built}, there is no driver", "missing", "install the driver")
    if driver.version and driver.version[0] < torch.cuda[0]:
        value = f"no: {built}, the driver is too old, it runs up to CUDA {dotted(driver.version)}"
        branch = BRANCHES.get(torch.cuda[0])
        newer = f"driver {branch} or newer" if branch else "a newer driver"
        return Finding(AREA, name, value, "broken", f"install {newer}, or {_torch_for(driver)}")
    if not driver.gpus:
        return Finding(AREA, name, f"no: {built}, the driver shows no GPU", "missing", "mend the driver first")
    value = f"no: {built}; {torch.error or 'torch.cuda.is_available() is False and gives no reason'}"
    return Finding(AREA, name, value, "broken", _torch_for(driver))


def _torch_for(driver: DriverFacts) -> str:
    version = f" for CUDA {driver.version[0]}" if driver.version else ""
    return f"install a torch built{version or ' with CUDA'}: https://pytorch.org/get-started"


def _why_no_gpu() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES is {visible!r}: unset it, or name a GPU that is there"
    return "start a container with --gpus all; see what nvidia-smi lists"


def _has_nvidia_card(root: Path) -> bool:
    """A display or 3D controller of NVIDIA on the PCI bus."""
    cards = root.glob("sys/bus/pci/devices/*")
    return any(
        read_text(card / "vendor").strip() == _NVIDIA and read_text(card / "class").startswith("0x03") for card in cards
    )


def _numa_node(pci: str, root: Path) -> str:
    """A note on where the card is attached; nothing on a machine that does not tell (-1)."""
    node = node_of_bus(pci, root)
    return f", NUMA node {node}" if node is not None else ""
