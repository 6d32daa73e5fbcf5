"""The storage backend by itself, over SGLang's own host pools: what its controller asks for, and mistakes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_cache import HEAD_DIM, HEADS, LAYERS, PAGE, DevicePool, HostPool, Ranks, host_pool, place
from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

from hicache.errors import ConfigError
from hicache.host_pool import arena
from hicache.integrations.sglang import HiCacheLMDBStorage
from hicache.integrations.sglang.page_forms import SCRATCH_BYTES

KEYS = [f"{number:064x}" for number in range(8)]
MakeStorage = Callable[..., Any]


def mha(layout: str = "page_first", pages: int = 16, layers: int = LAYERS, kind: type[HostPool] = HostPool) -> HostPool:
    place(Ranks())
    pool = host_pool(DevicePool(PAGE, torch.float32, (layers, HEADS, HEAD_DIM)), layout, pages, kind)
    fill(pool)
    return pool


class GivesCopies(HostPool):
    """As pools of states, whose pages are put together from several tensors."""

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return super().get_data_page(index, flat).clone()


class MLAHost(MLATokenToKVPoolHost):
    """Only the memory is used here."""


def mla(layout: str = "page_first", pages: int = 16, rank: int = 512, rope: int = 64) -> MLAHost:
    place(Ranks())
    rows = [torch.zeros(PAGE, 1, rank + rope) for _ in range(LAYERS)]
    info = MLABufferInfo(
        buffers=tuple(rows), data_ptrs=torch.zeros(LAYERS, dtype=torch.uint64), layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS, page_size=PAGE, kv_lora_rank=rank, qk_rope_head_dim=rope, kv_cache_dim=rank + rope,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    pool = MLAHost(
        info, 1.0, 0, PAGE, layout, pin_memory=False, device="cpu", device_capacity_tokens=PAGE, start_layer=0,
        end_layer=LAYERS, target_layer_num=LAYERS, host_token_capacity=pages * PAGE,
    )  # fmt: skip
    fill(pool)
    return pool


def fill(pool: Any, seed: int = 0) -> None:
    pool.kv_buffer.view(torch.uint8).random_(0, 255, generator=torch.Generator().manual_seed(seed))


def pages_of(pool: Any, slots: list[int]) -> list[torch.Tensor]:
    """Bytes of these pages, whatever the layout."""
    return [pool.get_data_page(slot * PAGE, flat=True).view(torch.uint8).clone() for slot in slots]


def indices(slots: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(slot * PAGE, (slot + 1) * PAGE) for slot in slots])


def config(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> HiCacheStorageConfig:
    fields: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "m",
    }  # fmt: skip
    extra = {"path": str(folder), "size": "256MiB", **(changes or {})}
    return HiCacheStorageConfig(**{**fields, **options}, extra_config=extra)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[MakeStorage]:
    made = []

    def make(pool: Any, changes: dict[str, Any] | None = None, **options: Any) -> HiCacheLMDBStorage:
        made.append(HiCacheLMDBStorage(config(tmp_path / "store", changes, **options), {}))
        made[-1].register_mem_pool_host(pool)
        made[-1].register_mem_host_pool_v2(pool, PoolName.KV)
        made[-1].on_host_pools_registered()
        return made[-1]

    yield make
    for each in made:
        each.close()


# ---- pages ----------------------------------------------------------------------------------------

POOLS = [
    pytest.param(lambda: mha("page_first"), True, id="mha page_first"),
    pytest.param(lambda: mha("page_first_direct"), True, id="mha page_first_direct"),
    pytest.param(lambda: mha("page_head"), True, id="mha page_head"),
    pytest.param(lambda: mha("layer_first"), False, id="mha layer_first"),
    pytest.param(lambda: mha("layer_first", layers=2), False, id="mha layer_first, few runs in another order"),
    pytest.param(lambda: mha(kind=GivesCopies), False, id="mha, copies of pages"),
    pytest.param(lambda: mla("page_first"), True, id="mla page_first"),
    pytest.param(lambda: mla("layer_first"), True, id="mla layer_first, as many layers as parts"),
    pytest.param(lambda: mla("page_first", rank=500, rope=63), False, id="mla, pages not of whole blocks"),
]


@pytest.mark.parametrize("make, in_place", POOLS)
def test_pages_come_back_to_other_slots(storage: MakeStorage, make: Callable[[], Any], in_place: bool) -> None:
    pool = make()
    one = storage(pool)
    assert one._stores["kv"].form.in_place is in_place
    truth = pages_of(pool, [3, 1, 4, 15])
    assert one.batch_set_v1(KEYS[:4], indices([3, 1, 4, 15])) == [True] * 4
    fill(pool, seed=1)
    others = pages_of(pool, list(range(5, 15)))
    assert one.batch_get_v1(KEYS[:4], indices([0, 2, 3, 1])) == [True] * 4
    assert all(map(torch.equal, pages_of(pool, [0, 2, 3, 1]), truth))
    assert all(map(torch.equal, pages_of(pool, list(range(5, 15))), others))


@pytest.mark.parametrize("make, in_place", POOLS)
def test_flat_tensors(storage: MakeStorage, make: Callable[[], Any], in_place: bool) -> None:
    """interface_v1: 0: what one interface writes the other reads."""
    pool = make()
    one = storage(pool)
    values = [pool.get_data_page(slot * PAGE, flat=True) for slot in range(4)]
    truth = pages_of(pool, [0, 1, 2, 3])
    assert one.batch_set(KEYS[:4], values)
    targets = [torch.zeros_like(value) for value in values]
    found = one.batch_get(KEYS[:4], targets)
    assert all(given is target for given, target in zip(found, targets))
    assert all(torch.equal(each.view(torch.uint8), page) for each, page in zip(found, truth))
    assert torch.equal(one.get(KEYS[2]).view(torch.uint8), truth[2])
    fill(pool, seed=1)
    assert one.batch_get_v1(KEYS[:4], indices([8, 9, 10, 11])) == [True] * 4
    assert all(map(torch.equal, pages_of(pool, [8, 9, 10, 11]), truth))


def test_more_pages_than_scratch_holds(storage: MakeStorage) -> None:
    pool = mha("layer_first", pages=2 * SCRATCH_BYTES // (2 * LAYERS * PAGE * HEADS * HEAD_DIM * 4) + 3)
    one = storage(pool)
    count = pool.page_num
    assert count > one._stores["kv"].scratch.pages
    keys = [f"{number:064x}" for number in range(count)]
    slots = list(range(count))
    truth = pages_of(pool, slots)
    assert all(one.batch_set_v1(keys, indices(slots)))
    pool.kv_buffer.zero_()
    assert all(one.batch_get_v1(keys, indices(slots)))
    assert all(map(torch.equal, pages_of(pool, slots), truth))


def test_scratch_where_huge_pages_are_off(
    storage: MakeStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(arena, "_THP", setting)
    pool = mha("layer_first")
    one = storage(pool)
    truth = pages_of(pool, [3, 1])
    assert one.batch_set_v1(KEYS[:2], indices([3, 1])) == [True] * 2
    pool.kv_buffer.zero_()
    assert one.batch_get_v1(KEYS[:2], indices([3, 1])) == [True] * 2
    assert all(map(torch.equal, pages_of(pool, [3, 1]), truth))


def test_leading_pages_until_the_first_that_is_missing(storage: MakeStorage) -> None:
    one = storage(mha())
    for number in (0, 1, 3):
        assert one.batch_set_v1([KEYS[number]], indices([number])) == [True]
    assert one.batch_exists(KEYS[:4]) == 2
    assert one.batch_exists(KEYS[2:4]) == 0
    assert one.exists(KEYS[3])
    assert one.batch_get_v1(KEYS[:4], indices([8, 9, 10, 11])) == [True, True, False, False]


def test_a_page_that_is_there_is_not_written_again(storage: MakeStorage) -> None:
    pool = mha()
    one = storage(pool)
    truth = pages_of(pool, [0])
    assert one.batch_set_v1(KEYS[:1], indices([0])) == [True]
    assert one.batch_set_v1(KEYS[:2], indices([5, 6])) == [True, True]
    assert one.batch_get_v1(KEYS[:1], indices([9])) == [True]
    assert torch.equal(pages_of(pool, [9])[0], truth[0])


def test_pieces_of_a_chain_in_any_order(storage: MakeStorage) -> None:
    """SGLang stores what its tree has: after a restart a long node may cover pages that are there in pieces."""
    one = storage(mha())
    assert all(one.batch_set_v1(KEYS[4:8], indices([4, 5, 6, 7]), HiCacheStorageExtraInfo(prefix_keys=KEYS[:4])))
    assert one.batch_exists(KEYS) == 0
    assert one.batch_set_v1(KEYS, indices(list(range(8))), HiCacheStorageExtraInfo(prefix_keys=[])) == [True] * 8
    assert one.batch_exists(KEYS) == 8


# ---- several pools --------------------------------------------------------------------------------


def with_states(storage: MakeStorage) -> tuple[Any, HostPool, HostPool]:
    kv, states = mha(), mha("layer_first")
    one = storage(kv)
    one.register_mem_host_pool_v2(states, PoolName.SWA)
    return one, kv, states


def transfer(keys: list[str], slots: list[int], policy: PoolHitPolicy) -> PoolTransfer:
    return PoolTransfer(PoolName.SWA, host_indices=indices(slots) if slots else None, keys=keys, hit_policy=policy)


def test_a_second_pool_under_the_same_keys(storage: MakeStorage) -> None:
    one, _, states = with_states(storage)
    assert all(one.batch_set_v1(KEYS[:4], indices([0, 1, 2, 3])))
    truth = pages_of(states, [6, 7])
    put = transfer(KEYS[2:4], [6, 7], PoolHitPolicy.TRAILING_PAGES)
    assert one.batch_set_v2([put]) == {PoolName.SWA: [True, True]}
    fill(states, seed=1)
    got = one.batch_get_v2([transfer(KEYS[2:4], [1, 2], PoolHitPolicy.TRAILING_PAGES)])
    assert got == {PoolName.SWA: [True, True]}
    assert all(map(torch.equal, pages_of(states, [1, 2]), truth))


@pytest.mark.parametrize(
    "policy, stored, keys, pool_hits, restorable",
    [
        (PoolHitPolicy.ALL_PAGES, [0, 1, 3], 1, 2, [1, 2]),
        (PoolHitPolicy.ALL_PAGES, [1, 2, 3], 1, 0, []),
        (PoolHitPolicy.TRAILING_PAGES, [1, 3], 1, 4, [2, 4]),
        (PoolHitPolicy.TRAILING_PAGES, [1, 2], 2, 3, [3]),
        (PoolHitPolicy.TRAILING_PAGES, [], 1, 0, []),
        (PoolHitPolicy.BLOCK_GROUPS, [0, 1, 2, 3], 1, 0, []),
    ],
)
def test_what_can_be_used_of_both(
    storage: MakeStorage, policy: PoolHitPolicy, stored: list[int], keys: int, pool_hits: int, restorable: list[int]
) -> None:
    one, _, _ = with_states(storage)
    assert all(one.batch_set_v1(KEYS[:4], indices([0, 1, 2, 3])))
    for page in stored:
        one.batch_set_v2([transfer([KEYS[page]], [page], policy)])
    found = one.batch_exists_v2(KEYS[:6], [transfer(KEYS[:keys], [], policy)])
    assert found.kv_hit_pages == max(restorable, default=0)
    assert found.extra_pool_hit_pages.get(PoolName.SWA, 0) == pool_hits
    assert found.extra_pool_hit_pages[PoolName.KV] == 4
    assert found.restorable_prefix_pages == restorable


def test_a_pool_that_nobody_registered_is_a_miss(storage: MakeStorage) -> None:
    one = storage(mha())
    assert all(one.batch_set_v1(KEYS[:2], indices([0, 1])))
    wanted = [transfer(KEYS[:2], [0, 1], PoolHitPolicy.ALL_PAGES)]
    assert one.batch_get_v2(wanted) == one.batch_set_v2(wanted) == {PoolName.SWA: [False, False]}
    assert one.batch_exists_v2(KEYS[:2], wanted).kv_hit_pages == 0


def test_mla_ranks_share_what_is_replicated_and_keep_apart_what_is_not(storage: MakeStorage) -> None:
    ranks = [storage(mla(), is_mla_model=True, tp_rank=number, tp_size=2) for number in range(2)]
    for each in ranks:
        each.register_mem_host_pool_v2(mha(), PoolName.DRAFT)
    assert all(ranks[0].batch_set_v1(KEYS[:2], indices([0, 1])))
    draft = PoolTransfer(PoolName.DRAFT, host_indices=indices([0, 1]), keys=KEYS[:2])
    assert ranks[0].batch_set_v2([draft]) == {PoolName.DRAFT: [True, True]}
    assert [each.batch_exists(KEYS[:2]) for each in ranks] == [2, 2]
    assert [each.batch_exists_v2(KEYS[:2], [draft]).kv_hit_pages for each in ranks] == [2, 0]


# ---- threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_threads_at_once(storage: MakeStorage, layout: str) -> None:
    """As SGLang's: one writes, one reads, one asks; here several of each."""
    pool = mha(layout, pages=64)
    one = storage(pool)
    wrong: list[str] = []

    def work(worker: int) -> None:
        slots = list(range(worker * 8, worker * 8 + 8))
        truth = pages_of(pool, slots)
        for turn in range(8):
            keys = [f"{worker:08x}{turn:08x}{number:048x}" for number in range(8)]
            if not all(one.batch_set_v1(keys, indices(slots))) or one.batch_exists(keys) != 8:
                wrong.append(f"{worker} did not store")
            if not all(one.batch_get_v1(keys, indices(slots[::-1]))):
                wrong.append(f"{worker} did not read")
            truth.reverse()
            if not all(map(torch.equal, pages_of(pool, slots), truth)):
                wrong.append(f"{worker} read other bytes")

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"durabilty": "none"}, "durabilty: unknown key, did you mean 'durability'?"),
        ({"size": 5}, "size: 5: a size needs a unit"),
        ({"size": "100 pages"}, "size: '100 pages': the store is shared by pools and ranks, give bytes"),
        ({"eviction": "lur"}, "eviction: 'lur' is not one of 'lru', 'slru' or 'fifo', did you mean 'lru'?"),
        ({"codec": "fp8"}, "codec: 'fp8' is not one of"),
        ({"ttl": 5}, "ttl: 5: a duration needs a unit"),
    ],
)
def test_a_mistake_in_the_extra_config(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HiCacheLMDBStorage(config(tmp_path, changes), {})
    assert str(caught.value).startswith(f"hicache-storage-backend-extra-config: {message}")
    assert "\n" not in str(caught.value)


def test_a_missing_path(tmp_path: Path) -> None:
    settings = config(tmp_path)
    del settings.extra_config["path"]
    with pytest.raises(ConfigError, match="path: this key is missing"):
        HiCacheLMDBStorage(settings, {})


def test_a_size_too_small_for_the_pages(storage: MakeStorage) -> None:
    with pytest.raises(ConfigError, match="does not hold one batch of 16 pages"):
        storage(mha(), {"size": "2MiB"})


def test_pools_without_pages_are_refused(storage: MakeStorage) -> None:
    with pytest.raises(ConfigError, match="pool 'kv' "):
        storage(LogicalHostPool(4 * PAGE, PAGE))


def test_the_factory_makes_it(tmp_path: Path) -> None:
    settings = config(tmp_path)
    settings.extra_config |= {
        "backend_name": "hicache", "module_path": "hicache.integrations.sglang", "class_name": "HiCacheLMDBStorage",
    }  # fmt: skip
    made = StorageBackendFactory.create_backend("dynamic", settings, mha())
    assert isinstance(made, HiCacheLMDBStorage)
    made.close()


def test_numbers_that_do_not_fit_move_nothing(storage: MakeStorage) -> None:
    one = storage(mha())
    assert one.batch_set_v1(KEYS[:2], indices([0])) == [False, False]
    assert one.batch_get_v1(KEYS[:2], indices([0, 1, 2])) == [False, False]
    assert not one.batch_set(KEYS[:1], [torch.zeros(3)])
    assert one.batch_get(KEYS[:1], [torch.zeros(3)]) == [None]
    assert not one.set(KEYS[0], None)
    assert one.batch_get_v1([], torch.empty(0, dtype=torch.int64)) == []


def test_closed_is_a_miss_and_closing_twice_is_nothing(storage: MakeStorage) -> None:
    one = storage(mha())
    assert all(one.batch_set_v1(KEYS[:2], indices([0, 1])))
    one.close()
    one.close()
    assert one.batch_exists(KEYS[:2]) == 0
    assert one.batch_get_v1(KEYS[:2], indices([0, 1])) == [False, False]
    assert one.batch_set_v1(KEYS[2:4], indices([0, 1])) == [False, False]


def test_a_store_that_cannot_be_opened_now_is_opened_later(
    storage: MakeStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hicache.errors import StoreUnavailableError
    from hicache.integrations.sglang import storage as module

    def refuse(*args: Any) -> Any:
        raise StoreUnavailableError("the disk is away")

    with monkeypatch.context() as patch:
        patch.setattr(module, "LmdbBackend", refuse)
        one = storage(mha())
        assert one.batch_set_v1(KEYS[:2], indices([0, 1])) == [False, False]
    assert one.batch_set_v1(KEYS[:2], indices([0, 1])) == [True, True]
    assert one.batch_exists(KEYS[:2]) == 2


def test_stats(storage: MakeStorage) -> None:
    assert storage(mha()).get_stats() is None
    one = storage(mha(), enable_storage_metrics=True)
    one.batch_set_v1(KEYS[:3], indices([0, 1, 2]))
    one.batch_get_v1(KEYS[:2], indices([0, 1]))
    one.batch_get_v1(KEYS[4:5], indices([0]))
    stats = one.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [2])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert one.get_stats().backup_pgs == []
