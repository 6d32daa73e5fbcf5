from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hicache.errors import ConfigError, StorageError, StoreCorruptError, StoreUnavailableError
from hicache.storage_backends.memory import MemoryBackend
from hicache.storage_backends.recovering import RecoveringBackend
from hicache.testing.storage import IDENTITY, chain, run_of

LAYOUT = IDENTITY.layout
KEYS = chain("a", 4)
LONG = 30.0


class Breakable(MemoryBackend):
    """Damaged when told to; `inside` and `go_on` hold a lookup where the test wants it."""

    def __init__(self) -> None:
        super().__init__(IDENTITY, 1 << 20)
        self.damaged = self.closed = False
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        self.inside.set()
        assert self.go_on.wait(LONG)
        if self.damaged:
            raise StoreCorruptError("torn")
        return super().contains_prefix(keys)

    def close(self) -> None:
        self.closed = True
        super().close()


class Shop:
    """Where a RecoveringBackend gets its backends from: each of `failures` once, then new ones."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.made: list[Breakable] = []

    def open(self) -> Breakable:
        if self.failures:
            raise self.failures.pop(0)
        self.made.append(Breakable())
        return self.made[-1]


def test_it_opens_at_the_first_call_and_only_once() -> None:
    shop = Shop()
    store = RecoveringBackend(shop.open)
    assert not shop.made and store.generation() == 0
    with pytest.raises(StoreUnavailableError, match="not open"):
        store.usage()
    assert store.write([run_of(LAYOUT, KEYS)]) == [4]
    assert store.contains_prefix(KEYS) == 4 and store.usage().pages == 4 and len(shop.made) == 1


def test_what_cannot_be_opened_is_tried_at_each_call() -> None:
    store = RecoveringBackend(Shop(StoreUnavailableError("gone"), ConfigError("no folder")).open)
    with pytest.raises(StoreUnavailableError, match="gone"):
        store.contains_prefix(KEYS)
    with pytest.raises(StoreUnavailableError, match="no folder"):
        store.contains_prefix(KEYS)
    assert store.contains_prefix(KEYS) == 0


def test_open_tells_the_caller_what_is_wrong_with_the_configuration() -> None:
    with pytest.raises(ConfigError, match="no folder"):
        RecoveringBackend(Shop(ConfigError("no folder")).open).open()


def test_damage_closes_the_backend_and_the_next_call_opens_another() -> None:
    shop = Shop()
    store = RecoveringBackend(shop.open)
    store.write([run_of(LAYOUT, KEYS)])
    before = store.generation()
    shop.made[0].damaged = True
    with pytest.raises(StoreCorruptError):
        store.contains_prefix(KEYS)
    assert shop.made[0].closed and store.generation() != before
    assert store.contains_prefix(KEYS) == 0 and len(shop.made) == 2


def test_another_error_keeps_the_backend() -> None:
    shop = Shop()
    store = RecoveringBackend(shop.open)
    store.contains_prefix(KEYS)
    with pytest.raises(Exception, match="buffers"):
        store.read_into(KEYS, [])
    assert not shop.made[0].closed and store.contains_prefix(KEYS) == 0 and len(shop.made) == 1


def test_runs_from_before_the_damage_are_too_late() -> None:
    shop = Shop()
    store = RecoveringBackend(shop.open)
    store.contains_prefix(KEYS)
    before = store.generation()
    shop.made[0].damaged = True
    with pytest.raises(StorageError):
        store.contains_prefix(KEYS)
    other = chain("b", 2)
    now = store.generation()
    runs = [run_of(LAYOUT, KEYS), run_of(LAYOUT, other), run_of(LAYOUT, chain("c", 1))]
    stamped = [replace(runs[0], generation=before), replace(runs[1], generation=now), runs[2]]
    assert store.write(stamped) == [0, 2, 1]


def test_clearing_moves_the_generation_and_its_runs_are_too_late() -> None:
    store = RecoveringBackend(Shop().open)
    store.write([run_of(LAYOUT, KEYS)])
    before = store.generation()
    store.clear()
    assert store.write([replace(run_of(LAYOUT, KEYS), generation=before)]) == [0]
    assert store.write([replace(run_of(LAYOUT, KEYS), generation=store.generation())]) == [4]


def test_a_damaged_backend_is_closed_when_its_last_call_has_returned() -> None:
    shop = Shop()
    store = RecoveringBackend(shop.open)
    store.open()
    first = shop.made[0]
    first.go_on.clear()
    slow = threading.Thread(target=look_up_damaged, args=(store,))
    slow.start()
    assert first.inside.wait(LONG)
    first.write = _torn  # type: ignore[method-assign]
    with pytest.raises(StoreCorruptError):
        store.write([])
    assert not first.closed and store.write([run_of(LAYOUT, KEYS)]) == [4] and len(shop.made) == 2
    first.damaged = True
    first.go_on.set()
    slow.join(LONG)
    assert first.closed and not shop.made[1].closed and store.generation() >> 32 == 1


def test_close_is_for_good() -> None:
    shop = Shop()
    store = RecoveringBackend(shop.open)
    store.contains_prefix(KEYS)
    store.close()
    store.close()
    assert shop.made[0].closed
    with pytest.raises(StoreUnavailableError, match="closed"):
        store.contains_prefix(KEYS)
    assert len(shop.made) == 1


def look_up_damaged(store: RecoveringBackend) -> None:
    with pytest.raises(StoreCorruptError):
        store.contains_prefix(KEYS)


def _torn(runs: object) -> list[int]:
    raise StoreCorruptError("torn")
