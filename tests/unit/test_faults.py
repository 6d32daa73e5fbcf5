"""One scenario, at least, for each kind of fault that caches of this kind have had (docs/architecture.md)."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest

from hicache.errors import IntegrityError, ProtocolError, StorageError, TransferError
from hicache.hashing import DIGEST_BYTES, RequestNamespace, page_digests
from hicache.layout import KVLayout
from hicache.policies.write import WritePolicy
from hicache.prefetch import PrefetchPolicy
from hicache.requests import Admission, Request
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.rig import Rig, RigOptions
from hicache.transfer.breaker import FIRST_PAUSE
from hicache.transfer.storage_engine import EngineLimits, StorageEngine
from hicache.tree.residency import ABSENT
from hicache.types import DropReason, PrefixKey, Tier

WRITE_BACK = WritePolicy("write_back")


def tokens(first: int, count: int) -> list[int]:
    return [first * 100 + index for index in range(count)]


def key(first: int, count: int) -> PrefixKey:
    return PrefixKey.of(tokens(first, count))


def admitted(rig: Rig, first: int, count: int, rid: str = "r") -> Request:
    req = Request(rid, tokens(first, count))
    rig.admit(req)
    return req


def fill_device(rig: Rig, first: int = 50) -> None:
    """Push everything unlocked off the device by serving other prompts."""
    pages = rig.tiers.device_allocator.num_pages
    size = rig.layout.page_size
    for index in range(3):
        rig.serve(tokens(first + index, (pages - 1) * size), rid=f"filler{first + index}")
        rig.settle()


# ---- F01 accounting -------------------------------------------------------------------------


def test_f01_a_demoted_prefix_inserted_from_fresh_pages_has_each_page_once() -> None:
    rig = Rig(RigOptions(device_pages=8, host_pages=40, storage_pages=0))
    rig.serve(tokens(1, 8))
    rig.settle()
    fill_device(rig)
    match = rig.cache.match_prefix(key(1, 8))
    assert (match.device_len, match.host_hit_len) == (0, 8)
    pages = rig.cache.alloc_pages(4)
    assert pages is not None
    result = rig.cache.insert(key(1, 8), pages)
    assert result.num_pages == 4 and not len(result.duplicates)
    rig.cache.check_integrity()
    assert rig.cache.match_prefix(key(1, 8)).device_len == 8


@pytest.mark.parametrize(("change", "sign"), [(1, "leaked"), (-1, "counted twice")])
def test_f01_the_sign_of_a_difference_is_reported(change: int, sign: str) -> None:
    rig = Rig()
    rig.serve(tokens(1, 6))
    rig.tiers.request_pages -= change
    with pytest.raises(IntegrityError, match=f"1 device pages {sign}"):
        rig.cache.check_integrity()


def test_f01_a_page_with_two_owners_is_found() -> None:
    rig = Rig()
    rig.serve(tokens(1, 6))
    node = next(rig.tiers.tree.nodes())
    assert node.device_pages is not None
    node.device_pages[0] = rig.tiers.device_allocator.free_list()[0]
    with pytest.raises(IntegrityError, match="two owners"):
        rig.cache.check_integrity()


# ---- F02 locks ------------------------------------------------------------------------------


def test_f02_a_lock_survives_splits_below_and_above_it_and_is_given_back_once() -> None:
    rig = Rig(RigOptions(device_pages=20))
    rig.serve(tokens(1, 16))
    rig.settle()
    receipt = rig.cache.lock(rig.cache.match_prefix(key(1, 12)))
    rig.cache.match_prefix(key(1, 8))
    rig.cache.match_prefix(key(1, 4))
    assert rig.cache.protected_size() == 12
    rig.cache.unlock(receipt)
    assert rig.cache.protected_size() == 0 and rig.cache.evictable_size() == 16
    with pytest.raises(ProtocolError, match="twice"):
        rig.cache.unlock(receipt)
    rig.cache.check_integrity()


# ---- F03 endpoints stay owned ---------------------------------------------------------------


def test_f03_the_source_of_a_backup_is_not_reused_before_its_acknowledgement() -> None:
    rig = Rig(RigOptions(device_pages=6, host_pages=12, storage_pages=0, host_write=WRITE_BACK))
    rig.serve(tokens(1, 10))
    assert rig.cache.alloc_pages(6) is None  # starts the backup, cannot have its pages yet
    rig.cache.end_step(None)
    assert rig.cache.alloc_pages(6) is None
    assert rig.tiers.device_allocator.free_pages == 1
    rig.settle()
    assert rig.cache.alloc_pages(6) is not None
    assert rig.cache.stats().demoted_pages["device_host"] == 5


def test_f03_the_destination_of_a_cancelled_load_is_not_reused_before_its_acknowledgement() -> None:
    rig = Rig(RigOptions(device_pages=8, host_pages=40, storage_pages=0))
    rig.serve(tokens(1, 8))
    rig.settle()
    fill_device(rig)
    req = Request("q", [*tokens(1, 8), 7])
    assert rig.requests.admit(req) is not None
    free = rig.tiers.device_allocator.free_pages
    rig.requests.abort(req)
    assert rig.tiers.device_allocator.free_pages == free
    assert rig.cache.alloc_pages(8) is None
    rig.settle()
    rig.check()
    assert rig.cache.alloc_pages(8) is not None


class SlowReads(MemoryBackend):
    """Reads of which the last batch writes into its buffers when told to."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.reading, self.go_on = threading.Event(), threading.Event()

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        self.reading.set()
        self.go_on.wait(30)
        return super().read_into(keys, buffers)


