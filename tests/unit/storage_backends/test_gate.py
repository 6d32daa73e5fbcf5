from __future__ import annotations

import threading

import pytest

from hicache.errors import StoreUnavailableError
from hicache.storage_backends.gate import CallGate


def test_alone_waits_for_readers_and_keeps_new_ones_out() -> None:
    gate = CallGate("store")
    inside, leave, entered = threading.Event(), threading.Event(), []

    def first() -> None:
        with gate.reading():
            inside.set()
            leave.wait()
            entered.append("first leaves")

    def second() -> None:
        with gate.reading():
            entered.append("second")

    reader, late = threading.Thread(target=first), threading.Thread(target=second)
    reader.start()
    inside.wait()
    threading.Timer(0.02, leave.set).start()
    with gate.alone():
        assert entered == ["first leaves"]
        late.start()
        late.join(0.02)
        assert entered == ["first leaves"]
    for thread in (reader, late):
        thread.join()
    assert entered == ["first leaves", "second"]


def test_nobody_enters_a_closed_gate() -> None:
    gate = CallGate("store")
    with gate.closing() as first:
        assert first
    with gate.closing() as first:
        assert not first
    for enter in (gate.reading, gate.writing):
        with pytest.raises(StoreUnavailableError, match="store is closed"), enter():
            raise AssertionError("inside")


def test_who_is_alone_may_be_alone_again() -> None:
    """The inner block does not let readers in while the outer one goes on."""
    gate, read = CallGate("store"), threading.Event()

    def reader() -> None:
        with gate.reading():
            read.set()

    late = threading.Thread(target=reader)
    with gate.alone():
        with gate.alone():
            late.start()
        assert not read.wait(0.02)
    late.join()
    assert read.is_set()


def test_readers_that_waited_for_a_closing_writer_stay_outside() -> None:
    gate, waiting, outcomes = CallGate("store"), threading.Event(), []

    def reader() -> None:
        waiting.set()
        try:
            with gate.reading():
                outcomes.append("inside")
        except StoreUnavailableError as error:
            outcomes.append(error.reason)

    late = threading.Thread(target=reader)
    with gate.closing():
        with gate.alone():
            late.start()
            waiting.wait()
            late.join(0.02)  # it should be in the queue by now
        late.join()
    assert outcomes == ["closed"]
