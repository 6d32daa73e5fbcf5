"""CUDA streams and their events over a device that the test steps."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from fake_cuda import FakeCuda, Item, raw_of
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hicache.errors import ConfigError, ProtocolError, TransferError
from hicache.streams import ThreadStream, create_stream, record_compute
from hicache.streams.cuda import CudaStream
from hicache.streams.cuda_events import CudaEvent, EventPool
from hicache.testing.stepped import SteppedStream


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def _fail() -> None:
    raise OSError("broken link")


def _nothing() -> None:
    pass


# Events


def test_an_event_asks_cuda_until_it_knows(cuda: FakeCuda) -> None:
    stream = CudaStream("copies", 0)
    event = stream.record()
    assert [event.query(), event.query()] == [False, False]
    cuda.drain()
    assert [event.query(), event.query(), event.query()] == [True, True, True]
    event.synchronize()
    event.gate()
    assert cuda.events[0].queries == 3 and not cuda.current.items  # nothing is asked of CUDA once it is known


def test_synchronize_waits_for_the_work(cuda: FakeCuda) -> None:
    stream, seen = CudaStream("copies", 0), []
    stream.submit(cuda.launch(partial(seen.append, 1)))
    event = stream.record()
    event.synchronize()
    assert seen == [1]
    assert event.query() is True and cuda.events[0].queries == 0
    other = stream.record()
    assert len(cuda.events) == 1 and other.query() is False  # the raw event was free again


def test_synchronize_reports_a_failure_only_after_the_work_before_it(cuda: FakeCuda) -> None:
    stream, seen = CudaStream("copies", 0), []
    stream.submit(cuda.launch(partial(seen.append, 1)))
    stream.submit(_fail)
    with pytest.raises(TransferError, match="broken link"):
        stream.record().synchronize()
    assert seen == [1]


def test_gate_orders_the_current_stream_and_does_not_block(cuda: FakeCuda) -> None:
    stream, seen = CudaStream("copies", 0), []
    stream.submit(cuda.launch(partial(seen.append, "load")))
    stream.record().gate()
    cuda.launch(partial(seen.append, "attention"))()
    assert seen == []
    assert cuda.current.step() is False
    cuda.drain()
    assert seen == ["load", "attention"]


def test_gate_raises_a_known_failure_at_once_and_orders_what_follows(cuda: FakeCuda) -> None:
    stream, seen = CudaStream("copies", 0), []
    stream.submit(cuda.launch(partial(seen.append, "load")))
    stream.submit(_fail)
    event = stream.record()
    with pytest.raises(TransferError, match="broken link"):
        event.gate()
    assert seen == [] and event.query() is False
    cuda.launch(partial(seen.append, "recompute"))()
    assert cuda.current.step() is False
    cuda.drain()
    assert seen == ["load", "recompute"]


def test_a_wait_holds_although_its_event_is_dropped_and_recorded_anew(cuda: FakeCuda) -> None:
    copies, stalled, seen = CudaStream("copies", 0), CudaStream("stalled", 0), []
    copies.submit(cuda.launch(partial(seen.append, "load")))
    copies.record().gate()
    cuda.streams.pop()  # nothing steps it any more: what is recorded there never completes
    stalled.record()
    assert len(cuda.events) == 1
    cuda.launch(partial(seen.append, "attention"))()
    cuda.drain()
    assert seen == ["load", "attention"]


def test_a_cuda_error_is_a_failure_for_ever(cuda: FakeCuda) -> None:
    stream = CudaStream("copies", 0)
    queried, synchronized = stream.record(), stream.record()
    cuda.refuse = {"query", "synchronize"}
    for observe in (queried.query, queried.synchronize, synchronized.synchronize, synchronized.query):
        with pytest.raises(TransferError, match="CUDA error") as caught:
            observe()
        assert isinstance(caught.value.__cause__, RuntimeError)
    cuda.refuse.clear()
    cuda.drain()
    for event in (queried, synchronized):
        with pytest.raises(TransferError, match="CUDA error"):
            event.query()


def test_an_earlier_failure_is_the_one_reported(cuda: FakeCuda) -> None:
    stream = CudaStream("copies", 0)
    stream.submit(_fail)
    event = stream.record()
    cuda.refuse = {"query"}
    with pytest.raises(TransferError, match="broken link"):
        event.query()


def test_a_refused_wait_blocks_and_fails(cuda: FakeCuda) -> None:
    first, second, seen = CudaStream("first", 0), CudaStream("second", 0), []
    first.submit(cuda.launch(partial(seen.append, "load")))
    event = first.record()
    cuda.refuse = {"wait"}
    with pytest.raises(TransferError, match="cannot wait for another one: CUDA error: wait refused"):
        event.gate()
    assert seen == ["load"]
    first.submit(cuda.launch(partial(seen.append, "second load")))
    event = first.record()
    second.wait(event)
    assert seen == ["load", "second load"]
    with pytest.raises(TransferError, match="wait refused"):
        second.synchronize()
    assert event.query() is True


@pytest.mark.parametrize("call", ["record", "Event"])
def test_an_event_that_cannot_be_recorded_has_failed_after_the_work(cuda: FakeCuda, call: str) -> None:
    stream, seen = CudaStream("copies", 0), []
    stream.submit(cuda.launch(partial(seen.append, 1)))
    cuda.refuse = {call}
    event = stream.record()
    assert seen == [1] and raw_of(stream).synchronized == 1
    cuda.refuse.clear()
    with pytest.raises(TransferError, match=f"{call} refused"):
        event.query()
    stream.submit(partial(seen.append, "skipped"))
    with pytest.raises(TransferError, match=f"{call} refused"):
        stream.synchronize()
    stream.clear_error()
    stream.synchronize()
    assert seen == [1]


def test_an_event_that_cannot_be_recorded_reports_the_earlier_failure(cuda: FakeCuda) -> None:
    stream = CudaStream("copies", 0)
    stream.submit(_fail)
    cuda.refuse = {"record"}
    with pytest.raises(TransferError, match="broken link"):
        stream.record().query()


def test_submit_all_stops_at_an_event_that_cannot_be_recorded(cuda: FakeCuda) -> None:
    stream, seen = CudaStream("copies", 0), []
    first, second, third = stream.submit_all(
        [partial(seen.append, 0), lambda: cuda.refuse.add("record"), partial(seen.append, 2)]
    )
    cuda.drain()
    assert seen == [0] and first.query() is True
    for event in (second, third):
        with pytest.raises(TransferError, match="record refused"):
            event.query()


# The pool


def test_raw_events_are_used_again(cuda: FakeCuda) -> None:
    stream = CudaStream("copies", 0)
    for _step in range(100):
        held = [stream.record() for _ in range(4)]
        cuda.drain()
        assert all(event.query() for event in held)
    assert len(cuda.events) == 4


def test_a_held_handle_keeps_its_raw_event_until_it_knows(cuda: FakeCuda) -> None:
    stream = CudaStream("copies", 0)
    held = stream.record()
    cuda.drain()  # over, but nobody has asked
    other = stream.record()
    assert len(cuda.events) == 2
    assert held.query() is True and other.query() is False


def test_a_raw_event_stays_with_a_call_under_way(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread blocks in synchronize while another learns of the end and records the next event."""
    stream = CudaStream("copies", 0)
    event = stream.record()
    inside, leave = threading.Event(), threading.Event()

    def synchronize() -> None:
        inside.set()
        assert leave.wait(30)

    monkeypatch.setattr(cuda.events[0], "synchronize", synchronize)
    waiter = threading.Thread(target=event.synchronize)
    waiter.start()
    assert inside.wait(30)
    cuda.drain()
    assert event.query() is True
    following = stream.record()
    assert len(cuda.events) == 2 and following.query() is False
    leave.set()
    waiter.join()
    stream.record()
    assert len(cuda.events) == 2