def test_f03_host_pages_of_a_prefetch_cut_short_stay_taken_while_the_worker_reads() -> None:
    rig = Rig(RigOptions(device_pages=8, host_pages=8))
    rig.serve(tokens(1, 9))
    rig.settle()
    slow = SlowReads(rig.tiers.identity, 64 * rig.layout.page_stride)
    assert rig.engine is not None and rig.tiers.storage is not None and rig.backend is not None
    slow.__dict__.update({k: v for k, v in rig.backend.__dict__.items() if not k.startswith("fail")})
    rig.cache.flush([Tier.DEVICE, Tier.HOST])
    rig.tiers.storage.engine = StorageEngine(slow, 2, EngineLimits(1 << 20), threads=1)
    host = rig.tiers.host
    assert host is not None
    rig.cache.prefetch("p", key(1, 9))
    while not slow.reading.wait(0.001):
        rig.cache.poll()
    rig.cache.cancel_prefetch("p")
    rig.cache.poll()
    assert host.pool.allocator.free_pages == 4
    slow.go_on.set()
    assert rig.tiers.storage.engine.wait_idle(30)
    rig.cache.poll()
    assert host.pool.allocator.free_pages == 8
    rig.tiers.storage.engine.close()


# ---- F04 order of compute and copies --------------------------------------------------------


def test_f04_a_backup_waits_for_the_compute_that_writes_the_pages() -> None:
    rig = Rig(RigOptions(storage_pages=0))
    req = Request("r", tokens(1, 8))
    assert rig.requests.admit(req) is not None
    rig.requests.extend(req, 8)
    rig.compute.submit(lambda: rig.write_kv(req, 0, 8))
    written = rig.compute.record()
    rig.requests.commit(req, 8)
    rig.requests.cache_unfinished_req(req)
    rig.cache.end_step(written)
    while rig.d2h.step():
        pass
    assert rig.d2h.blocked
    rig.settle()
    rig.check()
    assert next(rig.tiers.tree.nodes()).residency.on_host


def test_f04_a_load_waits_for_the_compute_that_may_still_read_its_pages() -> None:
    rig = Rig(RigOptions(device_pages=8, host_pages=40, storage_pages=0))
    rig.serve(tokens(1, 8))
    rig.settle()
    fill_device(rig)
    rig.compute.submit(lambda: None)
    rig.cache.end_step(rig.compute.record())
    assert rig.requests.admit(Request("r", [*tokens(1, 8), 7])) is not None
    while rig.h2d.step():
        pass
    assert rig.h2d.blocked


def test_f04_layer_events_complete_one_by_one() -> None:
    rig = Rig(RigOptions(device_pages=8, host_pages=40, storage_pages=0))
    rig.serve(tokens(1, 8))
    rig.settle()
    fill_device(rig)
    admission = rig.requests.admit(Request("r", [*tokens(1, 8), 7]))
    assert admission is not None
    (load,) = admission.loads
    seen = []
    while not load.query():
        seen.append([load.layer_done(layer).query() for layer in range(2)])
        assert rig.h2d.step()
    assert [True, False] in seen and [True, True] not in seen


# ---- F05 splits under a copy ----------------------------------------------------------------


