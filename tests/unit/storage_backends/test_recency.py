from __future__ import annotations

from hicache.storage_backends.recency import MAX_NOTED, RecentKeys


def test_the_last_use_counts_and_is_taken_once() -> None:
    recent = RecentKeys()
    for key in (b"a", b"b", b"a", b"c"):
        recent.note([b"above", key], 2)
    recent.note([b"d"], 0)
    assert len(recent) == 4, "nothing was used"
    assert recent.take() == [b"b", b"a", b"c"]
    assert recent.take() == []


def test_the_oldest_notes_are_forgotten() -> None:
    recent = RecentKeys()
    keys = [number.to_bytes(4, "big") for number in range(MAX_NOTED + 3)]
    for key in keys:
        recent.note([key], 1)
    assert recent.take() == keys[3:]


def test_notes_have_their_time() -> None:
    recent = RecentKeys()
    assert not recent.older_than(5.0)
    for now, key in ((1.0, b"a"), (2.0, b"b"), (3.0, b"c")):
        recent.note([key], 1, now)
    assert recent.older_than(2.0)
    assert not recent.older_than(1.0)
    assert recent.take(since=2.0) == [b"b", b"c"]
    assert len(recent) == 0
