"""Which pages are admitted to storage, mode by mode."""

from __future__ import annotations

import pytest

from hicache.policies.admission import AdmissionMode, AdmissionPolicy
from hicache.testing.policies import Entry


@pytest.mark.parametrize(
    ("mode", "by_hits", "by_priority"),
    [
        ("all", [True, True, True, True], [True, True, True]),
        ("hits", [False, False, True, True], [False, False, False]),
        ("tinylfu", [False, False, True, True], [False, False, False]),
        ("priority", [False, False, False, False], [False, True, True]),
    ],
)
def test_who_is_admitted(mode: AdmissionMode, by_hits: list[bool], by_priority: list[bool]) -> None:
    policy = AdmissionPolicy(mode, min_hits=2, min_priority=1)
    assert [policy.admits(Entry(hits=hits, key=b"%d" % hits)) for hits in range(4)] == by_hits
    assert [policy.admits(Entry(priority=rank, key=b"p%d" % rank)) for rank in range(3)] == by_priority


def test_tinylfu_counts_stays_and_not_questions() -> None:
    policy = AdmissionPolicy("tinylfu", min_hits=2)
    first = Entry(created=1, key=b"content")
    assert [policy.admits(first) for _ in range(3)] == [False] * 3
    assert policy.admits(Entry(created=9, key=b"content"))  # it left memory and came back
    assert not policy.admits(Entry(created=9, key=b"another"))
