"""The operator's tools: what they find, what they leave alone, and what is left when they are killed."""

from __future__ import annotations

import io
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache.errors import ConfigError, StoreCorruptError, StoreUnavailableError
from hicache.hashing import StoreIdentity
from hicache.storage_backends import lmdb_compact, lmdb_rewrite
from hicache.storage_backends.budget import ValuesMode
from hicache.storage_backends.lmdb_audit import audit
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.lmdb_compact import compact
from hicache.storage_backends.lmdb_env import DATA_FILE
from hicache.storage_backends.lmdb_exchange import MAGIC, FrameReader
from hicache.storage_backends.lmdb_export import Exported, export_pages
from hicache.storage_backends.lmdb_import import Imported, import_pages, plan_for, space_forms
from hicache.storage_backends.lmdb_open import SESSION_FILE
from hicache.storage_backends.lmdb_opening import close_store, open_existing, open_store
from hicache.storage_backends.lmdb_stat import describe
from hicache.storage_backends.lmdb_store import Store
from hicache.storage_backends.lmdb_verify import check_pages, check_structure
from hicache.storage_backends.slab import SlabFile
from hicache.testing.processes import exit_code, forked
from hicache.testing.storage import IDENTITY, chain, filled_pages, read_checked, run_of

LAYOUT = IDENTITY.layout
BUDGET = 8 << 20
MODES: list[ValuesMode] = ["slab", "inline"]
OTHER = replace(IDENTITY, model="other", tp_rank=1, tp_size=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


def backend(path: Path, identity: StoreIdentity = IDENTITY, budget: int = BUDGET, **options: Any) -> LmdbBackend:
    return LmdbBackend(path, identity, budget, **options)


def fill(path: Path, chains: int = 30, **options: Any) -> None:
    """Chains of 10 pages, "0" to "29", the later ones used later; "fork" hangs below the middle of "3"."""
    store = backend(path, **options)
    for number in range(chains):
        assert store.write([run_of(LAYOUT, chain(str(number), 10))]) == [10]
    assert store.write([run_of(LAYOUT, chain("fork", 4), chain("3", 10)[4])]) == [4]
    store.close()


def scatter(path: Path) -> int:
    """Leave every third chain; returns the number of pages."""
    store = backend(path)
    for number in range(30):
        if number % 3:
            store.delete(chain(str(number), 10)[:1])
    pages = store.usage().pages
    store.close()
    return pages


def readable(path: Path, names: Sequence[str], **options: Any) -> list[int]:
    store = backend(path, **options)
    counts = [read_checked(store, LAYOUT, chain(name, 10)) for name in names]
    store.close()
    return counts


class opened:
    """An existing store for the length of a block."""

    def __init__(self, path: Path) -> None:
        self._store = open_existing(path)

    def __enter__(self) -> Store:
        return self._store

    def __exit__(self, *_: object) -> None:
        close_store(self._store)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "lock.mdb"}


# ---- stat -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", MODES)
def test_stat_counts_what_is_there(path: Path, values: ValuesMode) -> None:
    fill(path, values=values)
    other = backend(path, OTHER, values=values, eviction="slru", ttl=3600.0, quota_bytes=1 << 20)
    other.write([run_of(LAYOUT, chain("other", 7))])
    with opened(path) as store:
        report = describe(store)
    assert report.values == values
    assert report.open_elsewhere
    assert (report.session, report.durability) == ("open", "batch")
    first, second = report.spaces
    assert (first.pages, first.chains, first.policy, first.ttl_s, first.quota_bytes) == (304, 31, "lru", None, None)
    assert (second.pages, second.chains, second.policy, second.ttl_s) == (7, 1, "slru", 3600.0)
    assert second.label["tp_rank"] == 1
    assert first.oldest_age_s is not None and first.newest_age_s is not None
    assert 0 <= first.newest_age_s <= first.oldest_age_s < 60
    assert report.live_bytes == first.live_bytes + second.live_bytes
    assert report.disk_bytes <= report.budget_bytes == BUDGET
    assert 0 < report.index_bytes <= report.index_disk_bytes <= report.map_bytes
    if values == "slab":
        (slab,) = report.slabs
        assert (slab.slot_bytes, slab.used) == (4096, 311)
        assert report.free_bytes == 4096 * (slab.backed - slab.used)
        assert slab.disk_bytes == report.disk_bytes - report.index_disk_bytes
    other.close()
    with opened(path) as store:
        assert describe(store).session == "clean"


