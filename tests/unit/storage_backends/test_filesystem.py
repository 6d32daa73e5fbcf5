from __future__ import annotations

import os
from pathlib import Path

import pytest

from hicache.errors import ConfigError
from hicache.storage_backends import filesystem
from hicache.storage_backends.filesystem import check_local, file_system_of


def mounts(tmp_path: Path, kind: str) -> Path:
    """A list of mounts in which the folder lies on a file system of that kind."""
    device = os.stat(tmp_path).st_dev
    here = f"{os.major(device)}:{os.minor(device)}"
    lines = [
        "21 1 0:5 / /proc rw,nosuid - proc proc rw",
        f"36 35 {here} / {tmp_path} rw,noatime master:1 - {kind} /dev/x rw,errors=continue",
        "37 35 999:7 / /elsewhere rw shared:1 - tmpfs tmpfs rw",
    ]
    path = tmp_path / "mountinfo"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_file_system_of_a_folder_and_of_one_to_be_created(tmp_path: Path) -> None:
    listed = mounts(tmp_path, "ext4")
    assert file_system_of(tmp_path, listed) == "ext4"
    assert file_system_of(tmp_path / "not" / "yet", listed) == "ext4"
    assert file_system_of(Path("/proc/self"), listed) != "ext4"


def test_it_may_be_unknown(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert file_system_of(tmp_path, tmp_path / "empty") is None
    assert file_system_of(tmp_path, tmp_path / "missing") is None


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "fuse.sshfs", "fuse.glusterfs"]
)
def test_network_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(filesystem.file_system_of, "__defaults__", (mounts(tmp_path, kind),))
    with pytest.raises(ConfigError, match="network file system"):
        check_local(tmp_path / "s")


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "fuse.lxcfs"])
def test_local_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(filesystem.file_system_of, "__defaults__", (mounts(tmp_path, kind),))
    check_local(tmp_path / "s")


def test_where_this_runs_is_known() -> None:
    assert file_system_of(Path("/proc")) == "proc"
