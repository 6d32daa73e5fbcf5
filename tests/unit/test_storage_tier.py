"""The storage tier of a cache: out of service and back, hung, cleared by others, attached, detached, choosy."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hicache.errors import ProtocolError, StoreIdentityError, StoreUnavailableError
from hicache.hashing import page_digests
from hicache.layout import KVLayout
from hicache.policies.admission import AdmissionPolicy
from hicache.policies.write import WritePolicy
from hicache.prefetch import PrefetchMode, PrefetchPolicy
from hicache.requests import Request
from hicache.storage_backends.base import PageRun, StorageBackend
from hicache.storage_backends.memory import MemoryBackend
from hicache.storage_backends.recovering import RecoveringBackend
from hicache.testing.rig import FlakyBackend, Rig, RigOptions
from hicache.tiers import StorageTier
from hicache.transfer.storage_engine import EngineLimits, StorageEngine
from hicache.types import PrefixKey, Tier

WRITE_BACK = WritePolicy("write_back")
LONG = 30.0  # seconds a test waits for another thread before it fails


def tokens(first: int, count: int) -> list[int]:
    return [first * 100 + index for index in range(count)]


def key(first: int, count: int) -> PrefixKey:
    return PrefixKey.of(tokens(first, count))


def stored(mode: PrefetchMode = "timeout", deadline: float = 1.0) -> Rig:
    """A rig whose memory tiers are empty and whose storage has six pages of prompt 1."""
    policy = PrefetchPolicy(mode, deadline)
    rig = Rig(RigOptions(device_pages=8, host_pages=8, storage_pages=64, prefetch=policy))
    rig.serve(tokens(1, 13))
    rig.settle()
    assert rig.cache.flush([Tier.DEVICE, Tier.HOST]).flushed
    return rig


def land(rig: Rig) -> None:
    """Copies to the host arrive; storage does not move."""
    rig.cache.end_step(None)
    rig.drain_streams()
    rig.cache.poll()


def serve_beside(rig: Rig, first: int, count: int) -> None:
    """Run a whole request without a prefetch, while what hangs goes on hanging."""
    req = Request(f"beside{first}", tokens(first, count))
    for _ in range(20):
        if rig.requests.admit(req) is not None and rig.requests.extend(req, count):
            rig.finish(req)
            land(rig)
            return
        if req.admitted:
            rig.requests.retract(req)
        land(rig)
    raise AssertionError("the cache waits for a store that hangs")


def pages_stored(rig: Rig, first: int, count: int) -> int:
    assert rig.backend is not None
    return rig.backend.contains_prefix(page_digests(rig.tiers.seed(b""), key(first, count).data, 2))


def believed_stored(rig: Rig) -> int:
    return sum(node.residency.on_storage for node in rig.tiers.tree.nodes())


# ---- out of service, and back ---------------------------------------------------------------


def test_stores_that_fail_stop_stores_only_and_come_back_by_themselves() -> None:
    rig = Rig(RigOptions(device_pages=20, host_pages=8, storage_pages=64))
    assert rig.backend is not None
    rig.backend.error = StoreUnavailableError("full", "disk_full")
    rig.backend.failing_stores = 3
    for index in range(6):
        rig.serve(tokens(index, 9), rid=f"r{index}")
        rig.settle()
        rig.check()
    stats = rig.cache.stats()
    assert (stats.storage_loads, stats.storage_stores) == ("on", "off")
    assert stats.failures["store_disk_full"] == 3
    rig.now += 1.0
    for index in (8, 9):
        rig.serve(tokens(index, 9), rid=f"r{index}")
        rig.settle()
    assert rig.cache.stats().storage_stores == "on" and pages_stored(rig, 9, 8) == 4


def test_what_leaves_the_host_while_stores_are_stopped_is_counted_so() -> None:
    rig = Rig(RigOptions(device_pages=6, host_pages=6, storage_pages=64, storage_write=WRITE_BACK))
    assert rig.backend is not None and rig.engine is not None
    rig.engine.trip(StoreUnavailableError("away"))
    for index in range(6):
        rig.serve(tokens(index, 9), rid=f"r{index}")
        rig.settle()
    assert set(rig.cache.stats().dropped_pages) == {"tier_degraded"}
    rig.check()


def test_ancestors_come_to_the_host_also_while_stores_are_stopped() -> None:
    rig = Rig(RigOptions(host_write=WRITE_BACK, storage_write=WRITE_BACK))
    rig.serve(tokens(1, 8))
    rig.cache.match_prefix(key(1, 4))
    head, tail = rig.tiers.tree.nodes()
    assert rig.engine is not None
    rig.engine.trip(StoreUnavailableError("away"))
    assert rig.cache._demotion.stage_backup([tail])
    rig.settle()
    assert head.residency.on_host  # once stores work again, the tail can be stored


def test_no_prefetch_begins_while_loads_are_stopped() -> None:
    rig = stored()
    assert rig.engine is not None
    rig.engine.trip(StoreUnavailableError("away"))
    rig.cache.prefetch("p", key(1, 13))
    assert rig.cache.prefetch_ready("p") and rig.engine.idle
    assert not rig.cache.stats().prefetches.get("error")
    rig.now += 1.0
    assert rig.serve(tokens(1, 13)).prefix_len == 12
    assert rig.cache.stats().storage_loads == "on"


def test_the_lookup_of_a_cancelled_prefetch_is_not_made() -> None:
    rig = stored()
    assert rig.backend is not None
    rig.cache.prefetch("p", key(1, 13))
    rig.cache.cancel_prefetch("p")
    rig.backend.failing_loads = 1
    rig.settle()
    assert rig.backend.failing_loads == 1


# ---- calls that hang ------------------------------------------------------------------------


def test_a_lookup_that_hangs_ends_its_prefetch_before_a_long_deadline() -> None:
    rig = stored("wait_complete", 1000.0)
    rig.cache.prefetch("p", key(1, 13))
    rig.cache.prefetch("follows", key(1, 13))
    assert rig.hang() and not rig.cache.prefetch_ready("p")
    rig.now += 5.1
    rig.cache.poll()
    assert rig.cache.prefetch_ready("p") and rig.cache.prefetch_ready("follows")
    assert rig.cache.stats().failures == {"load_timeout": 1} and rig.cache.stats().storage_loads == "off"


def test_host_pages_of_a_read_that_hangs_stay_taken_until_it_returns() -> None:
    rig = stored()
    rig.cache.prefetch("p", key(1, 13))
    assert rig.engine is not None and rig.engine.run_next()
    rig.cache.poll()
    assert rig.hang() and rig.tiers.host is not None
    rig.now += 5.1
    rig.cache.poll()
    assert rig.cache.prefetch_ready("p")
    assert rig.tiers.host.pool.allocator.free_pages == 2 and rig.cache.in_flight
    rig.serve(tokens(2, 5), rid="other")  # serving goes on beside it
    rig.settle()
    assert rig.tiers.staged_host_pages == 0
    rig.check()


def test_a_write_that_hangs_holds_up_neither_room_nor_later_stores_acknowledgements() -> None:
    rig = Rig(RigOptions(device_pages=8, host_pages=6, storage_pages=64))
    serve_beside(rig, 1, 9)
    assert rig.hang()
    serve_beside(rig, 2, 5)
    rig.now += 30.1
    for index in range(3, 9):  # all room that the host has left is turned over meanwhile
        serve_beside(rig, index, 13)
        rig.check()
    assert len(rig.hanging) == 1 and rig.cache.in_flight
    assert rig.cache.stats().failures["store_timeout"] == 1
    rig.settle()
    rig.check()
    assert not rig.cache.in_flight and pages_stored(rig, 1, 8) == 4


def test_a_flush_while_a_write_hangs_says_so_and_forgets_nothing() -> None:
    rig = Rig(RigOptions(storage_pages=64))
    rig.serve(tokens(1, 9))
    land(rig)
    assert rig.hang()
    rig.now += 31.0
    rig.cache.poll()
    report = rig.cache.flush()
    assert not report.flushed and "in flight" in report.reason
    assert rig.cache.match_prefix(key(1, 8)).device_len == 8


class Hanging(FlakyBackend):
    """Writes hang until they are let go; read what they were given only then."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig.tiers.identity, 64 * rig.layout.page_stride)
        self.began, self.go_on, self.was_closed = threading.Event(), threading.Event(), threading.Event()
        self.seen = b""

    def write(self, runs: Sequence[PageRun]) -> list[int]:
        self.began.set()
        assert self.go_on.wait(LONG)
        self.seen = b"".join(bytes(buffer) for run in runs for buffer in run.buffers)
        return super().write(runs)

    def close(self) -> None:
        super().close()
        self.was_closed.set()