def test_stat_shows_holes_and_free_extents(path: Path) -> None:
    fill(path)
    scatter(path)
    with opened(path) as store:
        (slab,) = describe(store).slabs
    assert slab.free_extents > 5


@pytest.mark.parametrize("durability", ["none", "batch"])
def test_looking_leaves_no_trace(path: Path, durability: str) -> None:
    """Also in a store that was not closed in order."""

    def work() -> None:
        store = backend(path, durability=durability)
        store.write([run_of(LAYOUT, chain("a", 10))])
        os._exit(0)

    assert exit_code(work) == 0
    before = contents(path)
    with opened(path) as store:
        report = describe(store)
        assert (report.session, report.durability) == ("unclean", durability)
        assert not report.open_elsewhere
        assert check_pages(store).pages == 10
        assert export_pages(store, io.BytesIO(), [1]).pages == 10
    assert contents(path) == before


def test_a_tool_that_outlives_the_engine_ends_its_session(path: Path) -> None:
    def work(pipe: Any) -> None:
        engine = backend(path, durability="none")
        pipe.send("open")
        pipe.recv()
        engine.close()
        pipe.send("closed")

    with forked(work) as engine:
        assert engine.receive() == "open"
        with opened(path):
            assert engine.ask("end") == "closed"
            assert '"clean": false' in (path / SESSION_FILE).read_text()
    assert '"clean": true' in (path / SESSION_FILE).read_text()


def test_damage_is_met_without_a_mark(path: Path) -> None:
    fill(path)
    before = contents(path)
    with opened(path) as store, pytest.raises(StoreCorruptError):
        store.view(_raise_corrupt)
    assert contents(path) == before


def _raise_corrupt(view: object) -> None:
    raise StoreCorruptError("a record is damaged")


# ---- verify ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", MODES)
def test_verify_finds_damaged_pages_and_changes_nothing(path: Path, values: ValuesMode) -> None:
    fill(path, values=values)
    store = backend(path, OTHER, values=values)
    store.write([run_of(LAYOUT, chain("other", 7))])
    for key in (chain("5", 10)[3], chain("9", 10)[9]):
        assert store.flip_byte(key)
    store.close()
    before = contents(path)
    with opened(path) as tool:
        done = check_pages(tool)
        assert audit(tool) == []
    assert (done.pages, done.nbytes) == (311, 311 * LAYOUT.page_bytes)
    assert done.damaged == {1: 2}
    assert contents(path) == before
    assert check_structure(path)
    with opened(path) as tool:
        done = check_pages(tool, remove=True)
        assert (done.damaged, done.removed) == ({1: 2}, 8)
        assert check_pages(tool).damaged == {}
        assert audit(tool) == []


