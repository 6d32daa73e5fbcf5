from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache.storage_backends.lmdb_slots import ExtentSet, extents_of


@pytest.fixture
def env(tmp_path: Path) -> Iterator[lmdb.Environment]:
    with lmdb.open(str(tmp_path / "slots"), max_dbs=1, sync=False) as env:
        yield env


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.one_of(st.integers(1, 20), st.sets(st.integers(0, 40), min_size=1)), max_size=20))
def test_it_is_a_set_of_slots(env: lmdb.Environment, steps: list[int | set[int]]) -> None:
    """Taking a number of slots and giving slots back, as a plain set does it."""
    expected: set[int] = set()
    with env.begin(write=True) as txn:
        database = env.open_db(b"free", txn=txn)
        txn.drop(database, delete=False)
        extents = ExtentSet(txn, database)
        for step in steps:
            if isinstance(step, int):
                taken = [slot for extent in extents.take(step) for slot in extent]
                assert len(taken) == min(step, len(expected))
                assert expected.issuperset(taken)
                expected.difference_update(taken)
            else:
                extents.add(sorted(step - expected))
                expected |= step
            assert list(extents) == list(extents_of(sorted(expected)))


def test_a_batch_gets_one_extent_if_there_is_one(env: lmdb.Environment) -> None:
    with env.begin(write=True) as txn:
        extents = ExtentSet(txn, env.open_db(b"free", txn=txn))
        extents.add([0, 1, 5, 6, 7, 8])
        assert extents.take(3) == [range(5, 8)]
        assert extents.take(3) == [range(2), range(8, 9)]
        assert extents.last() is None