def test_the_pool_is_bounded(cuda: FakeCuda) -> None:
    pool = EventPool(0, limit=3)
    handles = [pool.record(cuda.current) for _ in range(5)]
    handles.clear()
    handles = [pool.record(cuda.current) for _ in range(5)]
    assert len(cuda.events) == 5 + 2 and len(handles) == 5


def test_streams_of_a_device_share_a_pool_and_devices_do_not(cuda: FakeCuda) -> None:
    CudaStream("first", 0).record()
    CudaStream("second", 0).record()
    assert len(cuda.events) == 1
    CudaStream("other device", 1).record()
    assert len(cuda.events) == 2


@dataclass
class Handle:
    """A handle and what it should say; `event` is None once dropped."""

    event: CudaEvent | None
    failed: bool
    over: list[bool] = field(default_factory=list)


STREAMS = st.sampled_from([0, 1, 2])


class PoolMachine(RuleBasedStateMachine):
    """Handles come and go in any order; each tells the truth about its own place in its stream."""

    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.cuda = FakeCuda()
        self.cuda.install(self.patch)
        self.streams = [self.cuda.new_stream(0, priority=0) for _ in range(3)]
        self.pool = EventPool(0, limit=3)
        self.live: list[Handle] = []

    def teardown(self) -> None:
        self.cuda.drain()
        assert not any(stream.items for stream in self.streams)
        self.patch.undo()

    @rule(target=handles, stream=STREAMS, failed=st.booleans())
    def record(self, stream: int, failed: bool) -> Handle:
        event = self.pool.record(self.streams[stream], OSError("broken link") if failed else None)
        handle = Handle(event, failed)
        recorded = self.streams[stream].items[-1]
        recorded.run = partial(_both, recorded.run, partial(handle.over.append, True))
        self.live.append(handle)
        return handle

    @rule(stream=STREAMS)
    def step(self, stream: int) -> None:
        self.streams[stream].step()

    @rule(handle=handles)
    def query(self, handle: Handle) -> None:
        assert handle.event is not None
        if handle.over and handle.failed:
            with pytest.raises(TransferError, match="broken link"):
                handle.event.query()
        else:
            assert handle.event.query() is bool(handle.over)

    @rule(handle=handles, stream=STREAMS)
    def hold(self, handle: Handle, stream: int) -> None:
        assert handle.event is not None
        with pytest.raises(TransferError) if handle.failed else nullcontext():
            handle.event.hold(self.streams[stream])
        self.streams[stream].items.append(Item(partial(_check_over, handle)))

    @rule(handle=consumes(handles))
    def drop(self, handle: Handle) -> None:
        handle.event = None

    @invariant()
    def a_raw_event_has_one_owner(self) -> None:
        leases = [handle.event._lease for handle in self.live if handle.event is not None]
        owned = [id(lease.raw) for lease in leases if lease is not None]
        idle = [id(raw) for raw in self.pool._free]
        assert len({*owned, *idle}) == len(owned) + len(idle) and len(idle) <= 3


