"""What kind of file system a folder lies on, and what it may be used for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hicache.errors import ConfigError

_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "afs", "9p", "beegfs", "glusterfs")
"""Their files can be mapped, but not coherently with other machines, and their locks may be no locks."""

FILE_MODE = 0o666
"""Of new files, less what the umask takes: users who share a group set that to 002."""

_MOUNTS = Path("/proc/self/mountinfo")


def check_local(path: Path) -> None:
    """Raises ConfigError if `path` lies on a network file system: LMDB's map and locks do not work across machines."""
    kind = file_system_of(path)
    if kind is not None and kind.removeprefix("fuse.") in (*_NETWORK, "sshfs"):
        raise ConfigError(f"storage path {path} lies on a network file system ({kind}): use a folder on a local disk")


def file_system_of(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """Type of the file system that `path`, or the nearest folder above it that exists, lies on; None if unknown."""
    while not os.path.exists(path) and path != path.parent:  # one that may not be looked into is none
        path = path.parent
    try:
        device = os.stat(path).st_dev
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
