"""A writer is killed in the middle of its work, again and again: the store opens as it is and holds no wrong byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.storage_backends.budget import ValuesMode
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.testing.storage import IDENTITY, chain, read_checked, run_of

BUDGET = 8 << 20
CHAIN = 32

WRITER = f"""
import sys
from pathlib import Path
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.testing.storage import IDENTITY, chain, run_of

path, values, round_number = sys.argv[1:]
store = LmdbBackend(Path(path), IDENTITY, {BUDGET}, values, "none")
number = 0
while True:
    assert store.write([run_of(IDENTITY.layout, chain(f"{{round_number}}/{{number}}", {CHAIN}))]) == [{CHAIN}]
    print(number, flush=True)
    number += 1
"""


@pytest.mark.stress
@pytest.mark.parametrize("values", ["slab", "inline"])
def test_a_killed_writer_leaves_a_whole_store(tmp_path: Path, values: ValuesMode) -> None:
    path = tmp_path / "store"
    for round_number in range(5):
        last = _write_and_kill(path, values, round_number, after=60 + 37 * round_number)
        store = LmdbBackend(path, IDENTITY, BUDGET, values, "none")
        # What was acknowledged last is there: nothing had been evicted for it yet.
        for number in range(last - 5, last + 1):
            assert read_checked(store, IDENTITY.layout, chain(f"{round_number}/{number}", CHAIN)) == CHAIN
        _check_all(store, rounds=round_number + 1)
        assert store.write([run_of(IDENTITY.layout, chain(f"after {round_number}", CHAIN))]) == [CHAIN]
        assert store.damaged_pages == 0
        store.close()
        assert sum(entry.stat().st_blocks * 512 for entry in os.scandir(path)) <= BUDGET
    assert not list(tmp_path.glob("*.damaged-*"))


def _write_and_kill(path: Path, values: str, round_number: int, after: int) -> int:
    """Kill the writer once `after` chains are acknowledged; returns the number of the last one heard of."""
    command = [sys.executable, "-c", WRITER, str(path), values, str(round_number)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        last = -1
        for line in writer.stdout:
            last = int(line)
            if last == after:
                writer.kill()
                break
        last = max([last, *(int(line) for line in writer.stdout if line.endswith("\n"))])
    assert last >= after, "the writer died by itself"
    return last


def _check_all(store: LmdbBackend, rounds: int) -> None:
    """Every page that the index names comes back with its bytes."""
    found = 0
    for round_number in range(rounds):
        for number in range(2000):
            keys = chain(f"{round_number}/{number}", CHAIN)
            present = store.contains_prefix(keys)
            assert read_checked(store, IDENTITY.layout, keys) == present
            found += present
            if number > 400 and not present:
                break
    others = sum(store.contains_prefix(chain(f"after {number}", CHAIN)) for number in range(rounds))
    assert found + others == store.usage().pages
