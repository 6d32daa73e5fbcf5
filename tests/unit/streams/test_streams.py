"""The rules of order and failure, on every kind of stream.

A thread is waited for, a stepped stream is driven, and a CUDA stream runs on a fake device that is driven.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
from fake_cuda import FakeCuda, raw_of

from hicache.errors import ProtocolError, TransferError
from hicache.streams import Stream, ThreadStream, create_stream, record_compute
from hicache.streams.cuda import CudaStream
from hicache.testing.stepped import SteppedStream, drain

Work = Callable[[], None]


@dataclass
class Pair:
    """Two streams of one kind."""

    first: Stream
    second: Stream
    launch: Callable[[Work], Work]
    """What to submit for work that is not over when `submit` returns."""
    let_run: Callable[[Stream], None]
    """Give one of them the chance to run ahead of the other, if nothing holds it back."""
    settle: Callable[[], None]
    """Let both run all they have."""


def _threads(_patch: pytest.MonkeyPatch) -> Pair:
    streams = ThreadStream("first"), ThreadStream("second")

    def settle() -> None:
        for stream in streams:
            stream.clear_error()
            stream.synchronize()

    return Pair(*streams, lambda work: work, lambda stream: time.sleep(0.02), settle)


def _stepped(_patch: pytest.MonkeyPatch) -> Pair:
    streams = SteppedStream("first"), SteppedStream("second")
    return Pair(*streams, lambda work: work, lambda stream: drain(stream), lambda: drain(*streams))


def _cuda(patch: pytest.MonkeyPatch) -> Pair:
    cuda = FakeCuda()
    cuda.install(patch)

    def let_run(stream: Stream) -> None:
        while raw_of(stream).step():
            pass

    return Pair(CudaStream("first", 0), CudaStream("second", 0), cuda.launch, let_run, cuda.drain)


@pytest.fixture(params=[_threads, _stepped, _cuda])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    made: Pair = request.param(monkeypatch)
    yield made
    for stream in (made.first, made.second):
        stream.close()


def _fail() -> None:
    raise OSError("broken link")


def test_work_runs_in_submission_order(pair: Pair) -> None:
    seen: list[int] = []
    for number in range(50):
        pair.first.submit(pair.launch(partial(seen.append, number)))
    pair.settle()
    assert seen == list(range(50))


def test_a_wait_holds_back_the_other_stream(pair: Pair) -> None:
    seen: list[str] = []
    release = threading.Event()
    gate = pair.first.record()
    pair.first.submit(pair.launch(lambda: _await(release)))
    pair.first.submit(pair.launch(partial(seen.append, "first")))
    ready = pair.first.record()
    pair.second.wait(ready)
    pair.second.submit(pair.launch(partial(seen.append, "second")))
    pair.let_run(pair.second)
    release.set()
    pair.settle()
    assert seen == ["first", "second"] and gate.query() and ready.query()


def test_an_error_poisons_until_it_is_cleared_at_its_place(pair: Pair) -> None:
    stream, seen = pair.first, []
    before = stream.record()
    stream.submit(_fail)
    failed = stream.record()
    stream.submit(pair.launch(partial(seen.append, "skipped")))
    skipped = stream.record()
    stream.clear_error()
    stream.submit(pair.launch(partial(seen.append, "runs")))
    good = stream.record()
    pair.settle()
    assert seen == ["runs"] and before.query() and good.query()
    good.gate()
    for event in (failed, skipped):
        for observe in (event.query, event.synchronize, event.gate, event.query):
            with pytest.raises(TransferError, match="broken link") as caught:
                observe()
            assert isinstance(caught.value.__cause__, OSError)


def test_a_failure_shows_only_after_the_work_before_it(pair: Pair) -> None:
    """What is still running may write to pages that are freed when the failure is seen."""
    stream, release = pair.first, threading.Event()
    stream.submit(pair.launch(lambda: _await(release)))
    stream.submit(_fail)
    failed = stream.record()
    assert failed.query() is False
    release.set()
    pair.settle()
    with pytest.raises(TransferError, match="broken link"):
        failed.query()


def test_waiting_for_a_failed_event_poisons(pair: Pair) -> None:
    seen: list[str] = []
    pair.first.submit(_fail)
    failed = pair.first.record()
    for _again in range(2):  # not known yet, and known
        pair.second.wait(failed)
        pair.second.submit(pair.launch(partial(seen.append, "skipped")))
        event = pair.second.record()
        pair.second.clear_error()
        pair.settle()
        with pytest.raises(TransferError, match="broken link"):
            event.query()
        with pytest.raises(TransferError, match="broken link"):
            failed.query()
    assert seen == []


def test_the_first_failure_is_the_one_reported(pair: Pair) -> None:
    pair.first.submit(lambda: (_ for _ in ()).throw(OSError("other link")))
    pair.second.submit(_fail)
    pair.second.wait(pair.first.record())
    event = pair.second.record()
    pair.settle()
    with pytest.raises(TransferError, match="broken link"):
        event.query()


def test_a_wait_holds_also_on_a_poisoned_stream(pair: Pair) -> None:
    seen: list[str] = []
    release = threading.Event()
    pair.first.submit(pair.launch(lambda: _await(release)))
    pair.first.submit(pair.launch(partial(seen.append, "first")))
    pair.second.submit(_fail)
    pair.second.wait(pair.first.record())
    pair.second.clear_error()
    pair.second.submit(pair.launch(partial(seen.append, "second")))
    pair.let_run(pair.second)
    release.set()
    pair.settle()
    assert seen == ["first", "second"]


def test_a_wait_for_a_failed_event_holds_too(pair: Pair) -> None:
    seen: list[str] = []
    release = threading.Event()
    pair.first.submit(pair.launch(lambda: _await(release)))
    pair.first.submit(pair.launch(partial(seen.append, "first")))
    pair.first.submit(_fail)
    pair.second.wait(pair.first.record())
    pair.second.clear_error()
    pair.second.submit(pair.launch(partial(seen.append, "second")))
    pair.let_run(pair.second)
    release.set()
    pair.settle()
    assert seen == ["first", "second"]


def test_submit_all_records_after_each(pair: Pair) -> None:
    seen: list[list[bool]] = []
    submitted = threading.Event()

    def second() -> None:
        seen.append([event.query() for event in events])

    events = pair.first.submit_all([pair.launch(lambda: _await(submitted)), pair.launch(second)])
    submitted.set()
    pair.settle()
    assert seen == [[True, False]] and [event.query() for event in events] == [True, True]


def test_submit_all_stops_at_a_failure(pair: Pair) -> None:
    seen: list[int] = []
    append = [pair.launch(partial(seen.append, number)) for number in range(3)]
    good, failed, skipped = pair.first.submit_all([append[0], _fail, append[1]])
    (poisoned,) = pair.first.submit_all([append[2]])
    pair.first.clear_error()
    pair.settle()
    assert seen == [0] and good.query()
    for event in (failed, skipped, poisoned):
        with pytest.raises(TransferError, match="broken link"):
            event.query()
    assert pair.first.submit_all([]) == []


def test_close_finishes_the_work_and_may_be_repeated(pair: Pair) -> None:
    stream, seen = pair.first, []
    stream.submit(pair.launch(partial(seen.append, 1)))
    stream.close()
    stream.close()
    assert seen == [1]


def test_a_closed_stream_takes_no_work(pair: Pair) -> None:
    stream, event = pair.first, pair.second.record()
    stream.close()
    calls: list[Work] = [
        partial(stream.submit, _fail),
        partial(stream.submit_all, [_fail]),
        stream.record,
        partial(stream.wait, event),
        stream.clear_error,
        stream.synchronize,
    ]
    for call in calls:
        with pytest.raises(ProtocolError, match="stream first is closed"):
            call()


def test_query_does_not_block_while_work_runs() -> None:
    stream, release = ThreadStream("blocked"), threading.Event()
    stream.submit(lambda: _await(release))
    event = stream.record()
    assert event.query() is False
    release.set()
    event.synchronize()
    assert event.query() is True
    stream.close()


def test_gate_of_a_thread_stream_blocks() -> None:
    stream, release, seen = ThreadStream("blocked"), threading.Event(), []
    stream.submit(lambda: _await(release))
    stream.submit(partial(seen.append, 1))
    event = stream.record()
    threading.Timer(0.02, release.set).start()
    event.gate()
    assert seen == [1]
    stream.close()


def test_a_thread_stream_waits_for_a_stepped_one() -> None:
    gate, stream, seen = SteppedStream("gate"), ThreadStream("thread"), []
    gate.submit(_fail)
    ready = threading.Event()
    stream.submit(lambda: _await(ready))
    stream.wait(gate.record())
    stream.submit(partial(seen.append, "skipped"))
    drain(gate)
    ready.set()
    with pytest.raises(TransferError):
        stream.synchronize()
    assert seen == []
    stream.close()


def test_system_exit_does_not_kill_the_worker() -> None:
    stream = ThreadStream("exit")
    stream.submit(lambda: (_ for _ in ()).throw(SystemExit(1)))
    with pytest.raises(TransferError):
        stream.synchronize()
    stream.clear_error()
    stream.synchronize()
    stream.close()


def test_cpu_streams_and_compute() -> None:
    stream = create_stream("cpu", "copies", priority=-1)
    stream.synchronize()
    stream.close()
    assert record_compute("cpu") is None


def _await(event: threading.Event) -> None:
    assert event.wait(30)
