"""Which pages are admitted to storage, mode by mode."""

from __future__ import annotations

import pytest

from hicache.policies.admission import AdmissionMode, AdmissionPolicy


@pytest.mark.parametrize(
    ("mode", "by_hits", "by_priority"),
    [
        ("all", [True, True, True, True], [True, True, True]),
        ("hits", [False, False, True, True], [False, False, False]),
        ("priority", [False, False, False, False], [False, True, True]),
    ],
)
def test_who_is_admitted(mode: AdmissionMode, by_hits: list[bool], by_priority: list[bool]) -> None:
    policy = AdmissionPolicy(mode, min_hits=2, min_priority=1)
    assert [policy.admits(hits, 0) for hits in range(4)] == by_hits
    assert [policy.admits(0, priority) for priority in range(3)] == by_priority
