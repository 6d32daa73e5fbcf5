"""How much more memory this process can take: the machine's and its control groups' limits, read before allocating."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hicache.errors import CapacityError

GIB = 1 << 30

_V1_UNLIMITED = 1 << 60
"""cgroup v1 says "no limit" with a number near 2**63; no machine has this much memory."""


@dataclass(frozen=True)
class MemoryLimit:
    """`available` bytes may still be taken under the limit called `name`."""

    name: str
    available: int


@dataclass(frozen=True)
class _CgroupFiles:
    """File names of one version of the memory controller."""

    name: str
    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]  # keys in memory.stat


_V1 = _CgroupFiles(
    "cgroup v1",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_V2 = _CgroupFiles(
    "cgroup v2",
    ("memory.max", "memory.high"),  # above memory.high the kernel slows a process down until it gives memory back
    "memory.current",
    ("active_file", "inactive_file", "slab_reclaimable"),
)

_PROCESS_LIMITS = {"Max address space": ("RLIMIT_AS", "VmSize"), "Max data size": ("RLIMIT_DATA", "VmData")}
"""By their names in /proc/self/limits: what people call them, and what counts against them in /proc/self/status."""


def check_host_budget(nbytes: int, limits: Callable[[], Iterable[MemoryLimit]] | None = None) -> None:
    """Raise CapacityError, with the numbers, if `nbytes` more do not fit into the tightest memory limit.

    `limits` reads the limits that hold now; the default is `read_limits`.
    """
    tightest = min((limits or read_limits)(), key=lambda limit: limit.available, default=None)
    if tightest is not None and nbytes > tightest.available:
        raise CapacityError(
            f"{_gib(nbytes)} of host memory asked for, {_gib(tightest.available)} available ({tightest.name}): "
            "choose a smaller size or free memory"
        )


def read_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """The limits found under `root`; empty on a system that has neither /proc nor control groups.

    Swap is not counted as room: a cache that is swapped out is slower than none.
    """
    return [*_machine(root), *_cgroups(root), *_process(root)]


def _machine(root: Path) -> Iterator[MemoryLimit]:
    for line in read_text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield MemoryLimit("MemAvailable", int(line.split()[1]) * 1024)


def _process(root: Path) -> Iterator[MemoryLimit]:
    """What `ulimit` says: of the address space, and of private memory."""
    status = dict(line.split(":", 1) for line in read_text(root / "proc/self/status").splitlines() if ":" in line)
    for line in read_text(root / "proc/self/limits").splitlines():
        for title, (name, counted) in _PROCESS_LIMITS.items():
            soft = line.removeprefix(title).split()[:1]
            if line.startswith(title) and soft and soft[0].isdigit() and counted in status:
                limit, used = int(soft[0]), int(status[counted].split()[0]) * 1024
                yield MemoryLimit(f"{name} {_gib(limit)}, {_gib(used)} in use", max(0, limit - used))


def _cgroups(root: Path) -> Iterator[MemoryLimit]:
    mount = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield from _hierarchy(mount / "memory", path, _V1)
        elif not controllers:
            yield from _hierarchy(mount, path, _V2)


def _hierarchy(mount: Path, path: str, files: _CgroupFiles) -> Iterator[MemoryLimit]:
    """A group and all above it, since each may limit. In a container the mount itself is the process's group."""
    group = PurePosixPath(path.lstrip("/"))
    for folder in (group, *group.parents):
        yield from _cgroup_limits(mount / folder, files)


def _cgroup_limits(folder: Path, files: _CgroupFiles) -> Iterator[MemoryLimit]:
    usage = read_text(folder / files.usage).strip()
    for file in files.limits:
        limit = read_text(folder / file).strip()
        if limit.isdigit() and usage.isdigit() and int(limit) <= _V1_UNLIMITED:
            # Page cache and slabs count as usage, but the kernel gives them back before it refuses memory.
            used = max(0, int(usage) - _reclaimable(folder, files))
            what = f"{files.name} {file} {_gib(int(limit))}, {_gib(used)} in use"
            yield MemoryLimit(what, max(0, int(limit) - used))


def _reclaimable(folder: Path, files: _CgroupFiles) -> int:
    fields = (line.split() for line in read_text(folder / "memory.stat").splitlines())
    return sum(int(field[1]) for field in fields if field[0] in files.reclaimable)


def read_text(path: Path) -> str:
    """Text of a file of the system; empty where it is missing or unreadable, as on another system or in a sandbox."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