def test_verify_reads_in_the_order_of_the_slab(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(path)
    seen: list[int] = []
    monkeypatch.setattr("hicache.storage_backends.lmdb_verify.SORTED_PAGES", 64)
    monkeypatch.setattr("hicache.storage_backends.lmdb_verify.SNAPSHOT_PAGES", 16)
    monkeypatch.setattr("hicache.storage_backends.lmdb_verify.READ_BYTES", 8 * 4096)
    read = SlabFile.read
    monkeypatch.setattr(SlabFile, "read", lambda self, slots, pages: (seen.extend(slots), read(self, slots, pages)))
    steps: list[int] = []
    with opened(path) as store:
        done = check_pages(store, lambda pages, nbytes: steps.append(pages))
    assert done.pages == 304
    assert done.damaged == {}
    assert seen == sorted(seen)
    assert len(seen) == 304
    assert steps == sorted(steps) and len(steps) >= 304 // 8


def test_a_slab_that_is_missing_is_damage_and_stays_missing(path: Path) -> None:
    fill(path)
    (path / "slab-4096").unlink()
    with opened(path) as store:
        assert check_pages(store).damaged == {1: 304}
    assert not (path / "slab-4096").exists()


def test_pages_that_move_meanwhile_are_not_damaged(path: Path) -> None:
    """An engine in another process evicts all the time."""

    def work(pipe: Any) -> None:
        engine = backend(path, budget=2 << 20, durability="none")
        pipe.send("open")
        number = 0
        while not pipe.poll(0):
            engine.write([run_of(LAYOUT, chain(f"busy {number}", 30))])
            number += 1
        pipe.recv()
        pipe.send(engine.usage().evicted_pages)
        engine.close()

    with forked(work) as engine:
        assert engine.receive() == "open"
        with opened(path) as store:
            assert describe(store).open_elsewhere
            until = time.monotonic() + 1
            while time.monotonic() < until:
                assert check_pages(store).damaged == {}
                assert export_pages(store, io.BytesIO(), [1]).damaged == 0
        assert not check_structure(path)
        assert engine.ask("end") > 1000


# ---- clear and import, beside an engine -----------------------------------------------------------


def test_an_engine_goes_on_beside_a_clear_and_an_import(path: Path) -> None:
    fill(path)
    data, _ = exported(path)

    def work(pipe: Any) -> None:
        engine = backend(path)
        late = run_of(LAYOUT, chain("late", 5))
        late = type(late)(late.keys, late.buffers, None, engine.generation())
        pipe.send(engine.generation())
        pipe.recv()
        assert engine.usage().pages == 0
        assert engine.write([late]) == [0]
        assert engine.write([run_of(LAYOUT, chain("new", 10))]) == [10]
        pipe.send(engine.generation())
        pipe.recv()
        assert read_checked(engine, LAYOUT, chain("29", 10)) == 10
        assert read_checked(engine, LAYOUT, chain("new", 10)) == 10
        pipe.send(engine.usage().pages)
        engine.close()

    with forked(work) as engine:
        before = engine.receive()
        with opened(path) as store:
            assert store.clear(1) == (304, 304 * 4096)
            assert engine.ask("cleared") == before + 1
        reader = FrameReader(io.BytesIO(data), "file")
        forms = space_forms(reader.header())
        with opened(path) as store:
            assert import_pages(store, reader, forms).stored == 304
        assert engine.ask("imported") == 314
    with opened(path) as store:
        assert audit(store) == []
        assert check_pages(store).damaged == {}


# ---- compact --------------------------------------------------------------------------------------


def test_compact_makes_the_files_small(path: Path) -> None:
    fill(path)
    pages = scatter(path)
    done = compact(path)
    assert done.moved > 0
    extent_blocks = 16 << 10  # of the file system, where the slab has many extents
    assert done.files["slab-4096"].after <= pages * 4096 + extent_blocks < done.files["slab-4096"].before
    assert done.files[DATA_FILE].after < done.files[DATA_FILE].before
    assert (path / "slab-4096").stat().st_size == pages * 4096
    _check_compacted(path, pages)
    assert compact(path).moved == 0
    store = backend(path)
    assert store.write([run_of(LAYOUT, chain("new", 100))]) == [100]
    store.close()
    with opened(path) as tool:
        assert audit(tool) == []


def test_compact_inline_values(path: Path) -> None:
    fill(path, values="inline")
    store = backend(path, values="inline")
    for number in range(20):
        store.delete(chain(str(number), 10)[:1])
    store.close()
    done = compact(path)
    assert done.files[DATA_FILE].after < done.files[DATA_FILE].before * 2 // 3
    assert readable(path, [str(number) for number in range(20, 30)], values="inline") == [10] * 10


def test_compact_moves_pages_of_several_sizes(path: Path) -> None:
    pytest.importorskip("zstandard")
    layout = replace(LAYOUT, head_dim=1024)
    identity = replace(IDENTITY, layout=layout, codec="zstd")
    keys = [chain(f"{number}", 6) for number in range(12)]
    store = backend(path, identity, 32 << 20)
    for number, each in enumerate(keys):
        pages = filled_pages(layout, each)
        if number % 2:
            for page in pages:
                page[: layout.page_bytes] = random.Random(number).randbytes(layout.page_bytes)
        store.write([type(run_of(layout, []))(each, pages, None)])
    for each in keys[2:8]:
        store.delete(each[:1])
    store.close()
    done = compact(path)
    assert done.moved > 0
    assert len(done.files) == 3
    with opened(path) as tool:
        assert audit(tool) == []
        checked = check_pages(tool)
        assert (checked.pages, checked.damaged) == (36, {})


@pytest.mark.parametrize("step", [1, 2, 3, 5, 8])
def test_a_compaction_that_is_killed_between_two_steps_leaves_a_whole_store(
    path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path)
    pages = scatter(path)
    monkeypatch.setattr(lmdb_compact, "COPY_BYTES", 4 * 4096)

    def work() -> None:
        steps = iter(range(step))
        compact(path, lambda done, total: None if next(steps, None) is not None else _die())

    assert exit_code(work) == -signal.SIGKILL
    _check_compacted(path, pages)
    compact(path)
    assert (path / "slab-4096").stat().st_size == pages * 4096
    _check_compacted(path, pages)


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        (SlabFile, "sync", 1),
        (SlabFile, "sync", 2),
        (SlabFile, "write", 1),
        (SlabFile, "write", 3),
        (SlabFile, "release", 1),
        (SlabFile, "release", 40),
        (SlabFile, "resize", 2),
        (lmdb_rewrite.os, "replace", 1),
        (lmdb_compact.os, "truncate", 1),
        (lmdb_compact, "rewrite_index", 1),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_compaction_that_is_killed_anywhere_leaves_a_whole_store(
    path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: int, late: bool
) -> None:
    """Before or after the n-th call of what changes a file."""
    fill(path)
    pages = scatter(path)
    real, left = getattr(owner, name), iter(range(calls - 1))

    def deadly(*arguments: Any) -> Any:
        last = next(left, None) is None
        if last and not late:
            _die()
        result = real(*arguments)
        if last:
            _die()
        return result

    def work() -> None:
        lmdb_compact.COPY_BYTES = 4 * 4096
        setattr(owner, name, deadly)
        compact(path)

    assert exit_code(work) in (0, -signal.SIGKILL)
    _check_compacted(path, pages)
    compact(path)
    _check_compacted(path, pages)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _check_compacted(path: Path, pages: int) -> None:
    with opened(path) as store:
        assert audit(store) == []
        done = check_pages(store)
        assert (done.pages, done.damaged) == (pages, {})
    assert readable(path, [str(number) for number in range(0, 30, 3)]) == [10] * 10
    with opened(path) as store:
        assert audit(store) == []


def test_compact_is_refused_beside_an_engine(path: Path) -> None:
    fill(path)
    engine = backend(path)
    with pytest.raises(StoreUnavailableError, match="open in another process") as raised:
        compact(path)
    assert raised.value.reason == "busy"
    assert read_checked(engine, LAYOUT, chain("1", 10)) == 10
    engine.close()


def test_an_engine_waits_for_a_compaction(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(path)
    scatter(path)
    monkeypatch.setattr("hicache.storage_backends.lmdb_locks.JOIN_SECONDS", 0.05)

    def open_engine(done: int, total: int) -> None:
        with pytest.raises(StoreUnavailableError, match="compacted by another process"):
            backend(path)

    assert compact(path, open_engine).moved > 0


# ---- export and import ----------------------------------------------------------------------------


def exported(path: Path, spaces: Sequence[int] = (1,)) -> tuple[bytes, Exported]:
    file = io.BytesIO()
    with opened(path) as store:
        done = export_pages(store, file, spaces)
    return file.getvalue(), done


def imported(path: Path, data: bytes, budget: int = BUDGET, values: ValuesMode = "slab") -> Imported:
    reader = FrameReader(io.BytesIO(data), "file")
    forms = space_forms(reader.header())
    store = open_store(path, plan_for(forms, values, budget))
    try:
        done = import_pages(store, reader, forms)
        assert audit(store) == []
        assert check_pages(store).damaged == {}
    finally:
        close_store(store)
    return done


@pytest.mark.parametrize("source", MODES)
@pytest.mark.parametrize("target", MODES)
def test_pages_come_over_once(path: Path, source: ValuesMode, target: ValuesMode) -> None:
    fill(path, values=source)
    data, out = exported(path)
    assert (out.pages, out.nbytes, out.damaged) == (304, 304 * LAYOUT.page_bytes, 0)
    new = path.with_name("new")
    done = imported(new, data, values=target)
    assert (done.stored, done.present, done.left_out, done.damaged, done.trouble) == (304, 0, 0, 0, "")
    assert readable(new, [str(number) for number in range(30)], values=target) == [10] * 30
    again = imported(new, data, values=target)
    assert (again.stored, again.present) == (0, 304)
    store = backend(new, values=target)
    assert read_checked(store, LAYOUT, [*chain("3", 10)[:5], *chain("fork", 4)]) == 9
    store.close()


def test_a_page_comes_after_its_parent_and_what_was_used_last_comes_last(path: Path) -> None:
    fill(path)
    store = backend(path)
    read_checked(store, LAYOUT, chain("2", 10))
    store.close()  # notes the use
    data, _ = exported(path)
    keys = [page.key for page in _pages(data)]
    assert len(keys) == len(set(keys)) == 304
    for page in _pages(data):
        assert page.parent is None or keys.index(page.parent) < keys.index(page.key)
    assert keys[-10:] == chain("2", 10)
    assert keys[:10] == chain("0", 10)


def test_a_smaller_store_keeps_what_was_used_last(path: Path) -> None:
    """A prefix that all chains share comes first in the file, and stays."""
    store = backend(path)
    stem = chain("stem", 5)
    store.write([run_of(LAYOUT, stem)])
    for number in range(60):
        assert store.write([run_of(LAYOUT, chain(str(number), 20), stem[-1])]) == [20]
    store.close()
    data, _ = exported(path)
    new = path.with_name("new")
    done = imported(new, data, budget=3 << 20)
    assert done.evicted > 0
    assert (done.left_out, done.damaged, done.trouble) == (0, 0, "")
    store = backend(new, budget=3 << 20)
    for number in range(50, 60):
        assert read_checked(store, LAYOUT, [*stem, *chain(str(number), 20)]) == 25
    assert store.contains_prefix([*stem, *chain("0", 20)]) == 5
    assert store.usage().used_bytes <= 3 << 20
    store.close()


def test_namespaces_are_found_again_and_keep_their_rules(path: Path) -> None:
    fill(path)
    other = backend(path, OTHER, eviction="slru", ttl=3600.0, quota_bytes=1 << 20)
    other.write([run_of(LAYOUT, chain("other", 7))])
    other.close()
    new = path.with_name("new")
    backend(new, OTHER, eviction="fifo").close()
    imported(new, exported(path, [2])[0])
    keeper = backend(new, OTHER, eviction="fifo")
    keeper.write([run_of(LAYOUT, chain("more", 1))])
    data, done = exported(path, [1, 2])
    assert done.pages == 311
    imported(new, data)
    with opened(new) as store:
        spaces = {space.label["model"]: space for space in describe(store).spaces}
    assert spaces["other"].policy == "fifo"
    assert (spaces["other"].pages, spaces["conformance"].pages) == (8, 304)
    keeper.close()


def test_damaged_pages_are_not_exported(path: Path) -> None:
    fill(path)
    store = backend(path)
    store.flip_byte(chain("3", 10)[2])
    store.flip_byte(chain("7", 10)[9])
    store.close()
    data, done = exported(path)
    assert done.damaged >= 2
    keys = {page.key for page in _pages(data)}
    assert len(keys) == 304 - (8 + 4) - 1
    result = imported(path.with_name("new"), data)
    assert (result.stored, result.left_out, result.trouble) == (291, 0, "")


def test_a_damaged_page_in_the_file_is_refused_with_what_is_below_it(path: Path) -> None:
    fill(path)
    data = bytearray(exported(path)[0])
    data[data.index(chain("5", 10)[6] * 4) + 5] ^= 1
    done = imported(path.with_name("new"), bytes(data))
    assert (done.stored, done.damaged, done.left_out, done.trouble) == (300, 1, 3, "")


def test_a_file_that_was_cut_off_is_recognised_and_can_be_repeated(path: Path) -> None:
    fill(path)
    data, _ = exported(path)
    new = path.with_name("new")
    part = imported(new, data[: len(data) // 2])
    assert "cut off" in part.trouble
    assert 0 < part.stored < 304
    assert "cut off" in imported(new, data[:-1]).trouble
    whole = imported(new, data)
    assert (whole.present, whole.trouble) == (304, "")


@pytest.mark.parametrize("at", [20, 200, 5000])
def test_a_damaged_frame_ends_the_import(path: Path, at: int) -> None:
    fill(path)
    data = bytearray(exported(path)[0])
    where = data.index(chain("8", 10)[0]) if at == 5000 else at
    data[where] ^= 0xFF
    try:
        assert imported(path.with_name("new"), bytes(data)).trouble
    except StoreCorruptError as error:
        assert "damaged" in str(error)  # its header


@pytest.mark.parametrize("data", [b"", b"PK\3\4 something else", MAGIC[:5]])
def test_another_file_is_refused(data: bytes) -> None:
    with pytest.raises((ConfigError, StoreCorruptError)):
        FrameReader(io.BytesIO(data), "file")


def test_codecs_come_over_as_they_are(path: Path) -> None:
    identity = replace(IDENTITY, codec="int8")
    store = backend(path, identity)
    store.write([run_of(LAYOUT, chain("a", 10))])
    pages = filled_pages(LAYOUT, chain("a", 10))
    assert store.read_into(chain("a", 10), pages) == 10
    store.close()
    for values in MODES:
        new = path.with_name(values)
        assert imported(new, exported(path)[0], values=values).stored == 10
        other = backend(new, identity, values=values)
        there = filled_pages(LAYOUT, chain("b", 10))
        assert other.read_into(chain("a", 10), there) == 10
        assert there == pages
        other.close()


def _pages(data: bytes) -> Iterator[Any]:
    reader = FrameReader(io.BytesIO(data), "file")
    reader.header()
    while hasattr(frame := reader.next(), "key"):
        reader.fill(memoryview(bytearray(frame.length)))
        yield frame
