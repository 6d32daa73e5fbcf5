from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hicache import cli
from hicache.config import load_config
from hicache.storage_backends.base import PageRun
from hicache.storage_backends.filesystem import is_cleaned
from hicache.storage_backends.lmdb_backend import LmdbBackend

TEXT = """\
model: {{name: example/small, layers: 4, kv_heads: 2, head_dim: 32, dtype: float16}}
page_size: 16
tiers:
  - {{tier: device, size: 1MiB}}
  - {{tier: host, size: 2MiB}}
  - {{tier: storage, size: 8MiB, path: {folder}/store}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "t.yaml"
    path.write_text(TEXT.format(folder=tmp_path))
    return path


def test_check_says_ok_and_makes_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "check", str(file)]) == 0
    summary = "device 64 pages (1024 tokens), host 128 pages (2048 tokens), storage 430 pages (6880 tokens)"
    out, err = capsys.readouterr()
    assert (out.splitlines()[0], err) == (f"{file}: ok, {summary}", "")
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("size: 2MiB", "sise: 2MiB", 5, "tiers[1].sise: unknown key, did you mean 'size'?"),
        ("size: 2MiB", "size: 2", 5, "tiers[1].size: 2: a size needs a unit"),
        ("size: 2MiB", "size: 1B", 5, "tiers[1].size: 1B holds no page"),
        ("page_size: 16", "page_size: 24", 2, "page_size: 24 does not divide 512"),
        ("tier: host", "tier: device", 5, "tiers[1]: a second device tier"),
        ("tier: device", "tier: host", 5, "tiers[1]: a second host tier"),
        ("/store", "/no/store", 6, "tiers[2].path: "),
        ("/store", "/t.yaml", 6, "tiers[2].path: "),
        ("size: 2MiB", "size: 30TiB", 5, "tiers[1].size: "),
    ],
)
def test_every_mistake_is_one_line_and_exit_2(
    file: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, line: int, message: str
) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    assert cli.run(["config", "check", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {file}:{line}: {message}")
    assert err.count("\n") == 1
    assert list(file.parent.iterdir()) == [file]


def test_show_lists_defaults_and_derived_figures(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "show", str(file)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for figure in ("1024 (1.00 KiB)", "16384 (16.00 KiB)", "6,880", "7,045,120", "durability=batch"):
        assert figure in out


def test_show_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "show", str(file), "--json", "--set", "tiers.1.size=64 pages"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["page_size"] == 16
    assert shown["layout"] == {"token_bytes": 1024, "page_bytes": 16384, "slot_bytes": 16384, "num_kv_heads": 2}
    assert shown["tiers"][1]["size"] == "64 pages"
    assert shown["tiers"][1]["write"] == "write_through"
    assert shown["tiers"][1]["derived"] == {"pages": 64, "tokens": 1024, "bytes": 2**20}
    assert shown["tiers"][2]["prefetch"] == {"policy": "timeout", "deadline": "200ms", "min_pages": 1}


def test_show_a_host_tier_that_quantises(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its codec is the store's, too: a page of 16 KiB is 8 KiB of codes and its scales."""
    assert cli.run(["config", "show", str(file), "--json", "--set", "tiers.1.codec=fp8"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["layout"]["slot_bytes"] == 12288
    assert [tier.get("codec") for tier in shown["tiers"]] == [None, "fp8", "fp8"]
    assert shown["tiers"][1]["derived"] == {"pages": 170, "tokens": 2720, "bytes": 170 * 12288}
    assert cli.run(["config", "show", str(file), "--set", "tiers.1.codec=fp8"]) == 0
    assert capsys.readouterr().out.count("codec=fp8") == 2


def test_a_bad_override_names_itself(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "show", str(file), "--set", "tiers.1.size=64"]) == 2
    assert capsys.readouterr().err.startswith("error: --set tiers.1.size=64: tiers[1].size: 64: a size needs a unit")


# ---- what a start would meet ----------------------------------------------------------------------


@pytest.fixture
def check(file: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Exit code and all output of a check, with the size of the store set to something else."""

    def check(*overrides: str) -> tuple[int, str]:
        capsys.readouterr()
        options = [option for override in overrides for option in ("--set", override)]
        code = cli.run(["config", "check", str(file), *options])
        return code, "".join(capsys.readouterr())

    return check


@pytest.fixture
def store(file: Path) -> LmdbBackend:
    """An open store where the file says, with 200 pages."""
    config = load_config(file)
    plan, identity = config.store_plan(), config.identity()
    assert plan is not None
    backend = LmdbBackend(file.parent / "store", identity, 4 * plan.budget_bytes)
    keys = [number.to_bytes(32, "big") for number in range(1, 801)]
    pages = [memoryview(bytearray(identity.layout.page_bytes)) for _ in keys]
    assert backend.write([PageRun(keys, pages, None)]) == [800]
    return backend


def test_check_says_what_a_start_would_take(check: Any, store: LmdbBackend) -> None:
    store.close()
    before = {
        path.name: path.read_bytes() for path in Path(store._store.folder.path).iterdir() if path.suffix != ".mdb"
    }
    code, said = check()
    assert code == 2 and "tiers[2].size: the store in" in said and "holds 800 pages" in said and "be evicted" in said
    code, said = check("tiers.2.shrink=true")
    assert code == 0 and "note: shrink: true: the store in" in said and "be evicted" in said
    code, said = check("tiers.2.size=64MiB")
    assert code == 0 and "holds 800 pages and has a size of" in said
    after = {path.name: path.read_bytes() for path in Path(store._store.folder.path).iterdir() if path.suffix != ".mdb"}
    assert before == after


def test_check_beside_an_engine(check: Any, store: LmdbBackend) -> None:
    code, said = check("tiers.2.size=64MiB")
    assert code == 0 and "its size stays, and 64.00 MiB is ignored" in said
    store.close()


def test_check_of_a_store_with_other_values(check: Any, store: LmdbBackend) -> None:
    store.close()
    code, said = check("tiers.2.values=inline", "tiers.2.size=64MiB")
    assert code == 2 and "made with values: slab" in said


def test_check_of_a_damaged_store(check: Any, store: LmdbBackend) -> None:
    store.close()
    (store._store.folder.path / "damaged").write_text("found damaged")
    code, said = check("tiers.2.size=64MiB")
    assert code == 1 and "found damaged" in said and "sets it aside" in said


def test_check_of_a_disk_that_is_nearly_full(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.storage_backends.filesystem.free_bytes", lambda path: 1 << 20)
    code, said = check("tiers.2.size=64MiB")
    assert code == 0 and "has 1.00 MiB free, and the store may take 64.00 MiB more" in said


def test_check_names_a_folder_that_is_cleaned(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for cleaned in (True, False):
        monkeypatch.setattr("hicache.storage_backends.filesystem.is_cleaned", lambda path: cleaned)  # noqa: B023
        assert ("exempt it" in check()[1]) is cleaned


@pytest.mark.parametrize(
    ("path", "cleaned"), [("/tmp/kv", True), ("/var/tmp/x/kv", True), ("/var/cache/kv", False), ("/tmpfs/kv", False)]
)
def test_folders_that_are_cleaned(path: str, cleaned: bool) -> None:
    assert is_cleaned(Path(path)) is cleaned
