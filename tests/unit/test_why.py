"""`cache.why`: for each reason a case in which it is the one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hicache.decisions import DecisionLog
from hicache.explaining import Reason, TierExplanation
from hicache.hashing import RequestNamespace, page_digests
from hicache.layout import KVLayout
from hicache.policies.admission import AdmissionPolicy
from hicache.policies.write import WritePolicy
from hicache.prefetch import PrefetchPolicy
from hicache.storage_backends.base import PageRun, kept_format
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.memory import MemoryBackend
from hicache.storage_backends.recovering import RecoveringBackend
from hicache.testing.rig import Rig, RigOptions
from hicache.types import PrefixKey, Tier

PAGE = 2
A = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.settle()
        rig.check()


def rig_of(rigs: list[Rig], log_size: int = 1000, **options: object) -> Rig:
    rig = Rig(RigOptions(**options))  # type: ignore[arg-type] # fields of RigOptions
    rig.tiers.decisions = DecisionLog(log_size, PAGE, lambda: rig.now)
    rig.tiers.eviction = {"device": "lru", "host": "lru", "storage": "lru"}
    rigs.append(rig)
    return rig


def why(rig: Rig, tier: Tier, tokens: list[int] = A, namespace: bytes = b"") -> TierExplanation:
    found = rig.cache.why(PrefixKey.of(tokens, namespace))
    return next(entry for entry in found.tiers if entry.tier is tier)


def others(count: int, first: int = 100) -> list[list[int]]:
    """Prompts of 8 tokens that share nothing."""
    return [[first + 10 * index + at for at in range(8)] for index in range(count)]


def serve_all(rig: Rig, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        rig.serve(prompt)
        rig.settle()


def test_all_of_it_is_there(rigs: list[Rig]) -> None:
    rig = rig_of(rigs)
    serve_all(rig, [A])
    assert [entry.reason for entry in rig.cache.why(PrefixKey.of(A)).tiers] == [Reason.COMPLETE] * 3
    assert why(rig, Tier.DEVICE).tokens == 8


def test_never_stored(rigs: list[Rig]) -> None:
    rig = rig_of(rigs)
    serve_all(rig, [A])
    for tier in Tier:
        found = why(rig, tier, [*A[:4], 70, 71, 72, 73])
        assert (found.reason, found.tokens) == (Reason.NEVER_STORED, 4), found
    assert why(rig, Tier.DEVICE, [70, 71]).tokens == 0


def test_never_on_the_device_though_on_the_host(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, device_pages=8, host_pages=8, storage_pages=64)
    serve_all(rig, [A, *others(5)])
    rig.tiers.decisions = DecisionLog(1000, PAGE, lambda: rig.now)
    rig.cache.prefetch("r", PrefixKey.of(A))
    rig.settle()
    found = why(rig, Tier.DEVICE)
    assert found.reason is Reason.NEVER_STORED and "came to the host from storage" in found.text
    assert why(rig, Tier.HOST).reason is Reason.COMPLETE


def test_page_not_aligned(rigs: list[Rig]) -> None:
    rig = rig_of(rigs)
    serve_all(rig, [A])
    for tier in Tier:
        found = why(rig, tier, [*A, 9])
        assert (found.reason, found.tokens) == (Reason.UNALIGNED, 8)
    assert "the last 1 tokens" in why(rig, Tier.DEVICE, [*A, 9]).text


def test_evicted_from_the_device_by_its_policy_at_a_time(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, device_pages=8, host_pages=16)
    serve_all(rig, [A])
    rig.now = 12.5
    serve_all(rig, others(2))
    found = why(rig, Tier.DEVICE)
    assert found.reason is Reason.EVICTED and found.at is not None and 12.5 <= found.at <= rig.now < 14
    assert found.text == f"from device by lru at {found.at:.3f} s"
    assert why(rig, Tier.HOST).reason is Reason.COMPLETE


def test_evicted_from_the_host(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, device_pages=8, host_pages=8, storage_pages=64)
    serve_all(rig, [A])
    rig.now = 3.0
    serve_all(rig, others(5))
    found = why(rig, Tier.HOST)
    assert found.reason is Reason.EVICTED and found.at is not None and 3 <= found.at <= rig.now < 5
    assert found.text == f"from host by lru at {found.at:.3f} s"
    assert why(rig, Tier.STORAGE).reason is Reason.COMPLETE


def test_evicted_from_storage(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, device_pages=8, host_pages=8, storage_pages=1)  # of 4096 bytes, which are 64 without padding
    serve_all(rig, [A, *others(18)])
    found = why(rig, Tier.STORAGE)
    assert found.reason is Reason.EVICTED
    assert "from storage by lru" in found.text


def test_discarded_where_there_is_nothing_below(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, device_pages=8, host_pages=0, storage_pages=0)
    serve_all(rig, [A, *others(3)])
    found = why(rig, Tier.DEVICE)
    assert found.reason is Reason.EVICTED and "discarded: no_lower_tier" in found.text
    assert len(rig.cache.why(PrefixKey.of(A)).tiers) == 1


def test_a_part_that_is_there_again_does_not_hide_what_left(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, device_pages=8, host_pages=0, storage_pages=0)
    serve_all(rig, [A])
    rig.now = 1.0
    serve_all(rig, others(2))
    rig.now = 2.0
    serve_all(rig, [A[:4]])
    found = why(rig, Tier.DEVICE)
    assert (found.tokens, found.reason, found.at) == (4, Reason.EVICTED, 1.0)


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"salt": "tenant-2"}, "salt"), ({"adapter": "lora"}, "adapter"), ({"extra_key": "x"}, "extra_key")],
)
def test_namespace_differs_in_a_field(rigs: list[Rig], fields: dict[str, str], field: str) -> None:
    rig = rig_of(rigs)
    serve_all(rig, [A])
    for tier in Tier:
        found = why(rig, tier, A, RequestNamespace(**fields).encode())
        assert (found.reason, found.tokens) == (Reason.NAMESPACE, 0)
        assert found.text.endswith(f"another {field}")


@pytest.mark.parametrize("change", [{"revision": "2"}, {"layout": KVLayout(2, 1, 4, 4)}])
def test_the_identity_of_the_store_differs_in_a_field(
    rigs: list[Rig], tmp_path: Path, change: dict[str, object]
) -> None:
    """The engine came back with another revision, or with larger pages."""
    rig = rig_of(rigs)
    rig.cache.detach_storage(0.0)
    now = rig.tiers.identity
    before = replace(now, **change)  # type: ignore[arg-type]
    store = LmdbBackend(tmp_path / "store", before, 4 << 20)
    form = kept_format(before)
    keys = page_digests(before.seed(), PrefixKey.of(A).data, before.layout.page_size)
    pages = [memoryview(bytearray(form.page_bytes)) for _ in keys]
    assert store.write([PageRun(keys, pages, None)]) == [len(keys)]
    store.close()
    rig.cache.attach_storage(rig.storage_tier(RecoveringBackend(lambda: LmdbBackend(tmp_path / "store", now, 4 << 20))))
    found = why(rig, Tier.STORAGE)
    assert (found.reason, found.tokens) == (Reason.NAMESPACE, 0)
    said = {"revision": "revision '2', not None", "layout": "layout.page_size 4, not 2"}
    assert f"the store has the same tokens for {said[next(iter(change))]}" == found.text
    assert why(rig, Tier.STORAGE, [50, 51, 52, 53]).reason is Reason.NEVER_STORED
    rig.cache.detach_storage(0.0)


def test_below_the_threshold_of_a_host_copy(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, device_pages=8, host_write=WritePolicy("write_through_selective", 2))
    serve_all(rig, [A, *others(3)])
    found = why(rig, Tier.HOST)
    assert found.reason is Reason.BELOW_THRESHOLD and "write_through_selective" in found.text


def test_below_the_threshold_of_admission(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, device_pages=8, host_pages=8, admission=AdmissionPolicy("hits", 3))
    serve_all(rig, [A, *others(6)])
    found = why(rig, Tier.STORAGE)
    assert found.reason is Reason.BELOW_THRESHOLD and "admission hits, min_hits 3" in found.text


def test_below_the_threshold_of_a_prefetch(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, device_pages=8, host_pages=8, storage_pages=64, prefetch=PrefetchPolicy("timeout", 1.0, 5))
    serve_all(rig, [A, *others(5)])
    rig.cache.prefetch("r", PrefixKey.of([*A, 9, 10, 11, 12]))
    rig.settle()
    found = why(rig, Tier.STORAGE, [*A, 9, 10, 11, 12])
    assert (found.reason, found.tokens) == (Reason.BELOW_THRESHOLD, 0) and "min_pages" in found.text


def test_a_load_to_the_device_failed(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, device_pages=8, host_pages=16, storage_pages=0)
    serve_all(rig, [A, *others(2)])
    assert why(rig, Tier.DEVICE).reason is Reason.EVICTED
    rig.now = 7.0
    rig.h2d.fail_next()
    match = rig.cache.match_prefix(PrefixKey.of(A))
    load = rig.cache.init_load_back(match)
    assert load is not None
    rig.settle()
    rig.cache.unlock(load.receipt)
    found = why(rig, Tier.DEVICE)
    assert (found.reason, found.at) == (Reason.LOAD_FAILED, 7.0) and "the copy from the host failed" in found.text


def test_a_prefetch_failed(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, device_pages=8, host_pages=8, storage_pages=64)
    serve_all(rig, [A, *others(5)])
    rig.now = 9.0
    assert rig.backend is not None
    rig.backend.failing_loads = 1
    rig.cache.prefetch("r", PrefixKey.of(A))
    rig.settle()
    found = why(rig, Tier.STORAGE)
    assert found.reason in (Reason.LOAD_FAILED, Reason.OUT_OF_SERVICE), found


def test_a_prefetch_came_too_late(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, device_pages=8, host_pages=8, storage_pages=64)
    serve_all(rig, [A, *others(5)])
    rig.cache.prefetch("r", PrefixKey.of(A))
    rig.now += 5.0
    assert rig.cache.prefetch_ready("r")
    found = why(rig, Tier.STORAGE)
    assert found.reason is Reason.LOAD_FAILED and "cut short by its deadline" in found.text
    assert "8 more tokens are stored" in found.text


def test_what_the_store_did_not_take_is_said(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, device_pages=8, host_pages=8, storage_pages=64)
    assert rig.backend is not None
    rig.backend.failing_stores = 1000
    serve_all(rig, [A, *others(5)])
    found = why(rig, Tier.STORAGE)
    assert found.reason is Reason.NEVER_STORED and "without being stored: " in found.text
    assert why(rig, Tier.HOST).reason is Reason.EVICTED


def test_what_had_no_room_on_the_host_is_said(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, device_pages=8, host_pages=0, storage_pages=0, host_write=WritePolicy("write_back"))
    serve_all(rig, [A, *others(3)])
    assert why(rig, Tier.DEVICE).text.endswith("discarded: no_lower_tier")


def test_on_its_way(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, device_pages=8, host_pages=16)
    serve_all(rig, [A, *others(2)])
    load = rig.cache.init_load_back(rig.cache.match_prefix(PrefixKey.of(A)))
    assert load is not None
    assert why(rig, Tier.DEVICE).reason is Reason.ON_ITS_WAY
    rig.settle()
    rig.cache.unlock(load.receipt)
    assert why(rig, Tier.DEVICE).reason is Reason.COMPLETE


def test_flushed(rigs: list[Rig]) -> None:
    rig = rig_of(rigs)
    serve_all(rig, [A])
    rig.now = 4.0
    assert rig.cache.flush().flushed
    for tier in Tier:
        found = why(rig, tier)
        assert (found.reason, found.at) == (Reason.FLUSHED, 4.0), found


def test_what_a_flush_of_the_device_cut_off_is_flushed_too(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, storage_pages=0)
    serve_all(rig, [A])
    tree = rig.tiers.tree
    (lower,) = tree.nodes()
    upper = tree.split(lower, 2)
    rig.tiers.free_device(tree.drop_device(lower))
    rig.tiers.free_host(tree.drop_host(upper))
    rig.now = 4.0
    assert rig.cache.flush([Tier.DEVICE]).flushed
    serve_all(rig, [A[:4]])
    found = why(rig, Tier.HOST)
    assert (found.tokens, found.reason, found.at) == (4, Reason.FLUSHED, 4.0)


def test_what_fell_out_of_the_log_is_said(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, log_size=3, device_pages=8, host_pages=0, storage_pages=0)
    serve_all(rig, [A])
    for at, prompt in enumerate(others(8)):
        rig.now = float(at)
        serve_all(rig, [prompt])
    found = why(rig, Tier.DEVICE)
    assert found.reason is Reason.OLDER_THAN_LOG and "before the log begins at" in found.text
    assert len(rig.tiers.decisions) == 3


def test_without_a_log_it_says_so(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, log_size=0, device_pages=8, host_pages=0, storage_pages=0)
    serve_all(rig, [A, *others(3)])
    found = why(rig, Tier.DEVICE)
    assert found.reason is Reason.OLDER_THAN_LOG and "decision_log: 0" in found.text


def test_asking_changes_nothing(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, device_pages=8, host_pages=8)
    serve_all(rig, [A, *others(3)])
    before = [(node.key, node.tick, node.hits) for node in rig.tiers.tree.nodes()]
    for prompt in [A, A[:5], *others(3), [*others(1)[0][:4], 1, 2]]:
        rig.cache.why(PrefixKey.of(prompt))
    assert [(node.key, node.tick, node.hits) for node in rig.tiers.tree.nodes()] == before


def test_the_explanation_as_plain_data(rigs: list[Rig]) -> None:
    rig = rig_of(rigs)
    serve_all(rig, [A])
    data = rig.cache.why(PrefixKey.of([*A, 9])).to_json()
    assert data["tokens"] == 9
    assert data["tiers"][0] == {
        "tier": "device",
        "match_tokens": 8,
        "reason": "page not aligned",
        "text": "only whole pages are shared: the last 1 tokens are less than 2",
        "at": None,
    }
    assert isinstance(rig.backend, MemoryBackend)
