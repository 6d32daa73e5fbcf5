from __future__ import annotations

import errno
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest

from hicache.observability.doctor import disk
from hicache.observability.doctor.disk import check_direct, check_disk, check_folder
from hicache.observability.doctor.facts import TorchFacts
from hicache.observability.doctor.finding import Finding
from hicache.observability.doctor.machine import check_available, check_huge_pages, check_memlock, check_numa
from hicache.observability.doctor.software import EXTRAS, check_extras, check_torch

ROOT = Path(__file__).parents[3]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tightest_limit_comes_first(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 9 kB\nMemAvailable:   8388608 kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/job\n")
    write(tmp_path / "sys/fs/cgroup/job/memory.max", f"{4 << 30}\n")
    write(tmp_path / "sys/fs/cgroup/job/memory.current", f"{1 << 30}\n")
    value = "3.00 GiB (cgroup v2 memory.max 4.00 GiB, 1.00 GiB in use); next 8.00 GiB (MemAvailable)"
    assert check_available(tmp_path) == Finding("memory", "available", value)
    assert check_available(tmp_path / "nowhere").status == "note"


def test_lockable_memory() -> None:
    assert check_memlock(resource.RLIM_INFINITY) == Finding("memory", "lockable", "unlimited")
    found = check_memlock(65536)
    assert (found.value, found.status) == ("64.00 KiB (RLIMIT_MEMLOCK)", "note")
    assert "ulimit -l unlimited" in found.mend


def test_numa_nodes_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    assert check_numa(tmp_path).value == "1"
    for node, cpus in ((10, ""), (0, "0-15"), (2, "16-31")):
        write(tmp_path / f"sys/devices/system/node/node{node}/cpulist", f"{cpus}\n")
    assert check_numa(tmp_path).value == "3: node0 has CPUs 0-15, node2 has CPUs 16-31, node10 has CPUs none"


@pytest.mark.parametrize(
    ("text", "value", "status"),
    [
        ("always [madvise] never\n", "transparent: madvise", "ok"),
        ("[always] madvise never\n", "transparent: always", "ok"),
        ("always madvise [never]\n", "transparent: never", "note"),
        ("", "transparent: unknown", "note"),
    ],
)
def test_transparent_huge_pages(tmp_path: Path, text: str, value: str, status: str) -> None:
    write(tmp_path / "sys/kernel/mm/transparent_hugepage/enabled", text)
    found = check_huge_pages(tmp_path)
    assert (found.value, found.status) == (value, status)
    assert bool(found.mend) is (status == "note")


def test_a_folder_is_left_as_it_was(tmp_path: Path) -> None:
    names = [finding.name for finding in check_disk(tmp_path)]
    assert names == ["lmdb", "folder", "O_DIRECT"]
    assert list(tmp_path.iterdir()) == []


def test_no_folder_no_writing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert [(finding.name, finding.status) for finding in check_disk(None)] == [("lmdb", "ok")]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_not_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "file_system_of", lambda path: "ext4")
    _, found = check_disk(tmp_path / "a" / "b")
    assert (found.status, found.mend) == ("note", f"mkdir -p {tmp_path}/a/b")
    assert re.fullmatch(rf"{tmp_path}/a/b does not exist; above it ext4, [0-9.]+ .?i?B free", found.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "file_system_of", lambda path: "ext4")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = check_folder(tmp_path / "store")
    assert (found.status, found.value) == ("broken", f"{tmp_path}/store cannot be made in {tmp_path}")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert [finding.status for finding in check_disk(tmp_path / "file")] == ["ok", "broken"]


@pytest.mark.parametrize(
    ("kind", "status", "mend"),
    [
        ("xfs", "ok", ""),
        ("tmpfs", "note", "a store here is lost with the machine's memory: use a disk"),
        ("overlay", "note", "a store here is lost with the container: use a disk"),
    ],
)
def test_file_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, status: str, mend: str) -> None:
    monkeypatch.setattr(disk, "file_system_of", lambda path: kind)
    found = check_folder(tmp_path)
    assert found.value.startswith(f"{kind}, ")
    assert (found.status, found.mend) == (status, mend)


def test_a_network_file_system_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hicache.storage_backends.filesystem.file_system_of", lambda path: "nfs4")
    found = check_folder(tmp_path)
    assert (found.status, "network file system (nfs4)" in found.value) == ("broken", True)


@pytest.mark.parametrize(("code", "status"), [(errno.EINVAL, "note"), (errno.ENOSPC, "broken")])
@pytest.mark.parametrize("call", ["open", "pwrite"])
def test_a_disk_without_o_direct_or_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str, code: int, status: str
) -> None:
    real_open = os.open

    def refuse(*arguments: Any, **options: Any) -> int:
        if call == "open" and not arguments[1] & os.O_DIRECT:
            return real_open(*arguments, **options)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, refuse)
    assert check_direct(tmp_path).status == status
    assert list(tmp_path.iterdir()) == []


def test_extras_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    table = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    declared = dict(re.findall(r"^(\w+) = \[(.*)\]", table, re.MULTILINE))
    own = {extra: tuple(re.findall(r'"([\w-]+)', packages)) for extra, packages in declared.items()}
    assert {extra: tuple(n for n in names if n != "pydantic") for extra, names in own.items()} == {
        **EXTRAS, "cuda12": ("cupy-cuda12x",), "cuda13": ("cupy-cuda13x",),
    }  # fmt: skip


def test_missing_extras_say_how_to_install_them() -> None:
    versions = {"numba": "0.68.1", "lz4": "4.4.5"}
    found = {finding.name: finding for finding in check_extras(lambda name: versions.get(name, ""))}
    assert found["compiled"] == Finding("extras", "compiled", "numba 0.68.1")
    assert found["codecs"] == Finding(
        "extras", "codecs", "lz4 4.4.5, zstandard not installed", "missing", "pip install 'hicache[codecs]'"
    )
    assert found["serve"].status == found["serving"].status == "missing"


def test_torch() -> None:
    assert check_torch(TorchFacts("2.13.0+cpu")).value == "2.13.0+cpu, built without CUDA"
    assert check_torch(TorchFacts("2.11.0+cu130", (13, 0))).value == "2.11.0+cu130, built for CUDA 13.0"
    found = check_torch(TorchFacts(error="OSError: libcudart.so.13: cannot open"))
    assert (found.status, found.value) == ("broken", "does not import: OSError: libcudart.so.13: cannot open")
