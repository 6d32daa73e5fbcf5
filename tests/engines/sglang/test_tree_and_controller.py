"""SGLang's UnifiedRadixCache (Rust core) and HybridCacheController over our storage: L1, L2, L3 and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_cache import PAGE, Rank, Ranks

from hicache.storage_backends.slab import SlabFile

TOKENS = list(range(5, 5 + 16 * PAGE))
LAYOUTS = ["page_first", "page_first_direct", "layer_first"]

MakeRank = Callable[..., Rank]


def extra(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "backend_name": "hicache",
        "module_path": "hicache.integrations.sglang",
        "class_name": "HiCacheLMDBStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "prefetch_threshold": PAGE,
        "path": str(folder),
        "size": "256MiB",
        **changes,
    }


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[MakeRank]:
    """Makes ranks over one folder; `close` them, or the test's end does."""
    made: list[Rank] = []

    def make(changes: dict[str, Any] | None = None, **options: Any) -> Rank:
        made.append(Rank(extra(tmp_path / "store", **(changes or {})), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def equal(found: list[torch.Tensor], truth: list[torch.Tensor], tokens: int) -> bool:
    return all(torch.equal(a, b[:tokens]) for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("interface", [0, 1])
def test_from_device_to_disk_and_back(rank: MakeRank, layout: str, interface: int, core: str) -> None:
    one = rank({"interface_v1": interface}, layout=layout, core=core)
    truth = one.compute(TOKENS)
    one.forget()
    assert one.match(TOKENS).host_hit_length == 0
    assert one.prefetch(TOKENS) == len(TOKENS)
    assert one.match(TOKENS).host_hit_length == len(TOKENS)
    assert equal(one.load_back(TOKENS), truth, len(TOKENS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_dtypes(rank: MakeRank, dtype: torch.dtype) -> None:
    one = rank(dtype=dtype)
    truth = one.compute(TOKENS)
    one.forget()
    assert one.prefetch(TOKENS) == len(TOKENS)
    found = one.load_back(TOKENS)
    assert equal([each.view(torch.uint8) for each in found], [each.view(torch.uint8) for each in truth], len(TOKENS))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_restart_finds_the_pages(rank: MakeRank, layout: str) -> None:
    one = rank(layout=layout)
    truth = one.compute(TOKENS)
    one.close()
    two = rank(layout=layout)
    assert two.prefetch(TOKENS) == len(TOKENS)
    assert equal(two.load_back(TOKENS), truth, len(TOKENS))


def test_pages_written_flat_are_read_in_place_and_back(rank: MakeRank) -> None:
    flat = rank({"interface_v1": 0})
    truth = flat.compute(TOKENS)
    in_place = rank({"interface_v1": 1})
    assert in_place.prefetch(TOKENS) == len(TOKENS)
    assert equal(in_place.load_back(TOKENS), truth, len(TOKENS))
    more = [token + 10_000 for token in TOKENS]
    truth = in_place.compute(more, seed=1)
    assert flat.prefetch(more) == len(TOKENS)
    assert equal(flat.load_back(more), truth, len(TOKENS))


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_codecs(rank: MakeRank, codec: str) -> None:
    pytest.importorskip("zstandard" if codec == "zstd" else "lz4")
    one = rank({"codec": codec})
    truth = one.compute(TOKENS)
    one.forget()
    assert one.prefetch(TOKENS) == len(TOKENS)
    assert equal(one.load_back(TOKENS), truth, len(TOKENS))


# ---- damage ---------------------------------------------------------------------------------------


def slabs(folder: Path) -> list[Path]:
    return sorted((folder / "store").glob("*.slab")) or sorted((folder / "store").glob("slab*"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flipped_bit_is_a_miss_of_that_page(rank: MakeRank, layout: str, tmp_path: Path) -> None:
    one = rank(layout=layout)
    truth = one.compute(TOKENS)
    one.forget()
    store = one.storage._stores["kv"]
    keys = page_keys(one)
    assert store.backend._opened.backend.flip_byte(store._part_key(keys[5], store.form.parts - 1))
    assert one.prefetch(TOKENS) == 5 * PAGE
    assert equal(one.load_back(TOKENS), truth, 5 * PAGE)
    assert one.storage.batch_exists(keys) == 5  # the bad page is gone, with what could not be reached without it


def test_a_page_that_was_damaged_is_stored_again(rank: MakeRank) -> None:
    one = rank()
    one.compute(TOKENS)
    keys = page_keys(one)
    store = one.storage._stores["kv"]
    assert store.backend._opened.backend.flip_byte(store._part_key(keys[5], 0))
    one.forget()
    assert one.prefetch(TOKENS) == 5 * PAGE
    one.cache.reset()
    one.forget()
    truth = one.compute(TOKENS, seed=2)[0][5 * PAGE :]
    one.forget()
    assert one.prefetch(TOKENS) == len(TOKENS)
    assert torch.equal(one.load_back(TOKENS)[0][5 * PAGE :], truth)


def test_a_truncated_store_is_a_miss(rank: MakeRank, tmp_path: Path) -> None:
    one = rank()
    truth = one.compute(TOKENS)
    one.forget()
    (slab,) = slabs(tmp_path)
    part = one.storage._stores["kv"].form.part_bytes
    os.truncate(slab, 7 * part + 100)  # three pages of two parts are whole
    assert one.prefetch(TOKENS) == 3 * PAGE
    assert equal(one.load_back(TOKENS), truth, 3 * PAGE)


def test_a_full_disk_is_a_page_that_is_not_stored(rank: MakeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    one = rank()

    def full(*args: Any) -> int:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        one.compute(TOKENS)
        one.forget()
        assert one.prefetch(TOKENS) == 0
    assert one.storage._stores["kv"].failures == {"write_disk_full": 1}
    more = [token + 10_000 for token in TOKENS]
    truth = one.compute(more)
    one.forget()
    assert one.prefetch(more) == len(more)
    assert equal(one.load_back(more), truth, len(more))


def test_a_disk_that_fails_to_read_is_a_miss_and_left_alone(rank: MakeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    one = rank()
    one.compute(TOKENS)
    one.forget()
    calls = []

    def broken(self: SlabFile, *args: Any) -> None:
        calls.append(1)
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(SlabFile, "read", broken)
    for number in range(6):
        assert one.prefetch(TOKENS, f"request {number}") == 0
    assert one.storage._stores["kv"].failures == {"read_io_error": 3}
    assert len(calls) == 3


# ---- whose pages ----------------------------------------------------------------------------------


def page_keys(one: Rank, tokens: list[int] = TOKENS) -> list[str]:
    from sglang.srt.mem_cache.utils import get_hash_str

    keys, before = [], None
    for start in range(0, len(tokens), PAGE):
        before = get_hash_str(tokens[start : start + PAGE], before)
        keys.append(before)
    return keys


CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"model": "example/other"}),
    ({}, {"dtype": torch.float16}),
    ({}, {"layout": "page_first_direct"}),
    ({}, {"layout": "layer_first"}),
    ({}, {"ranks": Ranks(tp_rank=1, tp_size=2)}),
    ({}, {"ranks": Ranks(tp_rank=0, tp_size=2)}),
    ({}, {"ranks": Ranks(pp_rank=1, pp_size=2)}),
    ({"revision": "abc"}, {}),
    ({"weights_digest": "abc"}, {}),
    ({"tenant": "a"}, {}),
    ({"attention_backend": "fa3"}, {}),
]


@pytest.mark.parametrize("config, options", CHANGES)
def test_another_identity_is_a_miss(rank: MakeRank, config: dict[str, Any], options: dict[str, Any]) -> None:
    one = rank()
    one.compute(TOKENS)
    keys = page_keys(one)
    assert one.storage.batch_exists(keys) == 16
    two = rank(config, **options)
    assert two.storage.batch_exists(keys) == 0
    assert two.prefetch(TOKENS) == 0


def test_two_ranks_do_not_mix(rank: MakeRank) -> None:
    ranks = [rank(ranks=Ranks(tp_rank=number, tp_size=2)) for number in range(2)]
    truths = [each.compute(TOKENS, seed=number) for number, each in enumerate(ranks)]
    for each, truth in zip(ranks, truths, strict=True):
        each.forget()
        assert each.prefetch(TOKENS) == len(TOKENS)
        assert equal(each.load_back(TOKENS), truth, len(TOKENS))


def test_clear_takes_only_what_is_ours(rank: MakeRank) -> None:
    one, other = rank(), rank(model="example/other")
    one.compute(TOKENS)
    other.compute(TOKENS, seed=1)
    keys = page_keys(one)
    assert one.cache.clear_storage_backend()
    assert one.storage.batch_exists(keys) == 0
    assert other.storage.batch_exists(keys) == 16
    other.forget()
    assert other.prefetch(TOKENS) == len(TOKENS)


# ---- room -----------------------------------------------------------------------------------------


def test_a_small_store_keeps_prefixes_longest(rank: MakeRank) -> None:
    """With prefix keys a page outlives what comes after it, whatever else is written."""
    one = rank({"size": "12MiB"})
    system = TOKENS[: 4 * PAGE]
    one.compute(system)
    for number in range(12):
        chat = [*system, *range(20_000 + 1000 * number, 20_000 + 1000 * number + 8 * PAGE)]
        one.compute(chat, seed=number)
        one.cache.evict(one_request(len(chat)))
    usage = one.storage._stores["kv"].backend.usage()
    assert usage.evicted_pages > 0
    assert usage.used_bytes <= 12 << 20
    assert one.storage.batch_exists(page_keys(one, system)) == 4


def one_request(tokens: int) -> Any:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    return EvictParams(num_tokens=tokens)