def hung_rig(host_pages: int = 8) -> tuple[Rig, Hanging, bytes]:
    """A rig with a worker thread that hangs in a write of four pages, and their bytes."""
    rig = Rig(RigOptions(host_pages=host_pages, storage_pages=0))
    backend = Hanging(rig)
    engine = StorageEngine(backend, 2, EngineLimits(1 << 20), threads=1, clock=lambda: rig.now)
    rig.cache.attach_storage(StorageTier(engine))
    serve_beside(rig, 1, 9)
    assert backend.began.wait(LONG)
    (node,) = rig.tiers.tree.nodes()
    assert node.host_pages is not None
    return rig, backend, b"".join(bytes(buffer) for buffer in rig.tiers.host_buffers(node.host_pages))


def test_close_abandons_a_write_that_hangs_with_its_memory() -> None:
    rig, backend, data = hung_rig()
    host = rig.tiers.host
    assert host is not None
    rig.now = 31.0
    rig.cache.close(0.05)
    assert not backend.was_closed.is_set() and len(host.pool.array)  # mapped, and known to be
    backend.go_on.set()
    assert backend.was_closed.wait(LONG) and backend.seen == data


def test_detach_leaves_a_write_that_hangs_its_pages_until_it_returns() -> None:
    rig, backend, data = hung_rig(host_pages=4)
    report = rig.cache.detach_storage(0.0)
    assert not report.closed and rig.tiers.storage is None
    for index in range(2, 8):
        serve_beside(rig, index, 13)
        rig.check()
    backend.go_on.set()
    assert backend.was_closed.wait(LONG) and backend.seen == data
    rig.settle()
    rig.check()
    assert not rig.cache.in_flight and not believed_stored(rig)


