from __future__ import annotations

import numpy as np
import pytest

from hicache.costs import Costs, Link, PrefillCost
from hicache.errors import ProtocolError
from hicache.layout import HostFormat, KVLayout
from hicache.sim.unbacked import TimedCopier
from hicache.sim.virtual import VirtualClock, VirtualStream
from hicache.transfer.copy_engine import CopyEngine

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=64, page_size=16)  # 8 KiB a page


def test_time_goes_from_event_to_event_in_the_order_of_asking() -> None:
    clock, seen = VirtualClock(), list[tuple[str, float]]()
    clock.at(2.0, lambda: seen.append(("b", clock.now)))
    clock.at(1.0, lambda: clock.at(2.0, lambda: seen.append(("c", clock.now))))
    clock.at(2.0, lambda: seen.append(("bb", clock.now)))
    assert clock.advance() and clock.now == 1.0 and seen == []
    assert clock.advance() and seen == [("b", 2.0), ("bb", 2.0), ("c", 2.0)]
    assert not clock.advance() and clock.now == 2.0


def test_what_is_past_happens_now_and_time_never_goes_back() -> None:
    clock = VirtualClock()
    clock.advance_to(5.0)
    clock.at(1.0, lambda: None)
    assert clock.advance() and clock.now == 5.0
    clock.advance_to(3.0)
    assert clock() == 5.0


def test_what_the_last_moment_asked_for_is_started_before_time_goes_on() -> None:
    clock, started = VirtualClock(), list[float]()
    clock.before_pause = lambda: started.append(clock.now)
    clock.at(1.0, lambda: None)
    clock.advance_to(4.0)
    assert started == [0.0, 1.0]


def test_work_of_a_stream_follows_its_work_and_the_events_it_waits_for() -> None:
    clock = VirtualClock()
    first, second = VirtualStream(clock, "first"), VirtualStream(clock, "second")
    first.submit(lambda: first.spend(2.0))
    first.submit(lambda: first.spend(1.0))
    event = first.record()
    assert event.time == 3.0 and not event.query()
    second.wait(event)
    second.submit(lambda: second.spend(0.5))
    last = second.record()
    last.synchronize()
    assert clock.now == 3.5 and event.query() and last.query()
    assert (first.busy, second.busy) == (3.0, 0.5)


def test_a_stream_knows_events_of_its_clock_only() -> None:
    class Other:
        def query(self) -> bool:
            return True

        def synchronize(self) -> None: ...

        def gate(self) -> None: ...

    with pytest.raises(ProtocolError, match="another clock"):
        VirtualStream(VirtualClock(), "lost").wait(Other())


def test_copies_of_the_engine_take_their_bytes_by_the_bandwidth_layer_after_layer() -> None:
    clock = VirtualClock()
    d2h, h2d = VirtualStream(clock, "d2h"), VirtualStream(clock, "h2d")
    costs = Costs(PrefillCost(1.0), to_device=Link(8192.0, 0.5), to_host=Link(4096.0, 0.25))
    form = HostFormat(LAYOUT)
    engine = CopyEngine(form, TimedCopier(form, costs, d2h, h2d), d2h, h2d)
    pages = np.arange(3, dtype=np.int32)
    load = engine.load_back(pages, pages)
    backup = engine.backup(pages, pages)
    assert [load.layer_done(layer).time for layer in (0, 1)] == [0.5 + 1.5, 0.5 + 3.0]  # type: ignore[attr-defined]
    backup.synchronize()
    assert clock.now == 0.25 + 6.0 and load.query()
