"""Which weights a model has, told by their content: not by where the files lie, their names or times."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, NamedTuple

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")

WHOLE_BYTES = 512 << 20
"""Files up to this size are read whole, of larger ones samples are."""

_SAMPLE, _STRIDE, _CHUNK = 4 << 10, 1 << 20, 1 << 20
_MAX_HEADER = 100 << 20  # of the safetensors format


def files_digest(paths: Iterable[Path]) -> str:
    """SHA-256 over the lengths and contents of files, in the given order.

    Of a file over `WHOLE_BYTES` 4 KiB of each MiB are read and, of safetensors, the header and the first 4 KiB of
    each tensor: a second for 100 GB on a fast disk. Raises OSError for a file that cannot be read.
    """
    return _digest(tuple(_State.of(path) for path in paths))


def weight_files(folder: Path) -> list[Path]:
    """The files of `WEIGHT_FILES` in a folder, by name; empty if it is no folder."""
    return sorted({file for pattern in WEIGHT_FILES for file in folder.glob(pattern)}) if folder.is_dir() else []


class _State(NamedTuple):
    """One file, and what tells that it must be read again: a change of the content changes the time of the inode
    (ctime), which no user can set."""

    path: str
    size: int
    inode: tuple[int, int]
    times: tuple[int, int]

    @classmethod
    def of(cls, path: Path) -> _State:
        found = path.stat()
        inode, times = (found.st_dev, found.st_ino), (found.st_mtime_ns, found.st_ctime_ns)
        return cls(str(path.resolve()), found.st_size, inode, times)


@lru_cache(maxsize=1024)
def _digest(files: tuple[_State, ...]) -> str:
    total = sha256()
    for state in files:
        total.update(state.size.to_bytes(8, "little"))
        with open(state.path, "rb") as file:
            for part in _whole(file) if state.size <= WHOLE_BYTES else _samples(file, state):
                total.update(part)
    return total.hexdigest()


def _whole(file: BinaryIO) -> Iterator[bytes]:
    while part := file.read(_CHUNK):
        yield part


def _samples(file: BinaryIO, state: _State) -> Iterator[bytes]:
    places = set(range(0, state.size, _STRIDE)) | {max(0, state.size - _SAMPLE)}
    if state.path.endswith(".safetensors"):
        header, tensors = _safetensors(file, state.size)
        yield header
        places |= tensors
    for place in sorted(places):
        yield os.pread(file.fileno(), _SAMPLE, place)


def _safetensors(file: BinaryIO, size: int) -> tuple[bytes, set[int]]:
    """The header, and where the tensors begin; nothing if the file is not what its name says."""
    length = int.from_bytes(file.read(8), "little")
    if length > min(size, _MAX_HEADER):
        return b"", set()
    header = file.read(length)
    try:
        offsets = {int(entry["data_offsets"][0]) for name, entry in json.loads(header).items() if name[:2] != "__"}
    except (ValueError, TypeError, KeyError, AttributeError):
        return header, set()
    return header, {8 + length + offset for offset in offsets}
