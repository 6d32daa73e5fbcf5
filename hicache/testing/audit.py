"""What an LMDB store claims, counted again: for tests."""

from __future__ import annotations

import os
from pathlib import Path

from hicache.storage_backends import lmdb_audit
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.lmdb_index import IndexView


def disk_bytes(path: Path) -> int:
    """Bytes that the files of a folder take on disk."""
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(path))


def audit(backend: LmdbBackend) -> None:
    """Raises AssertionError where the records of a store do not agree."""
    problems = lmdb_audit.audit(backend._store)
    assert not problems, problems


def audit_index(view: IndexView) -> None:
    """As `audit`, of an index alone: where the bytes of its pages lie is left out."""
    problems = lmdb_audit.audit_view(view, locations=False)
    assert not problems, problems