def _both(*calls: Callable[[], None]) -> None:
    for call in calls:
        call()


def _check_over(handle: Handle) -> None:
    assert handle.over


TestPool = PoolMachine.TestCase


# Streams


def test_work_runs_at_once_on_the_stream_and_only_there(cuda: FakeCuda) -> None:
    stream, seen = CudaStream("copies", 0), []
    before = cuda.current
    stream.submit(lambda: seen.append(cuda.current))
    stream.submit(_fail)
    assert seen == [raw_of(stream)] and cuda.current is before


def test_submit_all_enters_the_stream_once(cuda: FakeCuda) -> None:
    stream, seen = CudaStream("copies", 0), []
    stream.submit_all([lambda: seen.append(cuda.current)] * 32)
    assert seen == [raw_of(stream)] * 32 and cuda.entered == 1
    stream.submit(_fail)
    stream.submit_all([_nothing] * 32)
    assert cuda.entered == 2  # a poisoned stream is not entered


@pytest.mark.parametrize("calls", [1, 2])
def test_a_stream_that_cannot_be_entered_fails(cuda: FakeCuda, calls: int) -> None:
    stream, seen = CudaStream("copies", 0), []
    cuda.refuse = {"stream"}
    events = stream.submit_all([partial(seen.append, 1)] * calls)
    cuda.drain()
    assert seen == [] and len(events) == calls
    for event in events:
        with pytest.raises(TransferError, match="stream refused"):
            event.query()


