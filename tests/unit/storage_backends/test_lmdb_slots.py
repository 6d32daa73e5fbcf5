from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache.errors import StoreCorruptError
from hicache.storage_backends.lmdb_slots import ExtentSet, extents_of

UNIT = 4096


@pytest.fixture
def env(tmp_path: Path) -> Iterator[lmdb.Environment]:
    with lmdb.open(str(tmp_path / "slots"), max_dbs=1, sync=False) as env:
        yield env


@pytest.fixture
def extents(env: lmdb.Environment) -> Iterator[ExtentSet]:
    with env.begin(write=True) as txn:
        yield ExtentSet(txn, env.open_db(b"free", txn=txn), UNIT)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.one_of(st.integers(1, 20), st.sets(st.integers(0, 40), min_size=1)), max_size=20))
def test_it_is_a_set_of_slots(env: lmdb.Environment, steps: list[int | set[int]]) -> None:
    """Taking a number of slots and giving slots back, as a plain set does it; the slabs beside it stay as they are."""
    expected: set[int] = set()
    with env.begin(write=True) as txn:
        database = env.open_db(b"free", txn=txn)
        txn.drop(database, delete=False)
        beside = [ExtentSet(txn, database, slot_bytes) for slot_bytes in (UNIT, 3 * UNIT)]
        for other in beside:
            other.add([1, 2, 30])
        extents = ExtentSet(txn, database, 2 * UNIT)
        for step in steps:
            if isinstance(step, int):
                taken = [slot for extent in extents.take(step) for slot in extent]
                assert len(taken) == min(step, len(expected))
                assert expected.issuperset(taken)
                expected.difference_update(taken)
            else:
                extents.add(sorted(step - expected))
                expected |= step
            found = list(extents_of(sorted(expected)))
            assert list(extents) == found
            assert extents.last() == (found[-1] if found else None)
            assert [list(other) for other in beside] == [[range(1, 3), range(30, 31)]] * 2


def test_a_batch_gets_one_extent_if_there_is_one(extents: ExtentSet) -> None:
    extents.add([0, 1, 5, 6, 7, 8])
    assert extents.take(3) == [range(5, 8)]
    assert extents.take(3) == [range(2), range(8, 9)]
    assert extents.last() is None


def test_an_extent_is_cut_out(extents: ExtentSet) -> None:
    extents.add(range(10))
    extents.discard(range(3, 5))
    extents.discard(range(9, 10))
    assert list(extents) == [range(3), range(5, 9)]
    for absent in (range(4, 6), range(8, 10), range(20, 21)):
        with pytest.raises(StoreCorruptError, match="not where they should be"):
            extents.discard(absent)


@pytest.mark.parametrize("again", [range(5, 6), range(3, 6), range(9, 12), range(2, 11), range(5, 10)])
def test_a_slot_never_has_two_owners(extents: ExtentSet, again: range) -> None:
    extents.add(range(5, 10))
    with pytest.raises(StoreCorruptError, match="has two owners"):
        extents.add_extent(again)


def test_every_flipped_bit_is_found(env: lmdb.Environment) -> None:
    """In the number of slots, and in the checksum."""
    with env.begin(write=True) as txn:
        database = env.open_db(b"free", txn=txn)
        extents = ExtentSet(txn, database, UNIT)
        extents.add(range(5, 10))
        ((key, raw),) = list(txn.cursor(database))
        for bit in range(8 * len(raw)):
            value = bytearray(raw)
            value[bit // 8] ^= 1 << bit % 8
            txn.put(key, value, db=database)
            with pytest.raises(StoreCorruptError, match="checksum"):
                extents.take(1)
