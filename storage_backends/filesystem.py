"""What kind of file system a folder lies on, and what it may be used for."""

from __future__ import annotations

import os
from pathlib import Path

from hicache.errors import ConfigError

_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "afs", "9p", "beegfs", "glusterfs")
"""Their files can be mapped, but not coherently with other machines, and their locks may be no locks."""

_MOUNTS = Path("/proc/self/mountinfo")


def check_local(path: Path) -> None:
    """Raises ConfigError if `path` lies on a network file system: LMDB's map and locks do not work across machines."""
    kind = file_system_of(path)
    if kind is not None and kind.removeprefix("fuse.") in (*_NETWORK, "sshfs"):
        raise ConfigError(f"storage path {path} lies on a network file system ({kind}): use a folder on a local disk")


def file_system_of(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """Type of the file system that `path`, or the nearest folder above it that exists, lies on; None if unknown."""
    while not path.exists() and path != path.parent:
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
