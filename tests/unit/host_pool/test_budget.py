from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.errors import CapacityError
from hicache.host_pool.budget import GIB, MemoryLimit, check_host_budget, read_limits


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _available(root: Path) -> list[int]:
    return [limit.available for limit in read_limits(root)]


def test_the_tightest_limit_refuses_with_the_numbers() -> None:
    limits = [MemoryLimit("MemAvailable", 8 * GIB), MemoryLimit("cgroup v2 limit", 2 * GIB)]
    with pytest.raises(CapacityError, match=r"3\.00 GiB .* asked for, 2\.00 GiB available \(cgroup v2 limit\)"):
        check_host_budget(3 * GIB, lambda: limits)


def test_exactly_what_is_available_is_granted() -> None:
    check_host_budget(GIB, lambda: [MemoryLimit("MemAvailable", GIB)])
    with pytest.raises(CapacityError):
        check_host_budget(GIB + 1, lambda: [MemoryLimit("MemAvailable", GIB)])


def test_a_system_without_limits_grants_all() -> None:
    check_host_budget(1 << 60, list)


def test_this_machine_refuses_an_exabyte() -> None:
    with pytest.raises(CapacityError):
        check_host_budget(1 << 60)


def test_meminfo_is_read(tmp_path: Path) -> None:
    root = _write(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   5 kB\n"})
    assert _available(root) == [5 * 1024]


def test_cgroup_v2_counts_parents_and_gives_inactive_cache_back(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    files = {
        "proc/self/cgroup": "0::/pod/box\n",
        f"{top}/pod/memory.max": "1000\n",
        f"{top}/pod/memory.current": "700\n",
        f"{top}/pod/memory.stat": "anon 1\ninactive_file 200\n",
        f"{top}/pod/box/memory.max": "max\n",
        f"{top}/pod/box/memory.current": "10\n",
    }
    assert _available(_write(tmp_path, files)) == [500]


def test_cgroup_v2_of_a_container_is_its_mount(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/not/visible/here\n",
        "sys/fs/cgroup/memory.max": "1000\n",
        "sys/fs/cgroup/memory.current": "1200\n",
    }
    assert _available(_write(tmp_path, files)) == [0]


@pytest.mark.parametrize("kind", ["active_file", "inactive_file", "slab_reclaimable"])
def test_what_the_kernel_gives_back_is_not_taken(tmp_path: Path, kind: str) -> None:
    """Weights that were read twice are active cache; a million files that were looked at are slabs."""
    top = "sys/fs/cgroup"
    stat = f"anon 100\nshmem 50\n{kind} 500\nslab_unreclaimable 7\n"
    files = {f"{top}/memory.max": "1000\n", f"{top}/memory.current": "700\n", f"{top}/memory.stat": stat}
    assert _available(_write(tmp_path, {"proc/self/cgroup": "0::/\n", **files})) == [800]


def test_memory_high_is_a_limit_and_swap_is_no_room(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    files = {
        "proc/self/cgroup": "0::/box\n",
        f"{top}/box/memory.max": "max\n",
        f"{top}/box/memory.high": "600\n",
        f"{top}/box/memory.current": "100\n",
        f"{top}/box/memory.swap.max": "100000\n",
        f"{top}/memory.max": "5000\n",
        f"{top}/memory.high": "max\n",
        f"{top}/memory.current": "100\n",
    }
    limits = read_limits(_write(tmp_path, files))
    assert [limit.available for limit in limits] == [500, 4900]
    assert limits[0].name.startswith("cgroup v2 memory.high ")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Max address space         4096000              unlimited            bytes", [4096000 - 1000 * 1024]),
        ("Max data size             4096000              unlimited            bytes", [4096000 - 10 * 1024]),
        ("Max address space         100                  100                  bytes", [0]),
        ("Max address space         unlimited            unlimited            bytes", []),
        ("Max file size             100                  unlimited            bytes", []),
    ],
)
def test_limits_of_the_process(tmp_path: Path, line: str, expected: list[int]) -> None:
    head = "Limit                     Soft Limit           Hard Limit           Units\n"
    status = "Name:\tpython\nVmSize:\t    1000 kB\nVmData:\t      10 kB\n"
    assert _available(_write(tmp_path, {"proc/self/limits": head + line, "proc/self/status": status})) == expected


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_process_with_less_address_space_is_refused_in_one_line(tmp_path: Path, tier: str) -> None:
    sizes = {"device": "1024 tokens", "host": "1024 tokens", tier: "64GiB"}
    config = tmp_path / "tiers.yaml"
    config.write_text(
        "model: {name: m, layers: 1, kv_heads: 1, head_dim: 8, dtype: float16}\npage_size: 16\ntiers:\n"
        f"  - {{tier: device, device: cpu, size: {sizes['device']}}}\n  - {{tier: host, size: {sizes['host']}}}\n"
    )
    limited = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, (48 << 30, 48 << 30));"
        f"sys.argv = ['hicache', 'config', 'check', {str(config)!r}]; runpy.run_module('hicache', run_name='__main__')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", limited], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    line = 4 if tier == "device" else 5
    assert f"tiers.yaml:{line}: tiers[{line - 4}].size: 64.00 GiB" in done.stderr.replace("\n", " "), done.stderr


@pytest.mark.parametrize("limit, expected", [("1000", [400]), ("9223372036854771712", [])])
def test_cgroup_v1(tmp_path: Path, limit: str, expected: list[int]) -> None:
    group = "sys/fs/cgroup/memory/box"
    files = {
        "proc/self/cgroup": "5:cpu:/other\n4:memory:/box\n",
        f"{group}/memory.limit_in_bytes": limit,
        f"{group}/memory.usage_in_bytes": "700",
        f"{group}/memory.stat": "inactive_file 50\ntotal_inactive_file 60\ntotal_active_file 40\n",
    }
    assert _available(_write(tmp_path, files)) == expected
