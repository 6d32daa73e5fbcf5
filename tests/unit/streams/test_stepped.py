from __future__ import annotations

from functools import partial

import pytest

from hicache.errors import ProtocolError, TransferError
from hicache.testing.stepped import SteppedStream, drain


def test_nothing_runs_before_a_step() -> None:
    stream, seen = SteppedStream(), []
    stream.submit(partial(seen.append, 1))
    event = stream.record()
    assert not seen and not stream.idle and not event.query()
    assert stream.step() and seen == [1] and not event.query()
    assert stream.step() and event.query() and stream.idle
    assert not stream.step()


def test_synchronize_of_an_incomplete_event_is_a_bug() -> None:
    event = SteppedStream().record()
    for block in (event.synchronize, event.gate):
        with pytest.raises(ProtocolError, match="cannot block"):
            block()


def test_blocked_until_the_other_stream_moves() -> None:
    first, second = SteppedStream("first"), SteppedStream("second")
    second.wait(first.record())
    assert second.blocked and not second.step() and not second.idle
    with pytest.raises(ProtocolError, match="stream second closed while it waits"):
        second.close()
    assert first.step() and not second.blocked and second.step() and second.idle


def test_a_poisoned_stream_is_blocked_like_any_other() -> None:
    first, stream = SteppedStream(), SteppedStream()
    stream.submit(lambda: None)
    stream.fail_next()
    stream.wait(first.record())
    drain(stream)
    assert stream.blocked
    drain(first, stream)
    assert stream.idle


def test_fail_next_replaces_the_next_work_only() -> None:
    stream, seen = SteppedStream(), []
    before = stream.record()
    stream.submit(partial(seen.append, 1))
    failed = stream.record()
    stream.clear_error()
    stream.submit(partial(seen.append, 2))
    stream.fail_next(OSError("unplugged"))
    drain(stream)
    assert seen == [2] and before.query()
    with pytest.raises(TransferError, match="unplugged"):
        failed.query()


def test_drain_follows_waits_in_both_directions() -> None:
    first, second, seen = SteppedStream(), SteppedStream(), []
    first.submit(partial(seen.append, 1))
    second.wait(first.record())
    second.submit(partial(seen.append, 2))
    first.wait(second.record())
    first.submit(partial(seen.append, 3))
    drain(first, second)
    assert seen == [1, 2, 3] and first.idle and second.idle
