"""Device pages are evicted ahead of need, and a full host is not written through in vain."""

from __future__ import annotations

from hicache.headroom import Headroom
from hicache.stats import DEVICE_HOST
from hicache.testing.rig import Rig, RigOptions


def test_as_much_as_steps_took_lately_is_kept_free() -> None:
    headroom = Headroom(3200)
    assert headroom.next_step() == 0
    headroom.took(20)
    headroom.took(12)
    assert [headroom.next_step() for _ in range(4)] == [32, 30, 28, 26]
    headroom.took(29)
    assert headroom.next_step() == 29
    for _ in range(60):
        headroom.next_step()
    assert headroom.next_step() == 0


def test_at_most_a_share_of_the_tier_is_kept_free() -> None:
    headroom = Headroom(96)
    headroom.took(50)
    assert headroom.next_step() == 3
    small = Headroom(31)
    small.took(5)
    assert small.next_step() == 0


def prompts(count: int) -> list[list[int]]:
    return [[100 * number + at for at in range(8)] for number in range(count)]


def fill(rig: Rig, count: int) -> None:
    for prompt in prompts(count):
        rig.serve(prompt)
        rig.settle()
        rig.check()


def test_a_step_leaves_room_for_the_next_one() -> None:
    rig = Rig(RigOptions(device_pages=64, host_pages=64, storage_pages=0))
    fill(rig, 16)
    rig.cache.end_step(None)
    rig.settle()
    assert rig.cache.stats().device.free == 2  # 1/32 of the tier, though a step takes 4
    rig.check()


def test_without_a_host_nothing_is_evicted_ahead() -> None:
    rig = Rig(RigOptions(device_pages=64, host_pages=0, storage_pages=0))
    fill(rig, 16)
    rig.cache.end_step(None)
    assert rig.cache.stats().device.free == 0


def test_a_full_host_is_written_through_only_for_storage() -> None:
    """Four pages a prompt: the first two fill the host, whose mirrors would have to make room for the third's."""
    for storage_pages, copied in ((0, 8), (64, 12)):
        rig = Rig(RigOptions(device_pages=31, host_pages=8, storage_pages=storage_pages))
        fill(rig, 3)
        moved = rig.cache.stats().moved_bytes[DEVICE_HOST]
        assert moved == copied * rig.layout.page_bytes
