"""What kind of file system a folder lies on, and what it may be used for."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

from hicache.errors import ConfigError

_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "afs", "9p", "beegfs", "glusterfs")
"""Their files can be mapped, but not coherently with other machines, and their locks may be no locks."""

_MIB = 1 << 20

FILE_MODE = 0o666
"""Of new files, less what the umask takes: users who share a group set that to 002."""

_MOUNTS = Path("/proc/self/mountinfo")


def check_local(path: Path) -> None:
    """Raises ConfigError if `path` lies on a network file system: LMDB's map and locks do not work across machines."""
    kind = file_system_of(path)
    if kind is not None and kind.removeprefix("fuse.") in (*_NETWORK, "sshfs"):
        raise ConfigError(f"storage path {path} lies on a network file system ({kind}): use a folder on a local disk")


def room_problem(path: Path, total_bytes: int, file_bytes: int) -> str | None:
    """Why files of `total_bytes` bytes, the largest of `file_bytes`, can never be in the folder `path`; None if they
    may. What others have on the disk now is not counted, see `free_bytes`."""
    disk = os.statvfs(_nearest(path))
    disk_bytes = disk.f_blocks * disk.f_frsize
    if 0 < disk_bytes < total_bytes:
        return (
            f"the file system of {path} has {disk_bytes / _MIB:,.0f} MiB in all, and the store may grow to "
            f"{total_bytes / _MIB:,.0f} MiB: lower its size, or use a larger disk"
        )
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit not in (-1, resource.RLIM_INFINITY) and limit < file_bytes:
        return (
            f"this process may write files of at most {limit / _MIB:,.1f} MiB (ulimit -f), and one of the store's may "
            f"grow to {file_bytes / _MIB:,.1f} MiB: raise the limit, or lower the size"
        )
    return None


def is_cleaned(path: Path) -> bool:
    """Does the folder lie where systemd-tmpfiles and others remove old files? Not where the name is a mount's."""
    path = path.resolve()
    return any(path.is_relative_to(folder) for folder in ("/tmp", "/var/tmp"))


def free_bytes(path: Path) -> int:
    """What this user may still write to the file system of `path`, quotas of projects included."""
    disk = os.statvfs(_nearest(path))
    return disk.f_bavail * disk.f_frsize


def _nearest(path: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    while not os.path.exists(path) and path != path.parent:  # one that may not be looked into is none
        path = path.parent
    return path


def file_system_of(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """Type of the file system that `path`, or the nearest folder above it that exists, lies on; None if unknown."""
    try:
        device = os.stat(_nearest(path)).st_dev
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    return next((kind for number, kind in map(_mount, lines) if number == device), None)


def _mount(line: str) -> tuple[int, str]:
    """Device number and type of one line of mountinfo(5): `36 35 98:0 /root /mount opts ... - ext4 /dev/x opts`."""
    major, minor = line.split()[2].split(":")
    return os.makedev(int(major), int(minor)), line.partition(" - ")[2].split()[0]


def access_problem(path: Path, is_own: Callable[[str], bool]) -> str | None:
    """Why this user cannot keep a store in the folder `path`: the file that stands in the way, whose it is, its mode
    and the rights that are missing. None if nothing does.

    A folder that is not there is looked for in its parent. `is_own` says which names are files of a store.
    """
    folder = path if path.exists() else path.parent
    if not folder.exists():
        return f"{path} cannot be made: the folder {folder} does not exist, create it first"
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"{folder} lies on a file system that is mounted read-only"
    if not _may(folder, os.R_OK | os.W_OK | os.X_OK):
        return _needs(folder, "rwx")
    with os.scandir(folder) as entries:
        own = [Path(entry) for entry in entries if folder == path and is_own(entry.name) and entry.is_file()]
    return next((_needs(file, "rw") for file in sorted(own) if not _may(file, os.R_OK | os.W_OK)), None)


def _may(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _needs(path: Path, rights: str) -> str:
    found = path.stat()
    return (
        f"{path} is of user {found.st_uid} and group {found.st_gid} with mode {found.st_mode & 0o7777:04o}, and user "
        f"{os.geteuid()} needs {rights} there: change its owner, or let a group share it (chmod g+{rights}, and umask "
        "002 for all who use it), or give another path"
    )
