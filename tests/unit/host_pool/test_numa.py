from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

from hicache.errors import ConfigError
from hicache.host_pool import numa as numa_module
from hicache.host_pool.numa import bind_to_node, memory_nodes, node_problem, resolve_numa


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("present", "status", "nodes"),
    [
        ("0\n", "", [0]),
        ("0-2,5\n", "", [0, 1, 2, 5]),
        ("0-1\n", "Name:\tx\nMems_allowed:\t2\nMems_allowed_list:\t1,3-4\n", [1]),
        ("\n", "Mems_allowed_list:\t0\n", []),
    ],
)
def test_nodes_with_memory_that_the_process_may_use(
    tmp_path: Path, present: str, status: str, nodes: list[int]
) -> None:
    write(tmp_path / "sys/devices/system/node/has_memory", present)
    write(tmp_path / "proc/self/status", status)
    assert memory_nodes(tmp_path) == nodes


def test_a_system_without_numa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_nodes(tmp_path) == []
    monkeypatch.setattr(numa_module, "memory_nodes", list)
    assert node_problem(0) == "node 0: this system has no NUMA nodes, use numa: null"


def test_a_node_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa_module, "memory_nodes", lambda: [0, 2])
    assert node_problem(1) == "node 1 has no memory that this process may use, choose one of 0, 2"


def test_a_refusal_says_what_the_kernel_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def syscall(self, *arguments: object) -> int:
            ctypes.set_errno(errno.EPERM)
            return -1

    monkeypatch.setattr(numa_module, "memory_nodes", lambda: [0])
    monkeypatch.setattr(numa_module, "_LIBC", Refusing())
    problem = node_problem(0)
    assert problem is not None
    assert f"(mbind: {os.strerror(errno.EPERM)})" in problem and "SYS_NICE" in problem


def test_a_machine_whose_system_call_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="no NUMA placement on riscv64, use numa: null"):
        bind_to_node(0, 4096, 0)


@pytest.mark.parametrize(
    ("said", "usable", "node"), [("1\n", True, 1), ("1\n", False, None), ("-1\n", True, None), (None, True, None)]
)
def test_auto_is_the_node_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, usable: bool, node: int | None
) -> None:
    if said is not None:
        write(tmp_path / "sys/bus/pci/devices/0000:8d:00.0/numa_node", said)
    of_bus = numa_module.node_of_bus
    monkeypatch.setattr(numa_module, "_bus_id", lambda device: {"cuda:3": "0000:8D:00.0"}[device])
    monkeypatch.setattr(numa_module, "node_of_bus", lambda bus: of_bus(bus, tmp_path))
    monkeypatch.setattr(numa_module, "node_problem", lambda node: None if usable else "not here")
    assert resolve_numa("auto", "cuda:3") == node


def test_a_cpu_has_no_node_of_its_own_and_a_number_is_taken() -> None:
    assert resolve_numa("auto", "cpu") is None
    assert resolve_numa(None, "cuda") is None
    assert resolve_numa(5, "cpu") == 5 and resolve_numa(0, "cuda") == 0