def test_a_write_that_returns_after_another_tier_was_attached_stored_nothing_there() -> None:
    rig = Rig(RigOptions(storage_pages=64))
    serve_beside(rig, 1, 9)
    assert rig.hang()
    assert not rig.detach().closed
    rig.attach()
    rig.settle()
    assert not rig.cache.in_flight and not believed_stored(rig)


# ---- generations ----------------------------------------------------------------------------


def test_a_store_cleared_by_others_is_forgotten_as_soon_as_a_call_has_seen_it() -> None:
    rig = Rig(RigOptions(device_pages=20, host_pages=20, storage_pages=64))
    rig.serve(tokens(1, 9))
    rig.settle()
    assert rig.backend is not None and believed_stored(rig)
    rig.backend.clear()
    rig.cache.prefetch("p", key(2, 9))
    rig.settle()
    assert not believed_stored(rig) and rig.cache.stats().forgotten_pages == 4
    rig.serve(tokens(1, 13), rid="again")
    rig.settle()
    assert pages_stored(rig, 1, 12) == 6
    rig.check()


def test_a_store_that_was_queued_before_a_clear_stores_nothing_after_it() -> None:
    rig = Rig(RigOptions(storage_pages=64))
    rig.serve(tokens(1, 9))
    land(rig)
    assert rig.backend is not None and rig.engine is not None and rig.engine.queued_bytes
    rig.backend.clear()
    rig.settle()
    assert rig.backend.usage().pages == 0 and not believed_stored(rig)


def test_what_was_stored_before_a_clear_and_acknowledged_after_it_is_not_believed_stored() -> None:
    rig = Rig(RigOptions(storage_pages=64))
    rig.serve(tokens(1, 9))
    land(rig)
    assert rig.backend is not None and rig.engine is not None and rig.engine.run_next()
    rig.backend.clear()
    assert rig.engine.lookup(b"", b"") and rig.engine.run_next()
    rig.cache.poll()
    assert not believed_stored(rig)


def test_pages_read_before_a_clear_are_not_brought_back() -> None:
    rig = stored()
    assert rig.backend is not None and rig.engine is not None and rig.tiers.host is not None
    rig.cache.prefetch("p", key(1, 13))
    rig.engine.run_next()
    rig.cache.poll()
    rig.engine.run_next()
    rig.backend.clear()
    assert rig.engine.lookup(b"", b"") and rig.engine.run_next()
    rig.cache.poll()
    assert rig.cache.prefetch_ready("p") and rig.cache.match_prefix(key(1, 13)).host_hit_len == 0
    assert rig.tiers.host.pool.allocator.free_pages == 8
    rig.check()


