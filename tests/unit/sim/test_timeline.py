"""When a replay on a virtual clock is given up."""

from __future__ import annotations

from hicache.sim.timeline import VirtualTime
from hicache.sim.virtual import VirtualClock


def test_idling_in_vain_counts_from_the_last_progress_on() -> None:
    """Copies that take no time are not due at any time: who waits for them idles, and goes on."""
    time = VirtualTime(VirtualClock())
    for moved in (1.0, 2.0, 3.0):
        for _ in range(200):
            assert not time.stalled(moved, 60.0)
            time.idle()
    for _ in range(100):
        time.idle()
    assert time.stalled(3.0, 60.0)
    assert not time.stalled(4.0, 60.0)
