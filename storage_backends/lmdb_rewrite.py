"""Writing a store's index anew: LMDB's file never shrinks by itself, it only reuses what is free in it."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb

from hicache.storage_backends.lmdb_env import DATA_FILE
from hicache.storage_backends.lmdb_schema import MAX_DATABASES

REWRITTEN = "rewritten"
"""Folder in the store's, for the new index until it is complete."""


def rewrite_index(path: Path) -> None:
    """Replace the index by a copy without free pages. Nobody may have the store open.

    The old file is there until the new one is complete and durable: for that time both take room on disk.
    """
    data, folder = path / DATA_FILE, path / REWRITTEN
    discard_rewritten(path)
    folder.mkdir()
    env = lmdb.open(str(path), map_size=data.stat().st_size, max_dbs=MAX_DATABASES)
    try:
        env.copy(str(folder), compact=True)
    finally:
        env.close()
    with open(folder / DATA_FILE, "rb") as file:
        os.fsync(file.fileno())
    os.replace(folder / DATA_FILE, data)
    _sync_folder(path)
    discard_rewritten(path)


def discard_rewritten(path: Path) -> None:
    """Remove what a rewrite left that did not get to its end."""
    folder = path / REWRITTEN
    if folder.exists():
        for name in os.listdir(folder):
            (folder / name).unlink()
        folder.rmdir()


def _sync_folder(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
