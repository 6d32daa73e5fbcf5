"""The disk tier: LMDB, and what a folder's file system is good for."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from hicache.config.units import format_bytes
from hicache.errors import ConfigError
from hicache.layout import HOST_ALIGNMENT
from hicache.observability.doctor.finding import Finding, in_one_line
from hicache.storage_backends.filesystem import check_local, file_system_of

AREA = "disk"

_FLEETING = {"tmpfs": "the machine's memory", "ramfs": "the machine's memory", "overlay": "the container"}
"""File systems that keep a store for a short while only, and what takes it along."""


def check_disk(path: Path | None) -> Iterator[Finding]:
    """`path` is the folder of a disk tier. A file is written there for a moment; nothing is left behind."""
    yield check_lmdb()
    if path is not None:
        yield check_folder(path)
        if path.is_dir():
            yield check_direct(path)


def check_lmdb() -> Finding:
    try:
        import lmdb

        library = ".".join(map(str, lmdb.version()))
    except Exception as error:  # a broken installation may raise anything
        mend = "pip install --force-reinstall lmdb"
        return Finding(AREA, "lmdb", f"does not import: {in_one_line(error)}", "broken", mend)
    return Finding(AREA, "lmdb", f"{metadata.version('lmdb')}, LMDB {library}")


def check_folder(path: Path) -> Finding:
    if path.exists() and not path.is_dir():
        return Finding(AREA, "folder", f"{path} is not a folder", "broken", "choose another path")
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        free = format_bytes(shutil.disk_usage(there).free)
        check_local(path)
    except ConfigError as error:
        return Finding(AREA, "folder", str(error), "broken", "use a folder on a local disk")
    except OSError as error:
        return Finding(AREA, "folder", in_one_line(error), "broken", "choose another path")
    kind = file_system_of(path)
    value = f"{kind or 'unknown file system'}, {free} free"
    if kind in _FLEETING:
        return Finding(AREA, "folder", value, "note", f"a store here is lost with {_FLEETING[kind]}: use a disk")
    if there == path:
        return Finding(AREA, "folder", value)
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(AREA, "folder", f"{path} cannot be made in {there}", "broken", "choose another path")
    return Finding(AREA, "folder", f"{path} does not exist; above it {value}", "note", f"mkdir -p {path}")


def check_direct(folder: Path) -> Finding:
    try:
        _write_direct(folder)
    except OSError as error:
        if error.errno == errno.EINVAL:
            mend = "works, but slower, and the page cache takes memory: ext4 and xfs have O_DIRECT"
            return Finding(AREA, "O_DIRECT", "no: pages go through the page cache", "note", mend)
        mend = "make room, change the folder's permissions, or choose another path"
        return Finding(AREA, "O_DIRECT", f"a page cannot be written: {in_one_line(error)}", "broken", mend)
    return Finding(AREA, "O_DIRECT", "yes: pages bypass the page cache")


def _write_direct(folder: Path) -> None:
    """One page through O_DIRECT, to a file that lost its name before. Raises OSError; EINVAL: there is no O_DIRECT."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".hicache-doctor-") as file:
        descriptor = os.open(file.name, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    try:
        with mmap.mmap(-1, HOST_ALIGNMENT) as page:
            os.pwrite(descriptor, page, 0)
    finally:
        os.close(descriptor)
