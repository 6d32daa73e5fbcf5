"""CUDA streams on a real device: order, failure, pooled events, and no call that waits for the whole device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from hicache.errors import ConfigError, ProtocolError, TransferError
from hicache.streams import Event, Stream, ThreadStream, create_stream, record_compute
from hicache.streams.cuda import CudaStream
from hicache.streams.cuda_events import event_pool

CYCLES = 1_000_000_000
"""About half a second: every check of "not yet" comes microseconds after the launch."""


@pytest.fixture(autouse=True)
def no_synchronisation_of_the_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # CUDA loads a kernel when it is first launched, and may wait for the device to do so: do that now.
    warm = torch.zeros(2, dtype=torch.int64, device="cuda")
    warm.fill_(1).add_(1)
    warm[:1].copy_(warm[1:])
    torch.cuda._sleep(1)
    torch.zeros(2, dtype=torch.int64).pin_memory().copy_(warm, non_blocking=True)
    torch.cuda.synchronize()

    def forbidden(_device: Any = None) -> None:
        raise AssertionError("the whole device was synchronised")

    monkeypatch.setattr(torch.cuda, "synchronize", forbidden)
    yield


@pytest.fixture
def streams() -> Iterator[tuple[Stream, Stream]]:
    pair = create_stream("cuda", "first"), create_stream("cuda", "second")
    yield pair
    for stream in pair:
        stream.close()


def _zeros(count: int) -> torch.Tensor:
    """On the device, and there before any stream goes on."""
    made = torch.zeros(count, dtype=torch.int64, device="cuda")
    torch.cuda.current_stream().synchronize()
    return made


def _sleep() -> None:
    torch.cuda._sleep(CYCLES)


def _fill(tensor: torch.Tensor, value: int) -> Callable[[], None]:
    def work() -> None:
        tensor.fill_(value)

    return work


def _copy(to: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    def work() -> None:
        to.copy_(source, non_blocking=True)

    return work


def test_a_wait_orders_streams_and_nothing_blocks(streams: tuple[Stream, Stream]) -> None:
    first, second = streams
    source, target = _zeros(64), _zeros(64)
    before = first.record()
    first.submit(_sleep)
    first.submit(_fill(source, 7))
    ready = first.record()
    second.wait(ready)
    second.submit(_copy(target, source))
    done = second.record()
    assert [ready.query(), done.query()] == [False, False]
    before.synchronize()
    assert ready.query() is False
    done.synchronize()
    assert ready.query() is True and target.tolist() == [7] * 64


def test_a_stream_that_does_not_wait_runs_ahead(streams: tuple[Stream, Stream]) -> None:
    first, second = streams
    target = _zeros(64)
    first.submit(_sleep)
    slow = first.record()
    second.submit(_fill(target, 3))
    second.record().synchronize()
    second.close()
    assert slow.query() is False
    slow.synchronize()
    assert target.tolist() == [3] * 64


@pytest.mark.parametrize("side", [False, True])
def test_gate_orders_the_current_stream_without_blocking(streams: tuple[Stream, Stream], side: bool) -> None:
    loads, source, target = streams[0], _zeros(64), _zeros(64)
    loads.submit(_sleep)
    loads.submit(_fill(source, 5))
    event = loads.record()
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.current_stream()):
        event.gate()
        target.copy_(source)
        computed = record_compute("cuda")
    assert computed is not None and event.query() is False and computed.query() is False
    computed.synchronize()
    assert event.query() is True and target.tolist() == [5] * 64


def test_attention_of_a_layer_waits_for_that_layer_only(streams: tuple[Stream, Stream]) -> None:
    loads, layers, out = streams[0], _zeros(32), _zeros(32)
    events = loads.submit_all([*(_fill(layers[i : i + 1], i + 1) for i in range(16)), _sleep])
    events += loads.submit_all([_fill(layers[i : i + 1], i + 1) for i in range(16, 32)])
    slept = events.pop(16)
    for layer in range(16):
        events[layer].gate()
        out[layer : layer + 1].copy_(layers[layer : layer + 1])
    half = record_compute("cuda")
    assert half is not None
    half.synchronize()
    assert slept.query() is False and events[16].query() is False
    for layer in range(16, 32):
        events[layer].gate()
        out[layer : layer + 1].copy_(layers[layer : layer + 1])
    assert events[31].query() is False
    assert out.tolist() == list(range(1, 33))
    assert all(event.query() for event in events)


def test_copies_come_after_the_compute_that_they_wait_for(streams: tuple[Stream, Stream]) -> None:
    copies, page, host = streams[0], _zeros(64), torch.zeros(64, dtype=torch.int64).pin_memory()
    _sleep()
    page.fill_(9)
    computed = record_compute(f"cuda:{torch.cuda.current_device()}")
    assert computed is not None
    copies.wait(computed)
    copies.submit(_copy(host, page))
    done = copies.record()
    assert computed.query() is False and done.query() is False and host.tolist() == [0] * 64
    done.synchronize()
    assert computed.query() is True and host.tolist() == [9] * 64


def test_a_failure_poisons_and_shows_only_after_the_work_before_it(streams: tuple[Stream, Stream]) -> None:
    stream, other = streams
    target, after, two, three = _zeros(4), _zeros(1), _zeros(2), _zeros(3)
    stream.submit(_sleep)
    stream.submit(_fill(target[:1], 1))
    stream.submit(_copy(two, three))  # refused at the launch
    failed = stream.record()
    stream.submit(_fill(target[1:2], 1))
    other.wait(failed)
    other.submit(_fill(target[2:3], 1))
    poisoned = other.record()
    with pytest.raises(TransferError, match="must match"):
        failed.gate()
    after.copy_(target[:1])
    assert failed.query() is False and poisoned.query() is False
    with pytest.raises(TransferError, match="must match") as caught:
        failed.synchronize()
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(TransferError, match="must match"):
        poisoned.synchronize()
    for one in streams:
        one.clear_error()
        one.submit(_fill(target[3:], 4))
        one.record().synchronize()
    assert target.tolist() == [1, 0, 0, 4]
    assert after.tolist() == [1]  # the current stream waited, although gate() raised
    with pytest.raises(TransferError, match="must match"):
        failed.query()


def test_what_runs_after_clear_error_still_comes_after_the_wait(streams: tuple[Stream, Stream]) -> None:
    first, second = streams
    source, target, three = _zeros(8), _zeros(8), _zeros(3)
    first.submit(_sleep)
    first.submit(_fill(source, 2))
    first.submit(_copy(source, three))
    second.wait(first.record())
    second.clear_error()
    second.submit(_copy(target, source))
    second.record().synchronize()
    assert target.tolist() == [2] * 8
    first.clear_error()


def test_ten_thousand_records_need_a_hundred_raw_events(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.cuda.Event] = []
    new_event = torch.cuda.Event

    def count(**options: bool) -> torch.cuda.Event:
        made.append(new_event(**options))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Event", count)
    event_pool.cache_clear()
    stream, target = create_stream("cuda", "records"), _zeros(1)
    for step in range(100):
        events = stream.submit_all([_fill(target, step)] * 100)
        events[-1].synchronize()
        assert all(event.query() for event in events)
    assert len(made) == 100
    stream.close()
    event_pool.cache_clear()


def test_handles_tell_the_truth_to_many_threads() -> None:
    """Each copy writes its number to host memory; whoever sees event n complete must find n there, or more."""
    stream, count = create_stream("cuda", "copies"), 2000
    numbers = torch.arange(count, device="cuda")
    host = torch.full((1,), -1, dtype=torch.int64).pin_memory()
    torch.cuda.current_stream().synchronize()
    handles: SimpleQueue[tuple[int, Event] | None] = SimpleQueue()
    early: list[tuple[int, int]] = []
    threads = [threading.Thread(target=_check, args=(handles, host, early)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(count):
        stream.submit(_copy(host, numbers[number : number + 1]))
        event = stream.record()
        for _thread in range(1 + number % 2):  # for one of them, or two at once
            handles.put((number, event))
    for _thread in threads:
        handles.put(None)
    for thread in threads:
        thread.join(60)
    assert early == [] and handles.empty() and int(host[0]) == count - 1
    stream.close()


def _check(handles: SimpleQueue[tuple[int, Event] | None], host: torch.Tensor, early: list[tuple[int, int]]) -> None:
    while (handle := handles.get()) is not None:
        number, event = handle
        if number % 3:
            event.synchronize()
        while not event.query():
            pass
        if (seen := int(host[0])) < number:
            early.append((number, seen))


def test_a_dropped_handle_does_not_end_the_waits_for_it(streams: tuple[Stream, Stream]) -> None:
    first, second = streams
    source, target = _zeros(8), _zeros(8)
    first.submit(_sleep)
    first.submit(_fill(source, 6))
    second.wait(first.record())
    third = create_stream("cuda", "third")
    for _again in range(10):
        third.record().synchronize()  # the raw event is recorded anew, and completes
    second.submit(_copy(target, source))
    second.record().synchronize()
    assert target.tolist() == [6] * 8
    third.close()


def test_a_thread_stream_waits_for_cuda_and_not_the_other_way_round(streams: tuple[Stream, Stream]) -> None:
    cuda, thread = streams[0], ThreadStream("thread")
    host, seen = torch.zeros(4, dtype=torch.int64).pin_memory(), []
    source = _zeros(4)
    cuda.submit(_sleep)
    cuda.submit(_fill(source, 8))
    cuda.submit(_copy(host, source))
    thread.wait(cuda.record())
    thread.submit(lambda: seen.append(host.tolist()))
    event = thread.record()
    with pytest.raises(ProtocolError, match="cannot wait for an incomplete ThreadEvent"):
        cuda.wait(event)
    event.synchronize()
    cuda.wait(event)
    assert seen == [[8] * 4]
    thread.close()


def test_priorities_and_devices() -> None:
    urgent, lazy = (create_stream("cuda:0", "priority", priority) for priority in (-1, 0))
    assert isinstance(urgent, CudaStream) and isinstance(lazy, CudaStream)
    assert urgent._stream.priority < lazy._stream.priority
    create_stream("cuda:0", "beyond every limit", -100).synchronize()
    with pytest.raises(ConfigError, match=f"the last is cuda:{torch.cuda.device_count() - 1}"):
        create_stream(f"cuda:{torch.cuda.device_count()}", "none")


def test_more_streams_than_torch_has(streams: tuple[Stream, Stream]) -> None:
    """Some are the same stream underneath: a chain of waits through all of them still ends, in order."""
    many, target = [create_stream("cuda", f"stream {i}") for i in range(70)], _zeros(70)
    many[0].submit(_sleep)
    for i, stream in enumerate(many):
        if i:
            stream.wait(many[i - 1].record())
            stream.submit(partial(_add, target[i : i + 1], target[i - 1 : i]))
        else:
            stream.submit(_fill(target[:1], 1))
    many[-1].synchronize()
    assert target.tolist() == list(range(1, 71))
    for stream in many:
        stream.close()


def _add(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source)
    to.add_(1)
