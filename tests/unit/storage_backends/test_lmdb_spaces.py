"""Several identities in one store, and slots of several sizes."""

from __future__ import annotations

import logging
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache.hashing import StoreIdentity, page_digests
from hicache.layout import KVLayout
from hicache.storage_backends.base import PageRun
from hicache.storage_backends.budget import ValuesMode
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.lmdb_index import IndexWriter
from hicache.storage_backends.lmdb_open import SLAB_FILE
from hicache.storage_backends.slab import SlabFile
from hicache.testing.audit import audit, disk_bytes
from hicache.testing.storage import IDENTITY, blank_pages, chain, content, read_checked, run_of

LAYOUT = IDENTITY.layout
BUDGET = 4 << 20
WIDE = StoreIdentity(KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, page_size=16), model="wide")
"""Pages of 32 KiB."""
PACKED = replace(WIDE, model="packed", codec="zstd")
MODES: list[ValuesMode] = ["slab", "inline"]

DIFFERENT = [
    replace(IDENTITY, model="another"),
    replace(IDENTITY, revision="1"),
    replace(IDENTITY, weights_digest="0f"),
    replace(IDENTITY, tokenizer_digest="0f"),
    replace(IDENTITY, first_layer=2),
    replace(IDENTITY, tp_rank=1),
    replace(IDENTITY, tp_size=2),
    replace(IDENTITY, pp_rank=1),
    replace(IDENTITY, pp_size=2),
    replace(IDENTITY, attention_backend="other"),
    replace(IDENTITY, rope_scaling="2"),
    replace(IDENTITY, tenant="t"),
    replace(IDENTITY, codec="zstd"),
    replace(IDENTITY, format_version=2),
    replace(IDENTITY, layout=replace(LAYOUT, dtype="bfloat16")),
    replace(IDENTITY, layout=replace(LAYOUT, page_size=16)),
    replace(IDENTITY, layout=replace(LAYOUT, num_layers=1, num_kv_heads=2)),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


def open_store(path: Path, identity: StoreIdentity = IDENTITY, values: ValuesMode = "slab", **more: Any) -> LmdbBackend:
    return LmdbBackend(path, identity, BUDGET, values, **{"durability": "none", **more})


def changed_field(identity: StoreIdentity) -> str:
    return identity.differences(IDENTITY.flat())[0]


# ---- identities -----------------------------------------------------------------------------------


@pytest.mark.parametrize("identity", DIFFERENT, ids=changed_field)
def test_another_identity_is_another_namespace(
    path: Path, identity: StoreIdentity, caplog: pytest.LogCaptureFixture
) -> None:
    """It has none of the pages, under the digests of its own as under those of the other; a line says why."""
    tokens = bytes(range(256))
    keys = page_digests(IDENTITY.seed(), tokens, LAYOUT.page_size)
    store = open_store(path)
    assert store.write([run_of(LAYOUT, keys)]) == [len(keys)]
    store.close()
    with caplog.at_level(logging.INFO):
        other = open_store(path, identity)
    field = changed_field(identity)
    mine, theirs = identity.flat()[field], IDENTITY.flat()[field]
    assert f"{field} is {mine!r} here and {theirs!r} there" in caplog.text
    own = page_digests(identity.seed(), tokens, identity.layout.page_size)
    assert other.contains_prefix(own) == 0
    for digests in (own, keys):
        assert read_checked(other, identity.layout, digests) == 0
    assert other.usage().pages == 0
    assert other.write([run_of(identity.layout, own)]) == [len(own)]
    store = open_store(path)
    assert read_checked(store, LAYOUT, keys) == len(keys)
    assert read_checked(other, identity.layout, own) == len(own)
    audit(store)
    store.close()
    other.close()


def test_the_same_identity_is_the_same_namespace(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = open_store(path)
    with caplog.at_level(logging.INFO):
        second = open_store(path, replace(IDENTITY))
    assert first._number == second._number
    assert not caplog.records
    first.close()
    second.close()


def test_namespaces_without_pages_are_forgotten(path: Path) -> None:
    """Not while anybody has the store open. Their numbers are used again."""
    for model in ("a", "b", "c"):
        open_store(path, replace(IDENTITY, model=model)).close()
    store = open_store(path)
    assert [label["model"] for label in store._store.view(lambda view: view.labels()).values()] == ["conformance"]
    assert store._number == 1
    store.close()


@pytest.mark.parametrize("values", MODES)
def test_each_namespace_counts_its_own(path: Path, values: ValuesMode) -> None:
    """Pages are a namespace's, bytes the store's."""
    one, two = open_store(path, values=values), open_store(path, WIDE, values)
    one.write([run_of(LAYOUT, chain("a", 7))])
    two.write([run_of(WIDE.layout, chain("b", 3))])
    assert (one.usage().pages, two.usage().pages) == (7, 3)
    assert one.usage().used_bytes == two.usage().used_bytes
    one.delete(chain("a", 7)[4:])
    assert (one.usage().pages, two.usage().pages) == (4, 3)
    assert one.clear() == 4
    assert (one.usage().pages, two.usage().pages) == (0, 3)
    assert (one.generation(), two.generation()) == (1, 0)
    assert read_checked(two, WIDE.layout, chain("b", 3)) == 3
    audit(one)
    one.close()
    two.close()


# ---- slots of several sizes -----------------------------------------------------------------------


def mixed_run(identity: StoreIdentity, name: str, length: int, rng: random.Random) -> PageRun:
    """Pages that compress well, badly, and not at all."""
    layout, keys = identity.layout, chain(name, length)
    pages = blank_pages(layout, length)
    for key, page in zip(keys, pages):
        noise = rng.choice([0, layout.page_bytes // 3, layout.page_bytes // 2, layout.page_bytes])
        page[: layout.page_bytes] = rng.randbytes(noise) + content(layout, key)[noise:]
    return PageRun(keys, pages, None)


def assert_same(store: LmdbBackend, identity: StoreIdentity, run: PageRun) -> int:
    pages = blank_pages(identity.layout, len(run.keys))
    count = store.read_into(run.keys, pages)
    for page, expected in zip(pages[:count], run.buffers):
        assert page == expected
    return count


@pytest.mark.parametrize("values", MODES)
def test_pages_of_several_sizes_share_a_budget(path: Path, values: ValuesMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen budgets of them. Blocks of one slab are given back where another needs them."""
    rng, most = random.Random(1), [0]
    for name in ("write", "reserve"):
        _sample_after(monkeypatch, SlabFile, name, path, most)
    identities = [IDENTITY, WIDE, PACKED]
    stores = [open_store(path, identity, values) for identity in identities]
    written = number = 0
    while written < 16 * BUDGET:
        turn = rng.choice([0, 1, 2]) if number % 40 < 20 else number // 40 % 3  # phases in which one writes alone
        store, identity = stores[turn], identities[turn]
        run = mixed_run(identity, f"{number}", 16 if identity is not IDENTITY else 64, rng)
        assert store.write([run]) == [len(run.keys)]
        assert assert_same(store, identity, run) == len(run.keys)
        most[0] = max(most[0], disk_bytes(path))
        written += len(run.keys) * identity.layout.page_stride
        number += 1
        if number % 10 == 0:
            audit(store)
    assert BUDGET // 2 < most[0] <= BUDGET
    assert all(store.usage().evicted_pages for store in stores)
    if values == "slab":
        assert len(list(path.glob(f"{SLAB_FILE}-*"))) >= 4
    for store in stores:
        store.close()
    store = open_store(path, PACKED, values)
    audit(store)
    store.close()


def _sample_after(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, path: Path, most: list[int]) -> None:
    real = getattr(owner, name)

    def sampled(*args: Any) -> Any:
        result = real(*args)
        most[0] = max(most[0], disk_bytes(path))
        return result

    monkeypatch.setattr(owner, name, sampled)


def test_blocks_of_free_slots_go_to_whom_needs_them(path: Path) -> None:
    narrow, wide = open_store(path), open_store(path, WIDE)
    slab = path / f"{SLAB_FILE}-{LAYOUT.page_stride}"
    run = run_of(LAYOUT, chain("a", 700))
    count = narrow.write([run])[0]
    before = slab.stat().st_blocks
    for number in range(40):
        assert wide.write([run_of(WIDE.layout, chain(f"{number}", 4))]) == [4]
        audit(wide)
    assert slab.stat().st_blocks < before // 2
    assert narrow.usage().pages < count
    assert disk_bytes(path) <= BUDGET
    narrow.close()
    wide.close()
    blocks = slab.stat().st_blocks
    with open(slab, "r+b") as file:  # as after a kill between the growth of a slab and the commit that says so
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    assert slab.stat().st_blocks > blocks
    narrow = open_store(path)
    assert slab.stat().st_blocks <= blocks
    audit(narrow)
    narrow.close()


@pytest.mark.parametrize("values", MODES)
def test_a_batch_is_an_eighth_of_the_budget_whoever_opened_the_store(
    path: Path, values: ValuesMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was begun for smaller pages."""
    batches: list[int] = []
    insert = IndexWriter.insert

    def note(index: IndexWriter, number: int, pages: Any, *rest: Any) -> None:
        batches.append(len(pages))
        insert(index, number, pages, *rest)

    monkeypatch.setattr(IndexWriter, "insert", note)
    narrow, wide = open_store(path, values=values), open_store(path, WIDE, values)
    long = run_of(WIDE.layout, chain("a", 200))
    assert 0 < wide.write([long])[0] < 200
    assert max(batches) * WIDE.layout.page_stride <= BUDGET // 8
    narrow.close()
    wide.close()


def test_a_failed_batch_gives_no_slot_two_owners(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails after slots were taken, and after blocks went from one slab to another."""
    narrow, wide = open_store(path), open_store(path, WIDE)
    for number in range(14):
        narrow.write([run_of(LAYOUT, chain(f"{number}", 50))])
    insert, left = IndexWriter.insert, [5]

    def fail_late(*args: Any) -> None:
        insert(*args)
        left[0] -= 1
        if left[0] >= 0:
            raise ZeroDivisionError

    monkeypatch.setattr(IndexWriter, "insert", fail_late)
    for number in range(20):
        try:
            wide.write([run_of(WIDE.layout, chain(f"wide {number}", 8))])
        except ZeroDivisionError:
            assert wide.contains_prefix(chain(f"wide {number}", 8)) == 0
        audit(wide)
        assert disk_bytes(path) <= BUDGET
    assert left[0] < 0
    for number in range(14):
        read_checked(narrow, LAYOUT, chain(f"{number}", 50))
    assert narrow.damaged_pages == wide.damaged_pages == 0
    narrow.close()
    wide.close()
