from __future__ import annotations

import pytest

from hicache.errors import StorageError, StoreUnavailableError
from hicache.storage_backends.memory import MemoryBackend
from hicache.storage_backends.wrappers import Fault, FaultyBackend, SlowBackend
from hicache.testing.storage import IDENTITY, chain, read_checked, run_of

LAYOUT = IDENTITY.layout
KEYS = chain("a", 6)


def memory() -> MemoryBackend:
    return MemoryBackend(IDENTITY, 1 << 20)


def test_scripted_faults_come_in_order() -> None:
    store = FaultyBackend(memory())
    store.script("write", Fault.ERROR, None, Fault.SHORT)
    with pytest.raises(StoreUnavailableError, match="write"):
        store.write([run_of(LAYOUT, KEYS)])
    assert store.usage().pages == 0
    assert store.write([run_of(LAYOUT, KEYS[:2])]) == [2]
    assert store.write([run_of(LAYOUT, KEYS)]) == [3]
    assert store.write([run_of(LAYOUT, KEYS)]) == [6]
    assert store.injected == 2


def test_short_reads_and_damage() -> None:
    inner = memory()
    store = FaultyBackend(inner, medium=inner)
    store.write([run_of(LAYOUT, KEYS)])
    store.script("read_into", Fault.SHORT, Fault.CORRUPT)
    assert read_checked(store, LAYOUT, KEYS) == 3
    assert read_checked(store, LAYOUT, KEYS) == 5
    assert store.contains_prefix(KEYS) == 5


def test_a_seed_gives_the_same_faults() -> None:
    def outcomes(seed: int) -> list[bool]:
        store = FaultyBackend(memory(), rate=0.5, seed=seed)
        return [_fails(store) for _ in range(50)]

    assert outcomes(1) == outcomes(1) != outcomes(2)


def _fails(store: FaultyBackend) -> bool:
    try:
        store.clear()
    except StorageError:
        return True
    return False


def test_latency_by_call_and_by_page() -> None:
    slept: list[float] = []
    store = SlowBackend(memory(), per_call=1, per_page=0.5, sleep=slept.append)
    store.write([run_of(LAYOUT, KEYS)])
    read_checked(store, LAYOUT, KEYS[:2])
    store.contains_prefix(KEYS)
    assert slept == [4, 2, 1]
