from __future__ import annotations

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


@pytest.mark.parametrize("limit, expected", [("1000", [400]), ("9223372036854771712", [])])
def test_cgroup_v1(tmp_path: Path, limit: str, expected: list[int]) -> None:
    group = "sys/fs/cgroup/memory/box"
    files = {
        "proc/self/cgroup": "5:cpu:/other\n4:memory:/box\n",
        f"{group}/memory.limit_in_bytes": limit,
        f"{group}/memory.usage_in_bytes": "700",
        f"{group}/memory.stat": "inactive_file 50\ntotal_inactive_file 100\n",
    }
    assert _available(_write(tmp_path, files)) == expected
