from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest

from hicache import cli
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.lmdb_env import DATA_FILE
from hicache.testing.processes import exit_code
from hicache.testing.storage import IDENTITY, chain, read_checked, run_of

LAYOUT = IDENTITY.layout
BUDGET = 8 << 20
OTHER = replace(IDENTITY, model="other/model", tp_rank=1, tp_size=2, tenant="acme")

COMMANDS = [["stat"], ["verify"], ["compact"], ["clear", "--yes"], ["export"]]


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = cli.run(["store", *map(str, arguments)])
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with 100 pages of one model and 20 of another."""
    path = tmp_path / "s"
    first, second = LmdbBackend(path, IDENTITY, BUDGET), LmdbBackend(path, OTHER, BUDGET)
    for number in range(10):
        first.write([run_of(LAYOUT, chain(str(number), 10))])
    second.write([run_of(LAYOUT, chain("other", 20))])
    first.close()
    second.close()
    return path


def damage(path: Path, key: bytes) -> None:
    store = LmdbBackend(path, IDENTITY, BUDGET)
    assert store.flip_byte(key)
    store.close()


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "lock.mdb"}


def command(name: list[str], path: Path) -> list[object]:
    extra: list[object] = [path.with_name("out.pages")] if name == ["export"] else []
    return [name[0], path, *extra, *name[1:]]


# ---- stat -----------------------------------------------------------------------------------------


def test_stat_shows_namespaces_and_bytes(path: Path, run: Any) -> None:
    done = run("stat", path)
    assert (done.code, done.err) == (0, "")
    for word in ("conformance", "other/model", "tp_rank 1, tp_size 2, tenant acme", "8.00 MiB", "closed in order"):
        assert word in done.out
    shown = json.loads(run("stat", path, "--json").out)
    assert [space["pages"] for space in shown["spaces"]] == [100, 20]
    assert shown["live_bytes"] == 120 * 4096
    assert shown["session"] == "clean"


def test_stat_beside_an_engine(path: Path, run: Any) -> None:
    engine = LmdbBackend(path, IDENTITY, BUDGET)
    assert "open in another process, durability batch" in run("stat", path).out
    engine.close()


# ---- verify ---------------------------------------------------------------------------------------


def test_verify_of_a_whole_store(path: Path, run: Any) -> None:
    before = contents(path)
    done = run("verify", path)
    assert (done.code, done.err) == (0, "")
    assert "structure of the index: whole" in done.out
    assert "in agreement" in done.out
    assert "120 read, 480.00 KiB, 0 damaged" in done.out
    assert contents(path) == before


def test_verify_of_damaged_pages(path: Path, run: Any) -> None:
    damage(path, chain("4", 10)[7])
    done = run("verify", path)
    assert done.code == 1
    assert "namespace 1: 1 damaged" in done.out
    assert done.err.startswith("error: StoreCorruptError: 1 pages of")
    assert "--remove" in done.err and done.err.count("\n") == 1
    done = run("verify", path, "--remove")
    assert (done.code, done.err) == (0, "")
    assert "removed 3 pages" in done.out
    assert run("verify", path).code == 0


def test_verify_of_counters_that_do_not_agree(path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.storage_backends.lmdb_verify.audit", lambda store: ["a page outlived its parent"])
    done = run("verify", path)
    assert done.code == 1
    assert "1 problems\n  a page outlived its parent" in done.out
    assert "hicache store export" in done.err


def test_verify_beside_an_engine_skips_what_would_hold_it_up(
    path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LmdbBackend(path, IDENTITY, BUDGET)
    done = run("verify", path)
    assert done.code == 0
    assert "structure of the index: not looked at, another process has it open" in done.out
    assert "records and counters: in agreement" in done.out
    monkeypatch.setattr("hicache.storage_backends.lmdb_verify.PAGES_BESIDE_OTHERS", 10)
    assert "records and counters: not looked at, the store is large" in run("verify", path).out
    engine.close()
    assert "records and counters: in agreement" in run("verify", path).out


def test_ctrl_c_ends_in_order(path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from hicache.storage_backends import lmdb_verify

    def check_pages(store: object, progress: Any, remove: bool) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        progress(1, 4096)
        raise AssertionError("it goes on")

    before, handler = contents(path), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(lmdb_verify, "check_pages", check_pages)
        done = run("verify", path)
    assert (done.code, done.err) == (130, "")
    assert contents(path) == before
    assert signal.getsignal(signal.SIGINT) is handler
    assert run("verify", path).code == 0


# ---- compact --------------------------------------------------------------------------------------


def test_compact_says_what_it_did(path: Path, run: Any) -> None:
    store = LmdbBackend(path, IDENTITY, BUDGET)
    store.delete(chain("0", 10)[:1])
    store.close()
    done = run("compact", path)
    assert (done.code, done.err) == (0, "")
    for word in ("data.mdb", "slab-4096", "before", "after", "10 pages were moved"):
        assert word in done.out
    assert run("verify", path).code == 0


def test_compact_beside_an_engine_is_refused(path: Path, run: Any) -> None:
    engine = LmdbBackend(path, IDENTITY, BUDGET)
    done = run("compact", path)
    assert done.code == 2
    assert done.err == (
        f"error: the store in {path} is open in another process: end that first, a store is compacted alone\n"
    )
    engine.close()


# ---- clear ----------------------------------------------------------------------------------------


def test_shrink_asks_and_says_what_it_takes(path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LmdbBackend(path, IDENTITY, BUDGET)
    for number in range(50):
        store.write([run_of(LAYOUT, chain(f"more {number}", 20))])
    refused = run("shrink", path, "3MiB", "--yes")
    assert refused.code == 2 and "a store is shrunk alone" in refused.err
    pages = store.usage().pages + 20
    store.close()
    for size, line in (("3", "SIZE"), ("1MiB", "give it at least"), ("3MiB", "give --yes")):
        refused = run("shrink", path, size)
        assert refused.code == 2 and line in refused.err, refused.err
    done = run("shrink", path, "3MiB", "--yes")
    assert done.code == 0 and f"of {pages:,} pages were evicted" in done.out
    store = LmdbBackend(path, IDENTITY, 3 << 20)
    assert store.usage().used_bytes <= 3 << 20
    store.close()


def test_what_is_set_aside_is_listed_and_removed(path: Path, run: Any) -> None:
    assert "no store is set aside" in run("aside", path).out
    (path / "damaged").write_text("found damaged")
    LmdbBackend(path, IDENTITY, BUDGET).close()
    listed = run("aside", path)
    assert listed.code == 0 and "s.aside-1" in listed.out and "found damaged" in listed.out
    (fields,) = json.loads(run("aside", path, "--json").out)
    assert fields["path"] == f"{path}.aside-1" and fields["disk_bytes"] > 0
    refused = run("aside", path, "--remove", 2)
    assert refused.code == 2 and "set aside are: 1" in refused.err
    assert run("aside", path, "--remove", 1).code == 0
    assert [file.name for file in path.parent.iterdir()] == ["s"]


def test_clear_everything(path: Path, run: Any) -> None:
    assert "removed 120 pages, 480.00 KiB" in run("clear", path, "--yes").out
    assert json.loads(run("stat", path, "--json").out)["live_bytes"] == 0
    assert (path / "slab-4096").stat().st_blocks == 0


def test_clear_a_namespace_beside_an_engine(path: Path, run: Any) -> None:
    engine, other = LmdbBackend(path, IDENTITY, BUDGET), LmdbBackend(path, OTHER, BUDGET)
    before = engine.generation(), other.generation()
    assert "removed 20 pages, 80.00 KiB" in run("clear", path, "--namespace", 2, "--yes").out
    assert (engine.usage().pages, other.usage().pages) == (100, 0)
    assert (engine.generation(), other.generation()) == (before[0], before[1] + 1)
    engine.close()
    other.close()


def test_clear_what_was_not_used_for_a_time(path: Path, run: Any) -> None:
    store = LmdbBackend(path, IDENTITY, BUDGET, clock=lambda: 1e9)
    assert "removed 0 pages, 0 B" in run("clear", path, "--older-than", "1h", "--yes").out
    store.close()
    for file in list(path.iterdir()):
        file.unlink()
    store = LmdbBackend(path, IDENTITY, BUDGET, clock=lambda: 1e9)
    store.write([run_of(LAYOUT, chain("old", 10))])
    store.close()
    store = LmdbBackend(path, IDENTITY, BUDGET)
    store.write([run_of(LAYOUT, chain("new", 10))])
    store.close()
    assert "removed 10 pages, 40.00 KiB" in run("clear", path, "--older-than", "7d", "--yes").out
    store = LmdbBackend(path, IDENTITY, BUDGET)
    assert read_checked(store, LAYOUT, chain("new", 10)) == 10
    assert store.contains_prefix(chain("old", 10)) == 0
    store.close()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "nobody can be asked here: give --yes to remove the pages"),
        (["--namespace", "7", "--yes"], "--namespace 7: not in the store, there are 1, 2"),
        (["--older-than", "7", "--yes"], "--older-than: 7: a duration needs a unit: us, ms, s, min, h, d"),
    ],
)
def test_clear_is_refused(path: Path, run: Any, arguments: list[str], line: str) -> None:
    before = contents(path)
    done = run("clear", path, *arguments)
    assert (done.code, done.err) == (2, f"error: {line}\n")
    assert contents(path) == before


@pytest.mark.parametrize(("answer", "code", "pages"), [("y\n", 0, 0), ("n\n", 130, 120)])
def test_clear_asks_on_a_terminal(
    path: Path, run: Any, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, pages: int
) -> None:
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    done = run("clear", path)
    assert done.code == code
    assert "Remove 120 pages (480.00 KiB) in namespace 1, 2 of" in done.out
    assert sum(space["pages"] for space in json.loads(run("stat", path, "--json").out)["spaces"]) == pages


# ---- export and import ----------------------------------------------------------------------------


def test_export_and_import(path: Path, run: Any) -> None:
    file, new = path.with_name("out.pages"), path.with_name("new")
    assert "exported 120 pages, 480.00 KiB" in run("export", path, file).out
    done = run("import", new, file)
    assert (done.code, done.err) == (2, f"error: {new} holds no store: give --budget to begin one\n")
    assert not new.exists()
    assert "imported 120 pages, 0 were there already" in run("import", new, file, "--budget", "8MiB").out
    assert "imported 0 pages, 120 were there already" in run("import", new, file).out
    assert "holds a store" in run("import", new, file, "--budget", "8MiB").err
    assert run("verify", new).code == 0
    done = run("export", path, file)
    assert (done.code, done.err) == (2, f"error: {file} exists: name a new file, or remove it\n")


def test_export_of_one_namespace(path: Path, run: Any) -> None:
    file = path.with_name("out.pages")
    assert "exported 20 pages" in run("export", path, file, "--namespace", 2).out
    assert run("export", path, path.with_name("x"), "--namespace", 3).code == 2
    assert not path.with_name("x.part").exists()


def test_damaged_pages_and_files_are_exit_1(path: Path, run: Any) -> None:
    damage(path, chain("4", 10)[7])
    file, new = path.with_name("out.pages"), path.with_name("new")
    done = run("export", path, file)
    assert done.code == 1
    assert "exported 117 pages" in done.out
    assert "1 damaged pages" in done.err and done.err.count("\n") == 1
    os.truncate(file, file.stat().st_size - 1000)
    done = run("import", new, file, "--budget", "8MiB")
    assert done.code == 1
    assert "cut off" in done.err and done.err.count("\n") == 1
    assert "imported 116 pages" in done.out


@pytest.mark.parametrize(
    ("budget", "line"),
    [
        ("64KiB", "a storage budget of 0.1 MiB does not hold one batch"),
        ("8", "--budget: 8: a size needs a unit"),
        ("8 pages", "--budget 8 pages: give bytes, such as 64GiB"),
    ],
)
def test_a_budget_that_cannot_be(path: Path, run: Any, budget: str, line: str) -> None:
    file = path.with_name("out.pages")
    run("export", path, file)
    done = run("import", path.with_name("new"), file, "--budget", budget)
    assert done.code == 2
    assert done.err.startswith(f"error: {line}")
    assert not path.with_name("new").exists()


def test_another_file_is_not_imported(path: Path, run: Any) -> None:
    for name, text in (("absent", None), ("text", "some text that is long enough")):
        file = path.with_name(name)
        if text is not None:
            file.write_text(text)
        done = run("import", path, file)
        assert done.code == 2
        assert done.err.startswith(f"error: {file}") and done.err.count("\n") == 1


def test_pages_through_a_pipe(path: Path) -> None:
    hicache = [sys.executable, "-m", "hicache", "store"]
    out = subprocess.run([*hicache, "export", str(path), "-"], capture_output=True, check=True)
    assert b"exported 120 pages" in out.stderr
    new = str(path.with_name("new"))
    done = subprocess.run(
        [*hicache, "import", new, "-", "--budget", "8MiB"], input=out.stdout, capture_output=True, check=True
    )
    assert b"imported 120 pages" in done.stdout


# ---- what cannot be used --------------------------------------------------------------------------


def _nothing(path: Path) -> None:
    shutil.rmtree(path)


def _a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("no folder")


def _an_empty_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _another_program(path: Path) -> None:
    _an_empty_folder(path)
    with lmdb.open(str(path)) as env, env.begin(write=True) as txn:
        txn.put(b"their", b"data")


def _another_format(path: Path) -> None:
    with lmdb.open(str(path), max_dbs=16, map_size=8 << 20) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as txn:
            txn.put(b"store", b'{"format": 99, "values": "slab"}', db=meta)


def _an_empty_index(path: Path) -> None:
    os.truncate(path / DATA_FILE, 0)


@pytest.mark.parametrize("name", COMMANDS, ids=lambda name: name[0])
@pytest.mark.parametrize(
    "spoil", [_nothing, _a_file, _an_empty_folder, _another_program, _another_format, _an_empty_index]
)
def test_what_is_no_store_is_one_line_and_exit_2(path: Path, run: Any, spoil: Any, name: list[str]) -> None:
    spoil(path)
    before = contents(path) if path.is_dir() else None
    done = run(*command(name, path))
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    assert str(path) in done.err
    assert (contents(path) if path.is_dir() else None) == before
    assert [each.name for each in path.parent.iterdir()] in ([], ["s"])


def _cut(path: Path) -> None:
    os.truncate(path / DATA_FILE, 6 * 4096)


def _garbage(path: Path) -> None:
    (path / DATA_FILE).write_bytes(b"\xa5" * (1 << 16))


def _marked(path: Path) -> None:
    (path / "damaged").write_text("a record was damaged")


@pytest.mark.parametrize("name", COMMANDS, ids=lambda name: name[0])
@pytest.mark.parametrize("spoil", [_cut, _garbage, _marked])
def test_a_damaged_store_is_one_line_and_exit_1(path: Path, run: Any, spoil: Any, name: list[str]) -> None:
    spoil(path)
    before = contents(path)
    done = run(*command(name, path))
    assert done.code == 1
    assert done.err.startswith("error: StoreCorruptError: ") and done.err.count("\n") == 1
    assert "s.aside-N" in done.err
    assert contents(path) == before
    assert [each.name for each in path.parent.iterdir()] == ["s"]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("name", COMMANDS, ids=lambda name: name[0])
@pytest.mark.parametrize("mode", [0o000, 0o555])
def test_a_store_of_somebody_else_is_one_line_and_exit_2(
    path: Path, capfd: pytest.CaptureFixture[str], name: list[str], mode: int
) -> None:
    for folder in path.parents[:4]:
        folder.chmod(0o755)
    path.chmod(mode)
    before = contents(path)

    def work() -> None:
        os.setuid(65534)
        os._exit(cli.run(["store", *map(str, command(name, path))]))

    assert exit_code(work) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    path.chmod(0o755)
    assert contents(path) == before


def test_help_names_the_commands(run: Any) -> None:
    done = run("--help")
    for name in ("stat", "verify", "compact", "clear", "export", "import"):
        assert name in done.out