def test_ctrl_c_poisons_and_reaches_the_caller(cuda: FakeCuda) -> None:
    stream = CudaStream("copies", 0)

    def interrupt() -> None:
        raise KeyboardInterrupt

    for submit in (lambda: stream.submit(interrupt), lambda: stream.submit_all([_nothing, interrupt])):
        with pytest.raises(KeyboardInterrupt):
            submit()
        with pytest.raises(TransferError):
            stream.synchronize()
        stream.clear_error()


def test_events_of_other_streams_must_be_over(cuda: FakeCuda) -> None:
    stream, stepped, seen = CudaStream("copies", 0), SteppedStream(), []
    event = stepped.record()
    with pytest.raises(ProtocolError, match="CUDA stream copies cannot wait for an incomplete SteppedEvent"):
        stream.wait(event)
    stepped.step()
    stream.wait(event)
    stream.submit(cuda.launch(partial(seen.append, 1)))
    stepped.submit(_fail)
    failed = stepped.record()
    while stepped.step():
        pass
    stream.wait(failed)
    stream.submit(cuda.launch(partial(seen.append, "skipped")))
    with pytest.raises(TransferError, match="broken link"):
        stream.synchronize()
    assert seen == [1]


def test_a_thread_stream_waits_for_a_cuda_event(cuda: FakeCuda) -> None:
    stream, thread, seen = CudaStream("copies", 0), ThreadStream("thread"), []
    stream.submit(cuda.launch(partial(seen.append, "copy")))
    thread.wait(stream.record())
    thread.submit(partial(seen.append, "thread"))
    thread.synchronize()
    thread.close()
    assert seen == ["copy", "thread"]


def test_close_waits_for_this_stream_only(cuda: FakeCuda) -> None:
    stream = CudaStream("copies", 0)
    stream.close()
    stream.close()
    assert [raw.synchronized for raw in cuda.streams] == [0, 1]  # the current one, and this


def test_close_of_a_stream_on_a_lost_device(cuda: FakeCuda) -> None:
    stream = CudaStream("copies", 0)
    cuda.refuse = {"synchronize"}
    stream.close()
    with pytest.raises(ProtocolError, match="stream copies is closed"):
        stream.record()


def test_a_failed_stream_leaves_no_garbage_once_cleared(cuda: FakeCuda) -> None:
    stream = CudaStream("copies", 0)
    stream.submit(_fail)
    event = stream.record()
    cuda.drain()
    with pytest.raises(TransferError):
        event.query()
    stream.clear_error()
    del event
    gc.collect()
    stream.record()
    assert len(cuda.events) == 1


# By device


def test_create_stream(cuda: FakeCuda) -> None:
    create_stream("cuda:1", "copies", priority=-1)
    create_stream("cuda", "copies")
    assert [(raw.device, raw.priority) for raw in cuda.streams[1:]] == [(1, -1), (0, 0)]
    cuda.refuse = {"Stream"}
    with pytest.raises(ConfigError, match="CUDA device 1: no stream is to be had: CUDA error"):
        create_stream("cuda:1", "copies")


@pytest.mark.parametrize("make", [partial(create_stream, name="copies"), record_compute])
def test_devices_that_are_not_there(
    make: Callable[..., object], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in ("cuda:2", "cuda:12"):
        with pytest.raises(ConfigError, match=f"'{device}': torch finds 2 CUDA devices, the last is cuda:1"):
            make(device)
    for device in ("mps", "cuda:", "cuda:-1", "cuda:0:1"):
        with pytest.raises(ConfigError, match=f"'{device}': it must be cpu, cuda or cuda:N"):
            make(device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="'cuda': torch finds no CUDA device, use device: cpu"):
        make("cuda")


def test_record_compute_is_a_point_of_the_current_stream(cuda: FakeCuda) -> None:
    stream, seen = CudaStream("copies", 0), []
    cuda.launch(partial(seen.append, "compute"))()
    event = record_compute("cuda:0")
    assert event is not None
    stream.wait(event)
    stream.submit(cuda.launch(partial(seen.append, "copy")))
    assert event.query() is False and raw_of(stream).step() is False
    cuda.drain()
    assert event.query() is True and seen == ["compute", "copy"]
