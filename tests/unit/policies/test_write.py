"""The table of write modes, cell by cell."""

from __future__ import annotations

import pytest

from hicache.policies.write import WriteMode, WritePolicy


@pytest.mark.parametrize(
    ("mode", "on_entry", "on_hits", "on_eviction"),
    [
        ("write_through", True, [False, False, False, False], [True, True, True, True]),
        ("write_through_selective", False, [False, False, True, True], [False, False, True, True]),
        ("write_back", False, [False, False, False, False], [True, True, True, True]),
    ],
)
def test_when_a_copy_is_made(mode: WriteMode, on_entry: bool, on_hits: list[bool], on_eviction: list[bool]) -> None:
    policy = WritePolicy(mode, selective_hits=2)
    assert policy.on_entry() is on_entry
    assert [policy.on_hit(hits) for hits in range(4)] == on_hits
    assert [policy.on_eviction(hits) for hits in range(4)] == on_eviction


def test_the_threshold_counts_hits() -> None:
    policy = WritePolicy("write_through_selective", selective_hits=3)
    assert [policy.on_hit(hits) for hits in (2, 3)] == [False, True]
    assert [policy.on_eviction(hits) for hits in (2, 3)] == [False, True]


def test_the_default_writes_through() -> None:
    assert WritePolicy() == WritePolicy("write_through", 2)
