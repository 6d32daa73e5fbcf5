"""NUMA: which nodes have memory, which one a GPU hangs on, and placing memory on one (`mbind`)."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path
from typing import Literal

from hicache.errors import ConfigError
from hicache.host_pool.budget import read_text
from hicache.kernels.cuda_source import load_cupy

_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call; glibc has no wrapper for it, and libnuma is not everywhere."""

_MPOL_PREFERRED = 1
"""Take memory from the node, and from the next one once it is full.

MPOL_BIND would have the kernel kill a process whose node is full, although memory is free elsewhere; a page that lies
on the other socket costs speed only.
"""

_SYSFS_BUS = len("0000:00:00.0")
"""Drivers may write the domain in eight digits, sysfs writes four."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def memory_nodes(root: Path = Path("/")) -> list[int]:
    """Nodes that have memory this process may use; empty on a system without NUMA."""
    present = _numbers(read_text(root / "sys/devices/system/node/has_memory"))
    allowed = [
        line.partition(":")[2]
        for line in read_text(root / "proc/self/status").splitlines()
        if line.startswith("Mems_allowed_list:")
    ]
    return sorted(present & _numbers(allowed[0]) if allowed else present)


def resolve_numa(numa: int | Literal["auto"] | None, device: str) -> int | None:
    """The node that the host memory for `device` goes to; None leaves the choice to the kernel.

    "auto" is the node of a CUDA device where the machine tells it and this process may place memory on it (a
    container often may not); never one for a CPU. A number is taken as it is: `bind_to_node` refuses a wrong one.
    """
    if numa != "auto":
        return numa
    node = None if device == "cpu" else node_of_bus(_bus_id(device))
    return node if node is not None and node_problem(node) is None else None


def node_problem(node: int) -> str | None:
    """Why memory cannot be placed on `node`, None if it can. Tries it with one page."""
    nodes = memory_nodes()
    if not nodes:
        return f"node {node}: this system has no NUMA nodes, use numa: null"
    if node not in nodes:
        return f"node {node} has no memory that this process may use, choose one of {', '.join(map(str, nodes))}"
    try:
        with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as probe:
            bind_to_node(ctypes.addressof(ctypes.c_char.from_buffer(probe)), mmap.PAGESIZE, node)
    except ConfigError as error:
        return str(error)
    return None


def bind_to_node(address: int, nbytes: int, node: int) -> None:
    """Have the kernel take the pages of a mapping, which nothing has touched yet, from `node`.

    Raises ConfigError with the kernel's reason if it refuses.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        raise ConfigError(f"node {node}: no NUMA placement on {platform.machine()}, use numa: null")
    mask = (ctypes.c_ulong * (node // _LONG_BITS + 1))()
    mask[node // _LONG_BITS] = 1 << node % _LONG_BITS
    bits = len(mask) * _LONG_BITS + 1  # the kernel reads one bit less than it is told
    if _LIBC.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(bits),
        ctypes.c_ulong(0),
    ):
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(
            f"node {node}: the kernel refuses to place memory there (mbind: {reason}); "
            "in a container it may take the capability SYS_NICE; or use numa: null"
        )


def _bus_id(device: str) -> str:
    """PCI address of a CUDA device as CUDA writes it, "0000:8D:00.0"."""
    from hicache.streams.cuda import cuda_index  # here: it brings in torch

    name: str = load_cupy().cuda.runtime.deviceGetPCIBusId(cuda_index(device))
    return name


def node_of_bus(bus_id: str, root: Path = Path("/")) -> int | None:
    """The node that a PCI device is attached to; None where the machine does not say (-1, or no such file)."""
    text = read_text(root / "sys/bus/pci/devices" / bus_id.lower()[-_SYSFS_BUS:] / "numa_node").strip()
    return int(text) if text.isdigit() else None


def _numbers(text: str) -> set[int]:
    """The numbers of a list as the kernel writes it: "0-2,5"."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
