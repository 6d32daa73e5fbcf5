"""The breaker's transitions, one script each: at a time, an event, and what follows."""

from __future__ import annotations

import logging

import pytest

from hicache.errors import StoreCorruptError, StoreUnavailableError
from hicache.transfer.breaker import FIRST_PAUSE, LONGEST_PAUSE, MAX_FAILURES, Breaker, failure_reason

FULL = StoreUnavailableError("no space left", "disk_full")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def play(script: str) -> tuple[Breaker, str]:
    """Events: f/s a read fails/succeeds, F/S a lookup does, t trip, b begin, n not made, digits: seconds pass.

    Returns the breaker and what `begin` answered, y or n each.
    """
    clock = Clock()
    breaker, answers = Breaker("storage loads", clock), ""
    for event in script.split():
        if event == "b":
            answers += "y" if breaker.begin() else "n"
        elif event == "n":
            breaker.not_made()
        elif event == "t":
            breaker.trip("read", FULL)
        elif event == "T":
            breaker.trip("", FULL)
        elif event in "fF":
            breaker.failed("read" if event == "f" else "lookup", FULL)
        elif event in "sS":
            breaker.succeeded("read" if event == "s" else "lookup")
        else:
            clock.now += float(event)
    return breaker, answers


@pytest.mark.parametrize(
    ("script", "state", "answers"),
    [
        ("b b b", "on", "yyy"),
        ("f f b", "on", "y"),
        ("f f f b", "off", "n"),
        ("f f s f f b", "on", "y"),  # in a row
        ("t b", "off", "n"),
        ("t 0.9 b", "off", "n"),
        ("t 1 b", "trying", "y"),
        ("t 1 b b", "trying", "yn"),  # one trial at a time
        ("t 1 b n b", "trying", "yy"),
        ("t 1 b s b b", "on", "yyy"),
        ("t 1 b f b", "off", "yn"),  # one failure is enough for a trial
        ("t 1 b f 1.9 b", "off", "yn"),  # the pause has doubled
        ("t 1 b f 2 b", "trying", "yy"),
        ("t 1 b f 2 b s t 1 b", "trying", "yyy"),  # success resets it
        ("t 1 b f 2 b s f f b", "on", "yyy"),  # and the count
        ("t t t 1 b", "trying", "y"),  # stopped is stopped
        ("t s b", "off", "n"),  # a call from before says nothing yet
        ("t 1 b S b", "trying", "yy"),  # a lookup that works says nothing about reads
        ("t 1 b S b s", "on", "yy"),
        ("f S f S f b", "off", "n"),  # nor does it make them fewer in a row
        ("F F F 1 b S", "on", "y"),
        ("t 1 b t 1 b", "off", "yn"),  # a trial that hangs
        ("T 1 b S b", "on", "yy"),  # stopped by nothing in particular: anything that works will do
    ],
)
def test_transitions(script: str, state: str, answers: str) -> None:
    breaker, answered = play(script)
    assert (breaker.state.value, answered) == (state, answers)


def test_the_pause_doubles_up_to_its_bound() -> None:
    clock = Clock()
    breaker = Breaker("storage stores", clock)
    breaker.trip("write", FULL)
    pauses = []
    for _ in range(10):
        since = clock.now
        while not breaker.ready:
            clock.now += 0.5
        pauses.append(clock.now - since)
        assert breaker.begin()
        breaker.failed("write", FULL)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert (pauses[0], pauses[-1]) == (FIRST_PAUSE, LONGEST_PAUSE)


def test_one_line_says_what_why_what_to_do_and_when_and_one_that_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    breaker = Breaker("storage stores", clock)
    for _ in range(MAX_FAILURES):
        breaker.failed("write", FULL)
    breaker.failed("write", FULL)
    clock.now = 1.0
    assert breaker.begin()
    breaker.succeeded("write")
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    warning = caplog.records[0].message
    for part in ("storage stores are stopped", "disk_full", "no space left", "next try in 1 s"):
        assert part in warning
    assert caplog.records[1].message == "storage stores work again"


def test_reasons_are_one_word() -> None:
    assert failure_reason(FULL) == "disk_full"
    assert failure_reason(StoreCorruptError("torn")) == "corrupt"
    assert failure_reason(ZeroDivisionError()) == "error"