def test_f05_a_split_while_nine_pages_are_written_through_leaves_all_nine_backed_and_stored() -> None:
    rig = Rig(RigOptions(device_pages=12, host_pages=12, storage_pages=40))
    rig.serve(tokens(1, 18))
    rig.cache.match_prefix(key(1, 10))
    rig.settle()
    nodes = list(rig.tiers.tree.nodes())
    assert [len(node.key) // 8 for node in nodes] == [5, 4]
    for node in nodes:
        assert node.residency.on_host and node.residency.on_storage
        assert not any(node.residency.pins[tier] for tier in Tier)
    assert rig.cache.stats().storage_pages == 9
    rig.check()


def test_f05_a_split_between_the_store_and_its_acknowledgement_is_stored_whole() -> None:
    rig = Rig(RigOptions(device_pages=12, host_pages=12, storage_pages=40))
    rig.serve(tokens(1, 18))
    rig.cache.end_step(None)
    rig.drain_streams()
    rig.cache.poll()
    rig.cache.match_prefix(key(1, 10))
    rig.settle()
    assert all(node.residency.on_storage for node in rig.tiers.tree.nodes())


# ---- F06 a failed backup is not a backup ----------------------------------------------------


def test_f06_with_a_host_that_cannot_take_it_the_drop_is_counted_and_nobody_believes_in_a_backup() -> None:
    rig = Rig(RigOptions(device_pages=6, host_pages=4, storage_pages=0, host_write=WRITE_BACK))
    rig.serve(tokens(1, 10))
    host = rig.tiers.host
    assert host is not None
    taken = host.pool.allocator.alloc(4)
    rig.tiers.staged_host_pages += 4
    assert taken is not None
    pages = rig.cache.alloc_pages(6)
    assert pages is not None
    rig.cache.free_pages(pages)
    assert rig.cache.stats().dropped_pages == {"host_full": 5}
    assert rig.cache.stats().demoted_pages["device_host"] == 0
    rig.cache.check_integrity()


def test_f06_a_failed_copy_leaves_the_page_where_it_was() -> None:
    rig = Rig(RigOptions(storage_pages=0))
    rig.serve(tokens(1, 8))
    rig.d2h.fail_next()
    rig.settle()
    node = next(rig.tiers.tree.nodes())
    assert node.residency.on_device and node.residency[Tier.HOST] is ABSENT
    assert rig.cache.stats().failures == {"copy": 1}
    rig.check()


def test_f06_a_failed_load_ends_in_a_recompute() -> None:
    rig = Rig(RigOptions(device_pages=8, host_pages=40, storage_pages=0))
    rig.serve(tokens(1, 8))
    rig.settle()
    fill_device(rig)
    rig.h2d.fail_next()
    req = Request("r", [*tokens(1, 8), 7])
    admission = rig.requests.admit(req)
    assert admission is not None
    rig.drain_streams()
    with pytest.raises(TransferError):
        admission.loads[0].query()
    rig.requests.retract(req)
    rig.cache.poll()
    rig.check()
    assert rig.serve([*tokens(1, 8), 7]).host_len == 8  # the next try succeeds


def test_f06_what_continues_a_failed_load_fails_with_it() -> None:
    rig = Rig(RigOptions(device_pages=16, host_pages=60, storage_pages=0))
    rig.serve(tokens(1, 12))
    rig.settle()
    fill_device(rig)
    first, second = Request("a", tokens(1, 7)), Request("b", tokens(1, 12))
    one, two = rig.requests.admit(first), rig.requests.admit(second)
    assert one is not None and two is not None and len(two.loads) == 2
    rig.h2d.fail_next()
    rig.settle()
    assert rig.cache.match_prefix(key(1, 12)).device_len == 0
    rig.check()


# ---- F07 progress under pressure ------------------------------------------------------------


@pytest.mark.parametrize("host_write", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("host_pages", [1, 2, 5])
def test_f07_a_host_smaller_than_the_device_never_stops_anybody(host_pages: int, host_write: str) -> None:
    write = WritePolicy(host_write, 1)  # type: ignore[arg-type]
    rig = Rig(RigOptions(device_pages=10, host_pages=host_pages, storage_pages=20, host_write=write))
    for index in range(40):
        rig.serve(tokens(index % 7, 15), rid=f"r{index}")
    rig.settle()
    rig.check()
    assert rig.cache.tiers.counters.computed_tokens > 0


def test_f07_two_loads_that_share_the_free_pages_both_end() -> None:
    rig = Rig(RigOptions(device_pages=8, host_pages=40, storage_pages=0))
    for first in (1, 2):
        rig.serve(tokens(first, 10))
        rig.settle()
    fill_device(rig)
    one = Request("one", [*tokens(1, 10), 7])
    assert rig.requests.admit(one) is not None
    assert rig.requests.admit(Request("two", [*tokens(2, 10), 7])) is None  # no room beside the first
    rig.settle()
    rig.requests.abort(one)
    assert rig.serve([*tokens(2, 10), 7], rid="three").prefix_len == 10


# ---- F08, F09 prefetch ----------------------------------------------------------------------


def stored(options: RigOptions, first: int = 1, count: int = 13) -> Rig:
    """A rig whose memory tiers are empty and whose storage has a prefix."""
    rig = Rig(options)
    rig.serve(tokens(first, count))
    rig.settle()
    assert rig.cache.flush([Tier.DEVICE, Tier.HOST]).flushed
    return rig


def test_f08_a_thousand_prefetches_each_ended_another_way_leave_nothing_behind() -> None:
    rig = stored(RigOptions(device_pages=8, host_pages=8, storage_pages=64))
    assert rig.backend is not None and rig.engine is not None and rig.tiers.host is not None
    for index in range(1000):
        rid = f"p{index}"
        rig.backend.failing_loads = int(index % 5 == 3)
        rig.cache.prefetch(rid, key(1 if index % 2 else 9, 13))
        for _ in range(index % 4):
            rig.engine.run_next()
            rig.cache.poll()
        if index % 3 == 0:
            rig.cache.cancel_prefetch(rid)
        elif index % 3 == 1:
            rig.now += 2.0
            assert rig.cache.prefetch_ready(rid)
        if index % 7 == 0:
            rig.settle()
            rig.cache.flush([Tier.DEVICE, Tier.HOST])
    rig.now += 2.0
    rig.settle()
    rig.cache.flush([Tier.DEVICE, Tier.HOST])
    assert rig.tiers.staged_host_pages == 0 and not rig.cache.in_flight
    assert rig.tiers.host.pool.allocator.free_pages == 8
    assert rig.engine.idle and rig.engine.queued_bytes == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_f08_a_request_that_runs_before_its_prefetch_has_ended_leaves_nothing_behind(steps: int) -> None:
    """Nobody claims what arrives after its request began: it must not count as waiting for one for ever."""
    rig = stored(RigOptions(page_size=2, device_pages=40, host_pages=16, storage_pages=400))
    rig.cache.flush([Tier.DEVICE, Tier.HOST])
    assert rig.engine is not None
    prefetcher = rig.cache._prefetcher
    request = Request("r", tokens(1, 13))
    rig.cache.prefetch(request.rid, request.key())
    for _ in range(steps):
        rig.engine.run_next()
        rig.cache.poll()
    assert rig.requests.admit(request) is not None  # nobody asked prefetch_ready
    assert rig.requests.extend(request, 13)
    rig.settle()
    rig.finish(request)
    rig.settle()
    assert not (prefetcher._active or prefetcher._ended or prefetcher._unclaimed or prefetcher._leaders)


@pytest.mark.parametrize("mode", ["timeout", "wait_complete", "best_effort"])
def test_f09_the_deadline_is_an_upper_bound_whatever_storage_does(mode: str) -> None:
    policy = PrefetchPolicy(mode, 1.0)  # type: ignore[arg-type]
    rig = stored(RigOptions(prefetch=policy))
    rig.cache.prefetch("p", key(1, 13))
    waited = 0.0
    while not rig.cache.prefetch_ready("p"):  # storage hangs: nothing is stepped
        rig.now += 0.25
        waited += 0.25
    assert waited == (0.0 if mode == "best_effort" else 1.0)


def test_f09_completion_is_visible_at_the_next_poll_and_a_miss_costs_no_page() -> None:
    rig = stored(RigOptions(host_pages=8))
    assert rig.engine is not None and rig.tiers.host is not None
    rig.cache.prefetch("hit", key(1, 13))
    rig.cache.prefetch("miss", key(2, 13))
    while rig.engine.run_next():
        rig.cache.poll()
    assert rig.cache.prefetch_ready("hit") and rig.cache.prefetch_ready("miss")
    assert rig.cache.match_prefix(key(1, 13)).host_hit_len == 12
    assert rig.tiers.host.pool.allocator.free_pages == 2
    assert rig.cache.stats().prefetches["miss"] >= 1


def test_f09_two_requests_for_one_prefix_read_it_once() -> None:
    rig = stored(RigOptions(host_pages=8))
    rig.cache.prefetch("a", key(1, 13))
    rig.cache.prefetch("b", key(1, 13))
    rig.settle()
    assert rig.cache.prefetch_ready("a") and rig.cache.prefetch_ready("b")
    assert rig.cache.stats().moved_bytes["storage_host"] == 6 * rig.layout.page_stride


def test_f09_a_prefix_that_falls_to_disk_while_its_request_waits_is_fetched_once_more() -> None:
    rig = Rig(RigOptions(device_pages=8, host_pages=8, storage_pages=64, prefetch=PrefetchPolicy("timeout", 10.0)))
    rig.serve(tokens(1, 13))
    rig.settle()
    rig.cache.prefetch("waits", key(1, 13))
    assert rig.cache.prefetch_ready("waits")  # all of it is there
    for first in (2, 3):
        rig.serve(tokens(first, 15), rid=f"r{first}")
        rig.settle()
    assert rig.cache.match_prefix(key(1, 13)).host_hit_len < 12
    assert not rig.cache.prefetch_ready("waits")
    rig.settle()
    assert rig.cache.prefetch_ready("waits")
    assert rig.admit(Request("waits", tokens(1, 13))).prefix_len == 12
    assert not rig.cache._prefetcher._ended


def fall_to_disk(rig: Rig, first: int) -> None:
    for index in (first, first + 1):
        rig.serve(tokens(index, 15), rid=f"r{index}")
        rig.settle()
    assert rig.cache.match_prefix(key(1, 13)).host_hit_len < 12


def test_f09_what_falls_to_disk_again_or_after_the_deadline_is_not_waited_for() -> None:
    rig = Rig(RigOptions(device_pages=8, host_pages=8, storage_pages=64, prefetch=PrefetchPolicy("timeout", 10.0)))
    rig.serve(tokens(1, 13))
    rig.settle()
    for rid in ("twice", "late"):
        rig.cache.prefetch(rid, key(1, 13))
    fall_to_disk(rig, 2)
    assert not rig.cache.prefetch_ready("twice")
    rig.settle()
    assert rig.cache.prefetch_ready("twice")
    fall_to_disk(rig, 4)
    assert rig.cache.prefetch_ready("twice")
    rig.now += 10.0
    assert rig.cache.prefetch_ready("late") and rig.engine is not None and rig.engine.idle


def test_f09_a_prefix_whose_nodes_became_one_has_not_fallen_to_disk() -> None:
    rig = Rig(RigOptions(device_pages=12, host_pages=12, storage_pages=64))
    rig.serve(tokens(1, 9))
    rig.settle()
    rig.cache.prefetch("waits", PrefixKey.of(tokens(1, 4) + tokens(7, 4)))
    rig.settle()
    assert rig.cache.prefetch_ready("waits") and len(list(rig.tiers.tree.nodes())) == 2
    rig.serve(tokens(1, 9), rid="again")
    rig.tiers.tree.coalesce(list(rig.tiers.tree.nodes()))
    assert len(list(rig.tiers.tree.nodes())) == 1
    assert rig.cache.prefetch_ready("waits") and rig.engine is not None and rig.engine.idle


# ---- F11 namespaces -------------------------------------------------------------------------

NAMESPACES = [
    RequestNamespace().encode(),
    RequestNamespace(salt="").encode(),
    RequestNamespace(salt="X").encode(),
    RequestNamespace(adapter="X").encode(),
    RequestNamespace(salt="ab", adapter="c").encode(),
    RequestNamespace(salt="a", adapter="bc").encode(),
]


def test_f11_namespaces_share_nothing_on_any_tier_and_everything_within() -> None:
    rig = Rig(RigOptions(device_pages=8, host_pages=8, storage_pages=99))
    for serial, namespace in enumerate(NAMESPACES):
        assert rig.serve(tokens(1, 9), namespace, f"first{serial}").prefix_len == 0
        rig.settle()
    rig.cache.flush([Tier.DEVICE, Tier.HOST])
    for serial, namespace in enumerate(NAMESPACES):
        assert rig.serve(tokens(1, 9), namespace, f"again{serial}").prefix_len == 8
        rig.settle()
        rig.check()


# ---- F14 found must mean readable -----------------------------------------------------------


@pytest.mark.parametrize("damage", ["delete", "flip"])
def test_f14_a_bad_page_ends_the_hit_before_it_and_is_gone(damage: str) -> None:
    rig = Rig(RigOptions(device_pages=8, host_pages=8, storage_pages=64))
    rig.serve(tokens(1, 13))
    rig.settle()
    node = next(rig.tiers.tree.nodes())
    names = rig.tiers.tree.digests(node, rig.tiers.seed(b""))
    third = names[2 * DIGEST_BYTES : 3 * DIGEST_BYTES]
    rig.cache.flush([Tier.DEVICE, Tier.HOST])
    assert rig.backend is not None
    if damage == "delete":
        rig.backend.delete([third])
    else:
        assert rig.backend.flip_byte(third)
    admission = rig.serve(tokens(1, 13))
    assert admission.prefix_len == 4
    assert rig.backend.contains_prefix([third]) == 0 or damage == "flip"
    rig.settle()
    rig.check()


def test_f14_an_error_of_the_backend_is_a_miss_and_later_ones_stop_loads_for_a_while() -> None:
    rig = stored(RigOptions())
    assert rig.backend is not None
    for index in range(3):
        rig.backend.failing_loads = 1
        rig.cache.prefetch(f"p{index}", key(1, 13))
        rig.settle()
        assert rig.cache.prefetch_ready(f"p{index}")
    stats = rig.cache.stats()
    assert (stats.storage_loads, stats.storage_stores) == ("off", "on") and stats.failures["load_failed"] == 3
    assert rig.serve(tokens(1, 13), rid="off").prefix_len == 0
    rig.settle()
    assert rig.cache.flush([Tier.DEVICE, Tier.HOST]).flushed
    rig.now += 2.0
    assert rig.serve(tokens(1, 13), rid="on").prefix_len == 12
    assert rig.cache.stats().storage_loads == "on"


def test_f14_a_backend_that_raises_what_it_should_not_does_not_kill_its_worker() -> None:
    class Rude(MemoryBackend):
        def contains_prefix(self, keys: Sequence[bytes]) -> int:
            raise ZeroDivisionError

    layout = KVLayout(1, 1, 4, 2)
    engine = StorageEngine(Rude(Rig().tiers.identity, 1 << 20), layout.page_size, EngineLimits(1 << 20), threads=1)
    for _ in range(2):
        ticket = engine.lookup(b"", np.arange(4, dtype=np.int32).tobytes())
        assert ticket is not None and engine.wait_idle(30)
        assert ticket.done and isinstance(ticket.error, ZeroDivisionError)
    engine.close()


# ---- F15 chains on storage ------------------------------------------------------------------


def test_f15_cold_tails_written_back_under_a_hot_root_can_be_restored_as_whole_chains() -> None:
    options = RigOptions(
        device_pages=12, host_pages=10, storage_pages=200, host_write=WRITE_BACK, storage_write=WRITE_BACK
    )
    rig = Rig(options)
    root = tokens(1, 6)
    for tail in range(10):
        rig.serve(root + tokens(50 + tail, 9), rid=f"r{tail}")
        rig.settle()
    backend = rig.backend
    assert backend is not None
    with patch.object(rig.engine, "close"), patch.object(rig.cache._lifecycle, "wait", lambda *_: rig.settle()):
        rig.cache.close()
    assert not rig.tiers.counters.dropped_pages
    for tail in range(10):
        data = PrefixKey.of(root + tokens(50 + tail, 9)).data
        assert backend.contains_prefix(page_digests(rig.tiers.seed(b""), data, 2)) == 7


def test_f15_a_page_below_one_that_cannot_be_stored_is_not_written() -> None:
    rig = Rig(RigOptions(host_write=WRITE_BACK, storage_write=WRITE_BACK))
    rig.serve(tokens(1, 8))
    rig.cache.match_prefix(key(1, 4))
    head, tail = rig.tiers.tree.nodes()
    assert rig.tiers.host is not None and rig.engine is not None
    pages = rig.tiers.host.pool.allocator.alloc(2)
    assert pages is not None
    rig.tiers.tree.fills.commit(rig.tiers.tree.fills.begin(Tier.HOST, [tail], pages))
    assert rig.cache._demotion.persister.persist([tail], evict=False) == [(tail, DropReason.CHAIN_CUT)]
    assert rig.engine.queued_bytes == 0 and head.residency[Tier.STORAGE] is ABSENT


def test_f15_a_chain_whose_head_the_backend_lost_is_written_again_from_its_head() -> None:
    rig = Rig(RigOptions(device_pages=20, host_pages=20, storage_pages=64))
    rig.serve(tokens(1, 8))
    rig.settle()
    assert rig.backend is not None
    rig.backend.delete(page_digests(rig.tiers.seed(b""), key(1, 2).data, 2))
    rig.serve(tokens(1, 16), rid="longer")
    rig.settle()  # the tail is refused: its head is gone
    assert rig.cache.stats().storage_pages == 0
    rig.serve(tokens(1, 20), rid="longest")
    rig.settle()
    assert rig.cache.stats().storage_pages == 10


# ---- F17 flush ------------------------------------------------------------------------------


def test_f17_busy_is_not_success_and_changes_nothing() -> None:
    rig = Rig()
    req = admitted(rig, 1, 8)
    rig.finish(req)
    second = admitted(rig, 1, 8, "second")
    report = rig.cache.flush()
    assert not report.flushed and "locks" in report.reason
    rig.requests.abort(second)
    rig.cache.end_step(None)
    report = rig.cache.flush()  # the copies down are still in flight
    assert not report.flushed and "in flight" in report.reason
    assert rig.cache.match_prefix(key(1, 8)).device_len == 8


def test_f17_after_a_flush_nothing_matches_on_any_tier() -> None:
    rig = Rig(RigOptions(device_pages=8, host_pages=8, storage_pages=64))
    for first in range(4):
        rig.serve(tokens(first, 11), rid=f"r{first}")
        rig.settle()
    assert rig.cache.flush().flushed
    rig.settle()
    assert not list(rig.tiers.tree.nodes()) and rig.cache.stats().storage_pages == 0
    assert [rig.serve(tokens(first, 11), rid=f"s{first}").prefix_len for first in range(4)] == [0] * 4


@pytest.mark.parametrize("tier", list(Tier))
def test_f17_a_flush_of_one_tier_leaves_the_others(tier: Tier) -> None:
    rig = Rig(RigOptions(device_pages=12, host_pages=12, storage_pages=64))
    rig.serve(tokens(1, 9))
    rig.settle()
    assert rig.cache.flush([tier]).flushed
    rig.check()
    match = rig.cache.match_prefix(key(1, 8))
    assert (match.device_len, match.host_hit_len) == ((0, 8) if tier is Tier.DEVICE else (8, 0))
    assert rig.cache.stats().storage_pages == (0 if tier is Tier.STORAGE else 4)


# ---- F19 whole pages ------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_f19_only_whole_pages_are_shared_and_one_token_is_left_to_compute(page_size: int) -> None:
    for length in sorted({max(k * page_size + d, 1) for k in (1, 2, 3) for d in (-1, 0, 1)}):
        rig = Rig(RigOptions(page_size=page_size, device_pages=8, host_pages=8, storage_pages=0))
        rig.serve(tokens(1, length))
        assert rig.serve(tokens(1, length), rid="again").device_len == (length - 1) // page_size * page_size
        rig.settle()
        rig.check()


# ---- F22 bounded tables ---------------------------------------------------------------------


def test_f22_thousands_of_cycles_at_a_constant_live_set_leave_every_table_at_its_baseline() -> None:
    rig = Rig(RigOptions(device_pages=10, host_pages=10, storage_pages=20))
    sizes = []
    for cycle in range(1200):
        rig.serve(tokens(cycle % 300, 7), b"tenant%d" % (cycle % 300), rid=f"r{cycle}")
        if cycle % 50 == 49:
            rig.settle()
            tree = rig.tiers.tree
            sizes.append((len(list(tree.nodes())), len(tree.roots), len(tree.fills)))
            assert not rig.cache.in_flight and not rig.cache._ticket_of and not rig.requests._admitted
    assert max(nodes for nodes, _, _ in sizes) <= 20 and max(roots for _, roots, _ in sizes) <= 20
    assert max(fills for _, _, fills in sizes) == 0


# ---- F29 preemption -------------------------------------------------------------------------


def test_f29_a_request_retracted_after_its_first_chunk_owns_nothing_any_more() -> None:
    rig = Rig(RigOptions(device_pages=10))
    req = Request("r", tokens(1, 15))
    assert rig.requests.admit(req) is not None
    assert rig.requests.extend(req, 15)
    rig.write_kv(req, 0, 7)
    rig.requests.commit(req, 7)
    rig.requests.cache_unfinished_req(req)
    rig.requests.retract(req)
    rig.settle()
    rig.check()
    assert rig.tiers.request_pages == 0 and rig.cache.protected_size() == 0
    assert rig.cache.evictable_size() == 6  # three whole pages of seven tokens
    assert rig.tiers.device_allocator.free_pages == 7


def test_f29_two_requests_that_compute_the_same_prefix_keep_one_copy() -> None:
    rig = Rig(RigOptions(device_pages=12, storage_pages=0))
    one, two = Request("one", tokens(1, 9)), Request("two", tokens(1, 9))
    for req in (one, two):
        assert rig.requests.admit(req) is not None and rig.requests.extend(req, 9)
    for req in (one, two):
        rig.write_kv(req, 0, 9)
        rig.requests.commit(req, 9)
        rig.requests.cache_unfinished_req(req)
        rig.check()
    assert np.array_equal(rig.requests.pages(one)[:4], rig.requests.pages(two)[:4])
    for req in (one, two):
        rig.requests.cache_finished_req(req)
    rig.settle()
    rig.check()
    assert rig.cache.evictable_size() == 8


def test_f29_a_request_whose_own_host_copies_make_room_for_its_next_chunk_keeps_its_table() -> None:
    rig = Rig(RigOptions(device_pages=16, host_pages=4, storage_pages=0))
    req = Request("r", tokens(1, 25))
    assert rig.requests.admit(req) is not None and rig.requests.extend(req, 25)
    for start, stop in ((0, 8), (8, 14), (14, 20), (20, 25)):
        rig.write_kv(req, start, stop)
        rig.requests.commit(req, stop)
        rig.requests.cache_unfinished_req(req)  # splits nodes of the request's path to evict their host copies
        rig.check_pages(req, stop)
        rig.settle()


def test_f29_a_prefix_whose_host_copies_are_cut_during_admission_is_whole() -> None:
    rig = Rig(RigOptions(device_pages=12, host_pages=6, storage_pages=0, host_write=WRITE_BACK))
    rig.serve(tokens(1, 12))
    rig.settle()
    node = next(rig.tiers.tree.nodes())
    assert rig.cache._demotion.stage_backup([node])
    rig.settle()
    match = rig.cache.match_prefix(key(1, 12))
    guard = rig.cache.lock(match)
    fake = rig.cache._demotion.make_device_room
    rig.cache._demotion.make_device_room = lambda count: rig.cache._demotion.make_host_room(2) or fake(count)
    load = rig.cache.init_load_back(match)
    assert load is not None
    assert load.tokens == 0 and len(load.pages) == 6
    rig.cache.unlock(load.receipt)
    rig.cache.unlock(guard)


def test_f29_kv_that_is_not_written_is_not_committed() -> None:
    rig = Rig()
    req = Request("r", tokens(1, 6))
    assert rig.requests.admit(req) is not None and rig.requests.extend(req, 4)
    with pytest.raises(ProtocolError, match="cannot commit"):
        rig.requests.commit(req, 6)
    with pytest.raises(ProtocolError, match="admitted already"):
        rig.requests.admit(req)


# ---- F30 back-pressure ----------------------------------------------------------------------


def run_beside_storage(rig: Rig, req: Request) -> Admission:
    """Run a whole request; storage does not move meanwhile."""
    for _ in range(20):
        admission = rig.requests.admit(req)
        if admission is not None and rig.requests.extend(req, len(req.tokens)):
            break
        if admission is not None:
            rig.requests.retract(req)
        rig.cache.end_step(None)
        rig.drain_streams()
        rig.cache.poll()
    assert admission is not None and req.admitted
    rig.drain_streams()
    rig.check_pages(req, admission.prefix_len)
    rig.finish(req)
    rig.drain_streams()
    rig.cache.poll()
    return admission


def test_f30_fifty_waiting_requests_on_a_slow_disk_are_bounded_and_throughput_recovers() -> None:
    policy = PrefetchPolicy("wait_complete", 1000.0)
    rig = Rig(RigOptions(device_pages=24, host_pages=40, storage_pages=500, prefetch=policy))
    for first in range(50):
        rig.serve(tokens(first, 11), rid=f"s{first}")
        rig.settle()
    assert rig.cache.flush([Tier.DEVICE, Tier.HOST]).flushed
    engine, host = rig.engine, rig.tiers.host
    assert engine is not None and host is not None
    for first in range(60, 64):
        run_beside_storage(rig, Request(f"n{first}", tokens(first, 5)))
    queued = engine.queued_bytes
    assert queued == 8 * rig.layout.page_stride  # the queue is full
    waiting = [Request(f"w{first}", tokens(first, 11)) for first in range(50)]
    for req in waiting:
        rig.cache.prefetch(req.rid, req.key())
    served = 0
    for _ in range(2000):  # one storage call at a time: the disk is slow
        if not waiting:
            break
        engine.run_next()
        rig.cache.poll()
        assert rig.tiers.staged_host_pages <= host.pool.num_pages // 2
        if len(waiting) > 5:
            assert engine.queued_bytes == queued  # loads go before stores
        ready = next((req for req in waiting if rig.cache.prefetch_ready(req.rid)), None)
        if ready is not None:
            waiting.remove(ready)
            served += run_beside_storage(rig, ready).prefix_len == 10
            rig.check()
    assert served == 50 and rig.tiers.counters.hit_tokens["storage"] == 500
    rig.settle()
    rig.check()
    assert engine.queued_bytes == 0 and engine.idle and rig.tiers.staged_host_pages == 0
    rig.cache.flush([Tier.DEVICE, Tier.HOST])
    calls = 0
    rig.cache.prefetch("after", key(1, 11))
    while not rig.cache.prefetch_ready("after"):
        assert engine.run_next()
        calls += 1
        rig.cache.poll()
    assert calls == 2  # a lookup and a read, as without a storm


def test_a_failing_store_ends_as_a_counted_drop() -> None:
    rig = Rig(RigOptions(device_pages=6, host_pages=6, storage_pages=20, storage_write=WRITE_BACK))
    assert rig.backend is not None
    for index in range(6):
        rig.backend.failing_stores = 1
        rig.serve(tokens(index, 9), rid=f"r{index}")
        rig.settle()
    assert rig.tiers.counters.failures["store_failed"] >= 1
    assert sum(rig.tiers.counters.dropped_pages.values()) > 0
    rig.check()


def test_shed_stores_are_counted() -> None:
    rig = Rig(RigOptions(device_pages=30, host_pages=6, storage_pages=64))
    assert rig.engine is not None
    rig.engine.queue_bytes = 1
    for index in range(6):
        rig.serve(tokens(index, 9), rid=f"r{index}")
        rig.cache.end_step(None)
        rig.drain_streams()
        rig.cache.poll()
    assert rig.engine.queued_bytes > 0
    rig.settle()
    rig.check()
    with pytest.raises(StorageError):
        rig.cache.close(0.0)
        assert rig.backend is not None
        rig.backend.usage()


def backups_in_flight(rig: Rig, first: int, count: int) -> None:
    """As many copies to the host, of one page each, each of a step of its own."""
    for index in range(first, first + count):
        pages = rig.cache.alloc_pages(2)
        assert pages is not None
        rig.cache.insert(key(index, 4), pages)
        rig.cache.end_step(None)


def loads_in_flight(rig: Rig, first: int, count: int) -> None:
    """As many copies to the device, of prompts that only the host has."""
    backups_in_flight(rig, first, count)
    rig.settle()
    rig.cache.flush([Tier.DEVICE])
    for index in range(first, first + count):
        assert rig.cache.init_load_back(rig.cache.match_prefix(key(index, 4))) is not None


@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_f38_one_fault_is_one_failure_however_many_copies_wait_behind_it(direction: str, count: int) -> None:
    rig = Rig(RigOptions(page_size=2, device_pages=24, host_pages=24, storage_pages=0))
    if direction == "d2h":
        backups_in_flight(rig, 1, count)
        rig.d2h.fail_next(RuntimeError("one transient error"))
    else:
        loads_in_flight(rig, 1, count)
        rig.h2d.fail_next(RuntimeError("one transient error"))
    rig.drain_streams()
    rig.cache.poll()
    assert rig.cache.stats().failures["copy"] == 1
    assert rig.tiers.usable_host is not None
    rig.cache.check_integrity()


def test_f38_a_host_tier_that_was_given_up_comes_back_by_itself() -> None:
    rig = Rig(RigOptions(page_size=2, device_pages=24, host_pages=24, storage_pages=0))
    for index in range(3):
        backups_in_flight(rig, 10 + index, 1)
        rig.d2h.fail_next(RuntimeError(f"fault {index}"))
        rig.drain_streams()
        rig.cache.poll()
    assert rig.cache.stats().failures["copy"] == 3 and rig.tiers.usable_host is None
    rig.serve(tokens(1, 5))  # serving goes on without it
    assert rig.cache.match_prefix(key(1, 5)).device_len == 4
    rig.now += FIRST_PAUSE
    backups_in_flight(rig, 20, 1)  # the trial, which fails
    rig.d2h.fail_next(RuntimeError("still"))
    assert rig.tiers.usable_host is None  # one at a time
    rig.drain_streams()
    rig.cache.poll()
    assert rig.tiers.usable_host is None
    rig.now += FIRST_PAUSE
    assert rig.tiers.usable_host is None  # the pause is twice as long now
    rig.now += FIRST_PAUSE
    backups_in_flight(rig, 21, 1)
    rig.settle()
    assert rig.tiers.usable_host is not None
    rig.cache.flush([Tier.DEVICE])
    assert rig.cache.match_prefix(key(21, 4)).host_hit_len == 4
    rig.cache.check_integrity()


@pytest.mark.parametrize("mode", ["write_back", "write_through"])
@pytest.mark.parametrize("host_pages", [1, 2, 3, 16, 49, 50])
def test_f36_close_stores_a_chain_that_is_longer_than_the_host(host_pages: int, mode: str) -> None:
    write = WritePolicy(mode)  # type: ignore[arg-type]
    options = RigOptions(device_pages=120, host_pages=host_pages, storage_pages=400, host_write=write)
    rig = Rig(options)
    assert rig.backend is not None
    chains = [list(range(first, first + 2 * 50)) for first in (0, 1000)]
    chains[1][:40] = chains[0][:40]  # a common beginning
    for number, chain in enumerate(chains):
        rig.serve(chain, rid=f"r{number}")
        rig.settle()
    backend = rig.backend
    close_in_steps(rig)
    for chain in chains:
        keys = page_digests(rig.tiers.identity.seed(), np.array(chain, np.int32).tobytes(), 2)
        assert backend.contains_prefix(keys) == 50


def close_in_steps(rig: Rig) -> None:
    """Close, with streams and storage stepped meanwhile; the backend stays open, to be looked at."""
    assert rig.backend is not None
    with patch("time.sleep", lambda seconds: rig.step()), patch.object(rig.backend, "close"):
        rig.cache.close(60.0)


def test_f36_close_asks_the_store_before_it_believes() -> None:
    """What is hot in memory is not used on disk, and may be gone from there."""
    rig = stored(RigOptions(device_pages=16, host_pages=16, storage_pages=64))
    backend = rig.backend
    assert backend is not None
    keys = page_digests(rig.tiers.identity.seed(), key(1, 12).data, 2)
    rig.serve(tokens(1, 13))
    rig.settle()
    assert backend.contains_prefix(keys) == 6
    backend.delete(keys[3:4])  # as by the store's own eviction, children too
    assert backend.contains_prefix(keys) == 3
    close_in_steps(rig)
    assert backend.contains_prefix(keys) == 6


def counted(rig: Rig) -> tuple[dict[str, int], int]:
    stats = rig.cache.stats()
    return {tier: tokens for tier, tokens in stats.hit_tokens.items() if tokens}, stats.computed_tokens


def test_f41_a_requests_own_pages_are_no_hits_after_its_retraction() -> None:
    rig = Rig(RigOptions(page_size=2, device_pages=40, host_pages=16))
    request = Request("r", tokens(1, 13))
    for _ in range(3):
        rig.admit(request)
        assert rig.requests.extend(request, 12)
        rig.write_kv(request, request.kv_committed_len, 12)
        rig.requests.commit(request, 12)
        rig.requests.cache_unfinished_req(request)
        rig.requests.retract(request)
        rig.settle()
    assert counted(rig) == ({}, 13)


def test_f41_what_others_computed_since_is_a_hit() -> None:
    rig = Rig(RigOptions(page_size=2, device_pages=40, host_pages=16))
    request = Request("r", tokens(1, 13))
    rig.admit(request)
    assert rig.requests.extend(request, 4)
    rig.write_kv(request, 0, 4)
    rig.requests.commit(request, 4)
    rig.requests.cache_unfinished_req(request)
    rig.requests.retract(request)
    rig.serve(tokens(1, 11), rid="other")  # hits 4 of its 11 tokens
    assert counted(rig) == ({"device": 4}, 13 + 11 - 4)
    rig.requests.append(request, [5, 6])  # an answer has begun: its tokens are in no prompt
    rig.admit(request)
    assert counted(rig) == ({"device": 4 + 6}, 13 + 11 - 4 - 6)
    rig.finish(request)


def test_f41_hits_and_computed_tokens_sum_to_the_prompts_whatever_is_retracted() -> None:
    draw = random.Random(1)
    rig = Rig(RigOptions(page_size=2, device_pages=24, host_pages=12, storage_pages=64))
    asked = 0
    for number in range(60):
        request = Request(f"r{number}", tokens(draw.randrange(4), draw.randrange(3, 14)))
        asked += len(request.tokens)
        for _ in range(draw.randrange(3)):
            rig.admit(request)
            stop = draw.randrange(request.kv_committed_len, len(request.tokens) + 1)
            if rig.requests.extend(request, stop):
                rig.write_kv(request, request.kv_committed_len, stop)
                rig.requests.commit(request, stop)
                rig.requests.cache_unfinished_req(request)
            rig.requests.retract(request)
            rig.settle()
        rig.admit(request)
        while not rig.requests.extend(request, len(request.tokens)):
            rig.settle()
        rig.finish(request)
        rig.settle()
        hits, computed = counted(rig)
        assert sum(hits.values()) + computed == asked
