"""The storage engine, stepped by hand; and with real threads over a backend that hangs until it is let go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from hicache.errors import StorageError, StoreUnavailableError
from hicache.hashing import StoreIdentity, page_digests
from hicache.layout import KVLayout
from hicache.storage_backends.base import PageRun
from hicache.testing.rig import FlakyBackend
from hicache.transfer import storage_tickets
from hicache.transfer.breaker import BreakerState
from hicache.transfer.storage_engine import MAX_QUEUED_LOADS, MAX_WORKERS, EngineLimits, StorageEngine
from hicache.transfer.storage_tickets import BATCH_PAGES

LAYOUT = KVLayout(1, 1, 4, 2)
PAGE = LAYOUT.page_stride
ON, OFF, TRYING = BreakerState
LONG = 30.0  # seconds a test waits for another thread before it fails


def tokens(first: int, num_pages: int) -> bytes:
    return np.arange(first * 1000, first * 1000 + 2 * num_pages, dtype=np.int32).tobytes()


def buffers(count: int, fill: int = 0) -> list[memoryview]:
    return [memoryview(np.full(PAGE, fill, np.uint8)) for _ in range(count)]


def run(first: int = 1, num_pages: int = 1, generation: int | None = None) -> PageRun:
    return PageRun(page_digests(b"", tokens(first, num_pages), 2), buffers(num_pages, first), None, generation)


@dataclass
class Bench:
    """A stepped engine and its clock."""

    backend: FlakyBackend
    engine: StorageEngine
    move_clock: Callable[[float], None]


@pytest.fixture
def bench() -> Bench:
    now = [0.0]
    backend = FlakyBackend(StoreIdentity(LAYOUT, "engine"), 2000 * PAGE)
    engine = StorageEngine(backend, 2, EngineLimits(3 * PAGE), threads=0, clock=lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return Bench(backend, engine, move)


def stop_loads(bench: Bench) -> None:
    bench.backend.failing_loads = 3
    for _ in range(3):
        assert bench.engine.lookup(b"", tokens(1, 1)) and bench.engine.run_next()
    assert bench.engine.states == (OFF, ON)


# ---- order and bounds -----------------------------------------------------------------------


def test_loads_go_before_stores_and_stores_in_their_order(bench: Bench) -> None:
    first, second = bench.engine.write([run(1)], PAGE), bench.engine.write([run(2)], PAGE)
    load = bench.engine.lookup(b"", tokens(1, 1))
    assert first and second and load
    done = []
    while bench.engine.run_next():
        done.append([load.done, first.done, second.done])
    assert done == [[True, False, False], [True, True, False], [True, True, True]]
    assert load.hits == 0 and first.counts == second.counts == [1]


def test_one_store_at_a_time(bench: Bench) -> None:
    bench.engine.write([run(1)], PAGE)
    bench.engine.write([run(2)], PAGE)
    call = bench.engine.begin_next()
    assert call is not None and bench.engine.begin_next() is None
    call()
    assert bench.engine.begin_next() is not None


def test_a_store_beyond_the_queue_is_shed_unless_it_is_alone(bench: Bench) -> None:
    assert bench.engine.write([run(1, 9)], 9 * PAGE)
    assert bench.engine.write([run(2)], PAGE) is None
    assert bench.engine.poll() == {"store_shed": 1}
    while bench.engine.run_next():
        pass
    assert bench.engine.queued_bytes == 0 and bench.engine.write([run(2)], PAGE)


def test_a_store_that_waited_too_long_is_shed(bench: Bench) -> None:
    old = bench.engine.write([run(1)], PAGE)
    bench.move_clock(6)
    young = bench.engine.write([run(2)], PAGE)
    bench.move_clock(6)
    assert bench.engine.poll() == {"store_shed": 1}
    assert old and young and old.done and old.counts == [0] and not young.done
    assert isinstance(old.error, StoreUnavailableError) and old.error.reason == "shed"
    assert bench.engine.queued_bytes == PAGE and bench.engine.states == (ON, ON)
    while bench.engine.run_next():
        pass
    assert young.counts == [1] and bench.backend.usage().pages == 1


def test_a_load_that_waited_too_long_fails_without_a_call(bench: Bench) -> None:
    ticket = bench.engine.lookup(b"", tokens(1, 1))
    bench.move_clock(5.1)
    bench.backend.failing_loads = 1
    assert not bench.engine.run_next() and bench.backend.failing_loads == 1
    assert ticket and ticket.done and isinstance(ticket.error, StorageError) and ticket.error.reason == "timeout"
    assert bench.engine.poll() == {"load_timeout": 1}


def test_too_many_loads_are_refused(bench: Bench) -> None:
    for _ in range(MAX_QUEUED_LOADS):
        assert bench.engine.lookup(b"", b"")
    assert bench.engine.lookup(b"", b"") is None and bench.engine.read([], []) is None


def test_reads_go_in_batches_round_robin_and_end_early_when_cancelled(bench: Bench) -> None:
    bench.backend.write([run(1, 2 * BATCH_PAGES)])
    keys = page_digests(b"", tokens(1, 2 * BATCH_PAGES), 2)
    one, two = (bench.engine.read(keys, buffers(len(keys))) for _ in range(2))
    assert one and two
    bench.engine.run_next()
    bench.engine.run_next()
    assert one.count == two.count == BATCH_PAGES and not one.done
    one.cancelled = True
    while bench.engine.run_next():
        pass
    assert one.done and one.count == BATCH_PAGES and two.count == 2 * BATCH_PAGES


# ---- breakers -------------------------------------------------------------------------------


def test_failing_loads_stop_loads_and_not_stores_and_come_back(bench: Bench) -> None:
    stop_loads(bench)
    assert bench.engine.usage() is None  # nothing is asked that may not answer
    assert not bench.engine.takes_loads and bench.engine.lookup(b"", tokens(1, 1)) is None
    store = bench.engine.write([run(1)], PAGE)
    assert bench.engine.run_next() and store and store.counts == [1]
    bench.move_clock(1)
    trial = bench.engine.lookup(b"", tokens(1, 1))
    assert trial and bench.engine.lookup(b"", tokens(1, 1)) is None and bench.engine.states == (TRYING, ON)
    bench.engine.run_next()
    assert trial.hits == 1 and bench.engine.states == (ON, ON)
    assert bench.engine.poll() == {"load_failed": 3}


def test_a_full_disk_stops_stores_and_not_loads(bench: Bench) -> None:
    bench.backend.error = StoreUnavailableError("full", "disk_full")
    bench.backend.failing_stores = 3
    tickets = [bench.engine.write([run(index)], PAGE) for index in range(3)]
    while bench.engine.run_next():
        pass
    assert all(ticket and ticket.error and ticket.counts == [0] for ticket in tickets)
    assert bench.engine.states == (ON, OFF) and bench.engine.write([run(9)], PAGE) is None
    assert bench.engine.poll() == {"store_disk_full": 3}
    assert bench.engine.lookup(b"", tokens(1, 1)) and bench.engine.run_next()


def test_what_waits_when_loads_are_stopped_is_dropped_without_a_call(bench: Bench) -> None:
    bench.backend.failing_loads = 4
    tickets = [bench.engine.lookup(b"", tokens(1, 1)) for _ in range(5)]
    while bench.engine.run_next():
        pass
    assert bench.backend.failing_loads == 1
    assert all(ticket and ticket.done and ticket.error for ticket in tickets)
    assert bench.engine.poll() == {"load_failed": 3, "load_stopped": 2}


def test_a_cancelled_trial_makes_way_for_the_next(bench: Bench) -> None:
    stop_loads(bench)
    bench.move_clock(1)
    trial = bench.engine.lookup(b"", tokens(1, 1))
    assert trial is not None
    trial.cancelled = True
    assert not bench.engine.run_next() and trial.done
    assert bench.engine.lookup(b"", tokens(1, 1)) and bench.engine.run_next()
    assert bench.engine.states == (ON, ON)


def test_a_trial_that_waits_in_vain_is_a_failed_one(bench: Bench) -> None:
    stop_loads(bench)
    bench.move_clock(1)
    assert bench.engine.lookup(b"", tokens(1, 1))
    bench.move_clock(5.1)
    bench.engine.poll()
    assert bench.engine.states == (OFF, ON)
    bench.move_clock(1.5)
    assert not bench.engine.takes_loads


def test_a_call_past_its_deadline_is_noticed_by_whoever_submits(bench: Bench) -> None:
    hung = bench.engine.lookup(b"", tokens(1, 1))
    call = bench.engine.begin_next()
    waiting = bench.engine.lookup(b"", tokens(1, 1))
    bench.move_clock(5.1)
    assert bench.engine.lookup(b"", tokens(1, 1)) is None
    assert hung and hung.hangs and waiting and waiting.done and bench.engine.states == (OFF, ON)
    assert bench.engine.usage() is None
    assert call is not None
    call()
    assert hung.done and not hung.hangs and bench.engine.states == (OFF, ON)
    assert bench.engine.poll()["load_timeout"] == 2  # the call, and what waited for as long


def test_a_read_that_hung_for_one_batch_goes_on_if_loads_work_again(bench: Bench) -> None:
    bench.backend.write([run(1, 2 * BATCH_PAGES)])
    keys = page_digests(b"", tokens(1, 2 * BATCH_PAGES), 2)
    slow = bench.engine.read(keys, buffers(len(keys)))
    call = bench.engine.begin_next()
    bench.move_clock(5.1)
    bench.engine.poll()
    bench.move_clock(1.0)
    assert bench.engine.read(keys[:1], buffers(1)) and bench.engine.run_next() and bench.engine.states == (ON, ON)
    assert slow and slow.hangs and call is not None
    call()
    assert not slow.hangs and not slow.done
    assert bench.engine.run_next() and slow.done and slow.count == 2 * BATCH_PAGES


def test_a_write_past_its_deadline_stops_stores(bench: Bench) -> None:
    hung = bench.engine.write([run(1)], PAGE)
    call = bench.engine.begin_next()
    bench.move_clock(25)
    bench.engine.poll()
    assert bench.engine.states == (ON, ON)
    waiting = bench.engine.write([run(2)], PAGE)
    bench.move_clock(5.1)
    assert bench.engine.poll() == {"store_timeout": 1, "store_stopped": 1}
    assert hung and hung.hangs and waiting and waiting.counts == [0] and bench.engine.states == (ON, OFF)
    assert bench.engine.usage() is None  # it might wait for the same thing
    bench.move_clock(1)
    assert bench.engine.write([run(3)], PAGE) is None  # the order of stores is kept: it could not begin
    assert call is not None
    call()
    trial = bench.engine.write([run(3)], PAGE)
    assert hung.counts == [1] and trial is not None and bench.engine.run_next() and trial.counts == [1]
    assert bench.engine.states == (ON, ON)


def test_no_store_is_taken_while_one_hangs_in_the_only_place_there_is(bench: Bench) -> None:
    """A trial behind it could not begin: whoever waited for it would wait until it is shed, again after each pause."""
    assert bench.engine.write([run(1)], PAGE) is not None
    hung = bench.engine.begin_next()
    assert hung is not None
    bench.move_clock(31.0)
    bench.engine.poll()
    assert bench.engine.states == (ON, OFF)
    for _ in range(5):
        bench.move_clock(100.0)  # longer than any pause
        assert not bench.engine.takes_stores and bench.engine.write([run(2)], PAGE) is None
        assert bench.engine.queued_bytes == PAGE
    hung()
    trial = bench.engine.write([run(2)], PAGE)
    assert trial is not None and bench.engine.states == (ON, TRYING)
    assert bench.engine.run_next() and trial.done and bench.engine.states == (ON, ON)


def test_loads_are_tried_again_beside_one_that_hangs(bench: Bench) -> None:
    """They have places enough, until hanging calls have taken them all."""
    hung = 0
    while bench.engine.takes_loads:
        assert bench.engine.lookup(b"", tokens(1, 1)) is not None and bench.engine.begin_next() is not None
        hung += 1
        bench.move_clock(6.0)
        bench.engine.poll()
        bench.move_clock(100.0)
    assert hung == MAX_WORKERS - 1
    assert bench.engine.lookup(b"", tokens(1, 1)) is None
    assert bench.engine.write([run(1)], PAGE) is not None and bench.engine.run_next()


def test_a_long_store_is_many_calls_each_with_a_deadline_of_its_own(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_tickets, "WRITE_PAGES", 5)
    monkeypatch.setattr(storage_tickets, "WRITE_BYTES", 4 * PAGE)
    runs = [run(1, 11), run(2, 1), run(3, 2)]
    long = bench.engine.write(runs, 14 * PAGE)
    assert long is not None
    calls = 0
    while not long.done:
        call = bench.engine.begin_next()
        assert call is not None and call.ticket is long
        bench.move_clock(29.0)
        bench.engine.poll()
        call()
        calls += 1
    assert calls == 4 and long.counts == [11, 1, 2] and bench.engine.states == (ON, ON)
    keys = page_digests(b"", tokens(1, 11), 2)
    assert bench.backend.contains_prefix(keys) == 11


def test_a_run_that_is_cut_short_ends_there_and_the_others_go_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_tickets, "WRITE_PAGES", 2)
    orphan = replace(run(1, 5), parent=b"x" * 32)
    ticket = bench.engine.write([orphan, run(2, 3)], 8 * PAGE)
    assert ticket is not None
    while bench.engine.run_next():
        pass
    assert ticket.done and ticket.counts == [0, 3] and ticket.error is None


def test_a_backend_that_is_not_there_has_no_usage(bench: Bench) -> None:
    assert bench.engine.usage() is not None
    bench.backend.close()
    assert bench.engine.usage() is None


def test_an_error_of_another_kind_is_counted_as_such(bench: Bench) -> None:
    bench.backend.error, bench.backend.failing_stores = ZeroDivisionError(), 1
    bench.engine.write([run(1)], PAGE)
    bench.engine.run_next()
    assert bench.engine.poll() == {"store_error": 1}


# ---- clearing and generations ---------------------------------------------------------------


def test_the_generation_is_known_after_each_call(bench: Bench) -> None:
    bench.backend.clear()
    assert bench.engine.generation == 0
    late = bench.engine.write([run(1, generation=0)], PAGE)
    bench.engine.run_next()
    assert late and late.counts == [0] and bench.engine.generation == 1


def test_stores_that_wait_are_too_late_after_a_clear(bench: Bench) -> None:
    bench.backend.write([run(2)])
    waiting = bench.engine.write([run(1, generation=0)], PAGE)
    bench.engine.clear()
    assert bench.backend.usage().pages == 0 and bench.engine.generation == 1
    while bench.engine.run_next():
        pass
    assert waiting and waiting.counts == [0] and bench.backend.usage().pages == 0


def test_a_full_disk_can_be_cleared(bench: Bench) -> None:
    bench.backend.write([run(2)])
    bench.engine.trip(StoreUnavailableError("full", "disk_full"))
    bench.engine.clear()
    assert bench.backend.usage().pages == 0 and bench.engine.states == (OFF, OFF)


def test_clear_raises_what_the_backend_raises_and_stops_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise StoreUnavailableError("read-only", "read_only")

    monkeypatch.setattr(bench.backend, "clear", refuse)
    for _ in range(4):
        with pytest.raises(StoreUnavailableError, match="read-only"):
            bench.engine.clear()
    assert bench.engine.states == (ON, ON) and bench.engine.poll() == {"store_read_only": 4}


def test_a_clear_behind_a_call_that_hangs_is_withdrawn(bench: Bench) -> None:
    bench.engine.write([run(1)], PAGE)
    call = bench.engine.begin_next()
    with pytest.raises(StoreUnavailableError, match="not begun"):
        bench.engine.clear()
    assert call is not None
    call()
    assert not bench.engine.run_next() and bench.backend.usage().pages == 1


# ---- real threads ---------------------------------------------------------------------------


class Hanging(FlakyBackend):
    """Lookups, writes or clears hang until they are let go."""

    def __init__(self, hangs: str = "load") -> None:
        super().__init__(StoreIdentity(LAYOUT, "engine"), 100 * PAGE)
        self.hangs = hangs
        self.began, self.go_on, self.was_closed = threading.Event(), threading.Event(), threading.Event()

    def _hang(self, what: str) -> None:
        if what == self.hangs:
            self.began.set()
            assert self.go_on.wait(LONG)

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        self._hang("load")
        return super().contains_prefix(keys)

    def write(self, runs: Sequence[PageRun]) -> list[int]:
        self._hang("store")
        return super().write(runs)

    def clear(self) -> int:
        self._hang("clear")
        return super().clear()

    def close(self) -> None:
        super().close()
        self.was_closed.set()


@pytest.mark.parametrize("hangs", ["load", "store"])
def test_close_leaves_a_call_alone_that_hangs_and_its_worker_closes_the_backend(hangs: str) -> None:
    backend = Hanging(hangs)
    engine = StorageEngine(backend, 2, EngineLimits(100 * PAGE), threads=2)
    hung = engine.lookup(b"", tokens(1, 1)) if hangs == "load" else engine.write([run(1)], PAGE)
    assert backend.began.wait(LONG)
    behind = engine.write([run(2)], PAGE)
    assert hung and behind
    assert not engine.close(0.05)
    assert behind.done and not hung.done and not backend.was_closed.is_set()
    backend.go_on.set()
    assert backend.was_closed.wait(LONG) and hung.done


def test_a_read_that_hangs_at_the_close_ends_with_its_batch(bench: Bench) -> None:
    bench.backend.write([run(1, 2 * BATCH_PAGES)])
    keys = page_digests(b"", tokens(1, 2 * BATCH_PAGES), 2)
    ticket = bench.engine.read(keys, buffers(len(keys)))
    call = bench.engine.begin_next()
    assert not bench.engine.close(0.0) and call is not None
    call()
    assert ticket and ticket.done and ticket.count == BATCH_PAGES
    with pytest.raises(StoreUnavailableError):
        bench.backend.usage()


def test_a_clear_that_hangs_is_reported_as_under_way_and_stops_nothing() -> None:
    now = [0.0]
    backend = Hanging("clear")
    engine = StorageEngine(backend, 2, EngineLimits(100 * PAGE, store_deadline=0.05), clock=lambda: now[0])
    with pytest.raises(StoreUnavailableError, match="still under way"):
        engine.clear()
    assert backend.began.is_set()
    now[0] = 100.0
    assert not engine.poll() and engine.states == (ON, ON)
    backend.go_on.set()
    assert engine.wait_idle(LONG) and engine.generation == 1
    assert engine.close(LONG)


def test_close_finishes_stores_and_drops_loads() -> None:
    backend = Hanging("store")
    engine = StorageEngine(backend, 2, EngineLimits(100 * PAGE), threads=1)
    stores = [engine.write([run(index)], PAGE) for index in range(3)]
    assert backend.began.wait(LONG)
    load = engine.lookup(b"", tokens(1, 1))
    threading.Timer(0.05, backend.go_on.set).start()
    assert engine.close(LONG) and engine.close(LONG)
    assert load and load.done and load.hits == 0
    assert all(store and store.counts == [1] for store in stores)
    assert engine.lookup(b"", tokens(1, 1)) is None and engine.write([run(1)], PAGE) is None
    with pytest.raises(StoreUnavailableError, match="closed"):
        engine.clear()


def test_while_one_load_hangs_another_worker_tries_again() -> None:
    now = [0.0]
    backend = Hanging("load")
    engine = StorageEngine(backend, 2, EngineLimits(100 * PAGE), threads=2, clock=lambda: now[0])
    hung = engine.lookup(b"", tokens(1, 1))
    assert backend.began.wait(LONG) and hung
    now[0] = 6.0
    engine.poll()
    assert engine.states == (OFF, ON)
    now[0] = 7.0
    backend.hangs = ""
    trial = engine.lookup(b"", tokens(1, 1))
    assert trial and engine._wait(lambda: trial.done, LONG)
    assert engine.states == (ON, ON) and not hung.done
    backend.go_on.set()
    assert engine.close(LONG)


def test_with_its_only_worker_hanging_the_engine_stores_and_tries_again() -> None:
    now = [0.0]
    backend = Hanging("load")
    engine = StorageEngine(backend, 2, EngineLimits(100 * PAGE), threads=1, clock=lambda: now[0])
    hung = engine.lookup(b"", tokens(1, 1))
    assert backend.began.wait(LONG) and hung
    now[0] = 6.0
    engine.poll()  # a worker in its place
    store = engine.write([run(1)], PAGE)
    assert store and engine._wait(lambda: store.done, LONG)
    backend.hangs = ""
    now[0] = 7.0
    trial = engine.lookup(b"", tokens(1, 1))
    assert trial and engine._wait(lambda: trial.done, LONG)
    assert trial.hits == 1 and not hung.done
    backend.go_on.set()
    assert engine._wait(lambda: len(engine._threads) == 1, LONG), "who is too many goes"
    assert engine.close(LONG)