def test_after_a_flush_of_storage_its_queue_brings_nothing_back() -> None:
    rig = Rig(RigOptions(device_pages=20, host_pages=20, storage_pages=64))
    rig.serve(tokens(1, 9))
    land(rig)
    assert not rig.cache.flush([Tier.STORAGE]).flushed  # a store is in flight
    rig.settle()
    assert rig.cache.flush([Tier.STORAGE]).flushed
    rig.settle()
    assert rig.cache.stats().storage_pages == 0 and not believed_stored(rig)
    assert rig.cache.stats().forgotten_pages == 0
    rig.serve(tokens(1, 13), rid="again")
    rig.settle()
    assert pages_stored(rig, 1, 12) == 6  # also those that were forgotten


def test_what_leaves_the_host_right_after_a_flush_is_stored() -> None:
    rig = Rig(RigOptions(storage_pages=64))
    rig.serve(tokens(1, 9))
    rig.settle()
    assert rig.cache.flush([Tier.STORAGE]).flushed
    rig.cache._demotion.make_host_room(8)
    rig.settle()
    assert pages_stored(rig, 1, 8) == 4


def test_a_store_that_cannot_be_cleared_is_not_flushed_and_nor_is_anything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(RigOptions(storage_pages=64))
    rig.serve(tokens(1, 9))
    rig.settle()

    def refuse() -> int:
        raise StoreUnavailableError("read-only")

    assert rig.backend is not None
    monkeypatch.setattr(rig.backend, "clear", refuse)
    report = rig.cache.flush()
    assert not report.flushed and "read-only" in report.reason
    assert rig.cache.match_prefix(key(1, 8)).device_len == 8 and believed_stored(rig)


# ---- attached and detached ------------------------------------------------------------------


def test_detach_stores_what_waits_forgets_what_is_there_and_closes() -> None:
    rig = Rig(RigOptions(device_pages=20, host_pages=20, storage_pages=64))
    rig.serve(tokens(1, 9))
    rig.settle()
    rig.serve(tokens(2, 9), rid="queued")
    land(rig)
    backend, engine = rig.backend, rig.engine
    rig.cache.prefetch("p", key(3, 9))
    report = rig.detach()
    assert report.closed and report.shed_pages == 0 and backend is not None and engine is not None
    assert rig.tiers.storage is None and not believed_stored(rig) and not rig.cache.in_flight
    assert rig.cache.stats().prefetches["cancelled"] == 1
    assert rig.cache.stats().storage_loads is None and rig.cache.prefetch_ready("p")
    assert rig.cache.stats().moved_bytes["host_storage"] == 8 * rig.layout.page_stride
    with pytest.raises(StoreUnavailableError):
        backend.usage()
    rig.check()


def test_attach_begins_with_nothing_stored_and_stores_whole_chains() -> None:
    rig = Rig(RigOptions(device_pages=20, host_pages=20, storage_pages=64))
    rig.serve(tokens(1, 9))
    rig.settle()
    rig.detach()
    rig.serve(tokens(1, 13), rid="between")
    rig.settle()
    rig.attach()
    assert not believed_stored(rig)
    rig.serve(tokens(1, 17), rid="after")
    rig.settle()
    assert pages_stored(rig, 1, 16) == 8
    rig.check()


def test_requests_run_on_while_the_tier_goes_and_comes() -> None:
    rig = stored()
    req = Request("r", tokens(1, 13))
    rig.cache.prefetch("r", req.key())
    rig.settle()
    assert rig.cache.prefetch_ready("r")
    rig.admit(req)
    rig.detach()
    rig.check()
    rig.attach()
    rig.check()
    rig.finish(req)
    rig.settle()
    rig.check()
    assert pages_stored(rig, 1, 12) == 0  # its pages had been stored elsewhere, and entered before


def test_attach_and_detach_refuse_what_makes_no_sense() -> None:
    rig = Rig()
    with pytest.raises(ProtocolError, match="already"):
        rig.cache.attach_storage(rig.storage_tier())
    rig.detach()
    with pytest.raises(ProtocolError, match="no storage tier"):
        rig.cache.detach_storage()
    hostless = Rig(RigOptions(host_pages=0, storage_pages=0))
    backend = FlakyBackend(hostless.tiers.identity, 1 << 20)
    with pytest.raises(ProtocolError, match="host"):
        hostless.cache.attach_storage(hostless.storage_tier(backend))
    hostless.cache.close()
    with pytest.raises(ProtocolError, match="closed"):
        hostless.cache.attach_storage(hostless.storage_tier(backend))


