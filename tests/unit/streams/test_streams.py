"""The rules of order and failure, on both streams; a real stream is waited for, a stepped one is driven."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from hicache.errors import ConfigError, ProtocolError, TransferError
from hicache.streams import Stream, ThreadStream, create_stream
from hicache.testing.stepped import SteppedStream, drain

Pair = tuple[Stream, Stream]


@pytest.fixture(params=[ThreadStream, SteppedStream])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    streams = request.param("a"), request.param("b")
    yield streams
    drain(*(stream for stream in streams if isinstance(stream, SteppedStream)))
    for stream in streams:
        stream.close()


def _settle(streams: Pair) -> None:
    """Let both run all they have."""
    drain(*(stream for stream in streams if isinstance(stream, SteppedStream)))
    for stream in streams:
        if isinstance(stream, ThreadStream):
            stream.clear_error()
            stream.synchronize()


def _fail() -> None:
    raise OSError("broken link")


def test_work_runs_in_submission_order(pair: Pair) -> None:
    seen: list[int] = []
    for number in range(50):
        pair[0].submit(partial(seen.append, number))
    _settle(pair)
    assert seen == list(range(50))


def test_a_wait_holds_back_the_other_stream(pair: Pair) -> None:
    first, second = pair
    seen: list[str] = []
    gate = first.record()
    first.submit(partial(seen.append, "first"))
    ready = first.record()
    second.wait(ready)
    second.submit(partial(seen.append, "second"))
    _settle(pair)
    assert seen == ["first", "second"] and gate.query() and ready.query()


def test_an_error_poisons_until_it_is_cleared_at_its_place(pair: Pair) -> None:
    stream, seen = pair[0], []
    before = stream.record()
    stream.submit(_fail)
    failed = stream.record()
    stream.submit(partial(seen.append, "skipped"))
    skipped = stream.record()
    stream.clear_error()
    stream.submit(partial(seen.append, "runs"))
    good = stream.record()
    _settle(pair)
    assert seen == ["runs"] and before.query() and good.query()
    for event in (failed, skipped):
        for observe in (event.query, event.synchronize, event.query):
            with pytest.raises(TransferError, match="broken link") as caught:
                observe()
            assert isinstance(caught.value.__cause__, OSError)


def test_waiting_for_a_failed_event_poisons(pair: Pair) -> None:
    first, second = pair
    seen: list[str] = []
    first.submit(_fail)
    second.wait(first.record())
    second.submit(partial(seen.append, "skipped"))
    event = second.record()
    _settle(pair)
    assert seen == []
    with pytest.raises(TransferError, match="broken link"):
        event.query()


def test_a_wait_holds_also_on_a_poisoned_stream(pair: Pair) -> None:
    first, second = pair
    seen: list[str] = []
    release = threading.Event()
    first.submit(lambda: _await(release))
    first.submit(partial(seen.append, "first"))
    second.submit(_fail)
    second.wait(first.record())
    second.clear_error()
    second.submit(partial(seen.append, "second"))
    _let_run(second)
    release.set()
    _settle(pair)
    assert seen == ["first", "second"]


def test_close_finishes_the_work_and_may_be_repeated(pair: Pair) -> None:
    stream, seen = pair[0], []
    stream.submit(partial(seen.append, 1))
    stream.close()
    stream.close()
    assert seen == [1]


@pytest.mark.parametrize("make", [ThreadStream, SteppedStream])
def test_a_closed_stream_takes_no_work(make: Callable[[str], Stream]) -> None:
    stream = make("closed")
    stream.close()
    with pytest.raises(ProtocolError, match="stream closed is closed"):
        stream.submit(_fail)


def test_query_does_not_block_while_work_runs() -> None:
    stream, release = ThreadStream("blocked"), threading.Event()
    stream.submit(lambda: _await(release))
    event = stream.record()
    assert event.query() is False
    release.set()
    event.synchronize()
    assert event.query() is True
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


def test_create_stream() -> None:
    stream = create_stream("cpu", "copies")
    stream.synchronize()
    stream.close()
    with pytest.raises(ConfigError, match="CPU streams only, use device: cpu"):
        create_stream("cuda:0", "copies")


def _let_run(stream: Stream) -> None:
    """Give `stream` the chance to run ahead of the other one, if nothing holds it back."""
    if isinstance(stream, SteppedStream):
        drain(stream)
    else:
        time.sleep(0.02)


def _await(event: threading.Event) -> None:
    assert event.wait(30)
