"""Memory: what may be taken, locked and mapped."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from hicache.config.units import format_bytes
from hicache.host_pool.budget import read_limits, read_text
from hicache.observability.doctor.finding import Finding

AREA = "memory"


def check_memory(root: Path = Path("/")) -> Iterator[Finding]:
    """`root` is where /proc and /sys are read."""
    yield check_available(root)
    yield check_memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield check_numa(root)
    yield check_huge_pages(root)


def check_available(root: Path) -> Finding:
    limits = sorted(read_limits(root), key=lambda limit: limit.available)
    if not limits:
        value = "unknown: neither /proc/meminfo nor a control group tells"
        return Finding(AREA, "available", value, "note", "sizes are not checked before memory is taken")
    tightest, *others = [f"{format_bytes(limit.available)} ({limit.name})" for limit in limits]
    return Finding(AREA, "available", tightest + (f"; next {others[0]}" if others else ""))


def check_memlock(limit: int) -> Finding:
    if limit == resource.RLIM_INFINITY:
        return Finding(AREA, "lockable", "unlimited")
    mend = "only if pinning fails: ulimit -l unlimited; a container: --ulimit memlock=-1"
    return Finding(AREA, "lockable", f"{format_bytes(limit)} (RLIMIT_MEMLOCK)", "note", mend)


def check_numa(root: Path) -> Finding:
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    nodes = sorted(folders, key=lambda folder: int(folder.name.removeprefix("node")))
    if len(nodes) < 2:
        return Finding(AREA, "NUMA nodes", "1")
    cpus = ", ".join(f"{node.name} has CPUs {read_text(node / 'cpulist').strip() or 'none'}" for node in nodes)
    return Finding(AREA, "NUMA nodes", f"{len(nodes)}: {cpus}")


def check_huge_pages(root: Path) -> Finding:
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    setting = read_text(path).partition("[")[2].partition("]")[0]
    if setting in ("always", "madvise"):
        return Finding(AREA, "huge pages", f"transparent: {setting}")
    mend = f"huge host arenas want them: echo madvise > {path}, as root"
    return Finding(AREA, "huge pages", f"transparent: {setting or 'unknown'}", "note", mend)
