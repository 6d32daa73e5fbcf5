"""Pages looked up one by one, whether or not they belong to one chain."""

from __future__ import annotations

import mmap
from hashlib import sha256
from pathlib import Path

import pytest

from hicache.hashing import StoreIdentity
from hicache.layout import KVLayout
from hicache.storage_backends.base import PageRun, StorageBackend
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.memory import MemoryBackend
from hicache.storage_backends.recovering import RecoveringBackend

IDENTITY = StoreIdentity(KVLayout(1, 1, 64, 16, "float32"), "m")
KEYS = [sha256(bytes([number])).digest() for number in range(6)]


def backend(kind: str, folder: Path) -> StorageBackend:
    if kind == "memory":
        return MemoryBackend(IDENTITY, 1 << 20)
    lmdb = LmdbBackend(folder / "store", IDENTITY, 32 << 20)
    return lmdb if kind == "lmdb" else RecoveringBackend(lambda: lmdb)


@pytest.mark.parametrize("kind", ["memory", "lmdb", "recovering"])
def test_each_by_itself(kind: str, tmp_path: Path) -> None:
    store = backend(kind, tmp_path)
    page = memoryview(mmap.mmap(-1, IDENTITY.layout.page_stride))
    for number in (1, 2, 4):
        assert store.write([PageRun([KEYS[number]], [page], None)]) == [1]
    assert store.contains_each(KEYS) == [False, True, True, False, True, False]
    assert store.contains_each(KEYS[::-1]) == [False, True, False, True, True, False]
    assert store.contains_each([]) == []
    store.clear()
    assert store.contains_each(KEYS) == [False] * 6
    store.close()