def test_what_is_shed_at_a_detach_is_counted() -> None:
    rig, backend, _ = hung_rig()
    serve_beside(rig, 2, 5)
    report = rig.cache.detach_storage(0.0)
    assert report.shed_pages == 2
    backend.go_on.set()
    assert backend.was_closed.wait(LONG)
    rig.settle()
    rig.check()


# ---- admission ------------------------------------------------------------------------------


def test_with_hits_a_page_is_stored_once_it_was_matched_often_enough() -> None:
    rig = Rig(RigOptions(device_pages=20, host_pages=20, storage_pages=64, admission=AdmissionPolicy("hits", 2)))
    rig.serve(tokens(1, 9))
    rig.settle()
    assert pages_stored(rig, 1, 8) == 0
    rig.serve(tokens(1, 9), rid="first use")  # it is looked for at its enqueueing and at its admission: one use
    rig.settle()
    assert pages_stored(rig, 1, 8) == 0
    rig.serve(tokens(1, 13), rid="second use")
    rig.settle()
    assert pages_stored(rig, 1, 12) == 4
    rig.check()


def test_with_priority_a_page_is_stored_for_who_matters() -> None:
    rig = Rig(RigOptions(device_pages=20, host_pages=20, storage_pages=64, admission=AdmissionPolicy("priority")))
    for priority, first in ((0, 1), (1, 2)):
        req = Request(f"r{first}", tokens(first, 9), priority=priority)
        rig.admit(req)
        rig.finish(req)
        rig.settle()
    assert (pages_stored(rig, 1, 8), pages_stored(rig, 2, 8)) == (0, 4)
    longer = Request("longer", tokens(1, 13), priority=1)
    rig.admit(longer)
    rig.finish(longer)
    rig.settle()
    assert pages_stored(rig, 1, 12) == 6


@pytest.mark.parametrize("write", [WritePolicy(), WRITE_BACK])
def test_what_leaves_the_host_and_is_not_admitted_is_discarded(write: WritePolicy) -> None:
    admission = AdmissionPolicy("hits", 100)
    rig = Rig(RigOptions(device_pages=6, host_pages=6, storage_pages=64, admission=admission, storage_write=write))
    for index in range(6):
        rig.serve(tokens(index, 9), rid=f"r{index}")
        rig.settle()
    assert set(rig.cache.stats().dropped_pages) == {"not_admitted"}
    assert rig.backend is not None and rig.backend.usage().pages == 0
    rig.check()


def test_close_stores_what_is_admitted_only(monkeypatch: pytest.MonkeyPatch) -> None:
    admission = AdmissionPolicy("priority")
    rig = Rig(RigOptions(device_pages=20, host_pages=20, storage_pages=64, admission=admission, host_write=WRITE_BACK))
    for priority, first in ((0, 1), (1, 2)):
        req = Request(f"r{first}", tokens(first, 9), priority=priority)
        rig.admit(req)
        rig.finish(req)
    rig.settle()
    monkeypatch.setattr(rig.cache._lifecycle, "wait", lambda *_: rig.settle())
    monkeypatch.setattr(rig.engine, "close", lambda _: True)
    rig.cache.close()
    assert (pages_stored(rig, 1, 8), pages_stored(rig, 2, 8)) == (0, 4)


def test_with_all_nothing_is_filtered() -> None:
    rig = Rig(RigOptions(device_pages=6, host_pages=6, storage_pages=64))
    for index in range(6):
        rig.serve(tokens(index, 9), rid=f"r{index}")
        rig.settle()
    assert not rig.cache.stats().dropped_pages


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "another"}, "model another where the cache has rig"),
        ({"layout": KVLayout(2, 1, 4, 4)}, "layout.page_size 4 where the cache has 2"),
        ({"codec": "fp8"}, "codec fp8 where the cache has none"),
        ({"weights_digest": "0f"}, "weights_digest 0f where the cache has None"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_store_of_another_identity_is_not_attached(change: dict[str, Any], told: str, wrapped: bool) -> None:
    rig = Rig(RigOptions(storage_pages=16))
    rig.detach()
    identity = replace(rig.tiers.identity, **change)
    backend: StorageBackend = MemoryBackend(identity, 1 << 20)
    if wrapped:
        backend = RecoveringBackend(lambda: MemoryBackend(identity, 1 << 20), identity)
    with pytest.raises(StoreIdentityError, match=re.escape(told)) as caught:
        rig.cache.attach_storage(rig.storage_tier(backend))
    assert "\n" not in str(caught.value) and rig.tiers.storage is None
    rig.serve(list(range(1, 9)))
    rig.settle()
    rig.attach()
