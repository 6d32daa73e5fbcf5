from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache import cli
from hicache.bench import storage_codecs
from hicache.bench.storage_long import run_long, set_size
from hicache.bench.tree import Figure
from hicache.errors import ConfigError
from hicache.storage_backends.codecs import CODECS
from hicache.storage_backends.lmdb_backend import LmdbBackend


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.run(["bench", *arguments, "--quick", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    shown: dict[str, Any] = json.loads(out)
    assert shown["machine"].keys() == {"cpu", "cores", "python", "numpy"}
    return shown


def test_tree_measures_every_workload_at_every_page_size(capsys: pytest.CaptureFixture[str]) -> None:
    figures = measured(capsys, "tree")["figures"]
    names = ["W1 match", "W2 match", "W2 insert", "write-through turn", "W3 match", "W3 insert"]
    names += ["W4 evict of 500 leaves", "leaf of 256 tokens"]
    assert [(figure["page_size"], figure["name"]) for figure in figures] == [
        (page_size, name) for page_size in (1, 16, 64) for name in names
    ]
    assert all(figure["value"] > 0 and figure["target"] > 0 for figure in figures)


def test_a_figure_is_met_up_to_its_target() -> None:
    assert Figure("W1 match", 1, 15.0, 15.0).met
    assert not Figure("W1 match", 1, 15.1, 15.0).met


def test_copy(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(row["gather"] > 0 for row in measured(capsys, "copy")["results"])


def test_storage(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    shown = measured(capsys, "storage", "--path", str(tmp_path))
    assert shown["media"].keys() == {"raw", "raw synced", "slab", "inline"}
    assert shown["codecs"].keys() == set(CODECS)
    assert shown["codecs"]["none"]["ratio"] == 1.0
    assert 0.49 < shown["codecs"]["int8"]["ratio"] < 0.51
    assert 0 < shown["codecs"]["int8"]["error"]["relative_rms"] < 0.1
    assert "long" not in shown


def test_storage_at_its_budget(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = measured(capsys, "storage", "--long", "--path", str(tmp_path))["long"]
    assert shown["evicted_pages"] > 3 * shown["set_bytes"] // shown["page_bytes"]
    assert shown["allocated_bytes"] <= shown["budget_bytes"] == shown["set_bytes"]
    assert shown["read_pages"] > 0.7 * shown["set_bytes"] // shown["page_bytes"]
    assert (shown["wrong_pages"], shown["missing_pages"]) == (0, 0)
    assert list(tmp_path.iterdir()) == []


def test_pages_that_come_back_wrong_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_into = LmdbBackend.read_into

    def wrong(self: LmdbBackend, keys: list[bytes], buffers: list[memoryview]) -> int:
        count = read_into(self, keys, buffers)
        buffers[0][3] ^= 1
        return count

    monkeypatch.setattr(LmdbBackend, "read_into", wrong)
    shown = run_long(tmp_path, 32 << 20, turnovers=2, page_bytes=64 << 10)
    assert shown["wrong_pages"] == shown["read_pages"] // 16


def test_a_codec_without_its_package_has_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lz4.block", None)
    measured = storage_codecs.run_codecs(tmp_path, 1 << 20, lambda what: None)
    assert measured["lz4"].keys() == {"note"}
    assert "pip install" in measured["lz4"]["note"]
    assert measured["fp8"]["read"]["gb_per_s"] > 0


def test_the_long_set_is_larger_than_memory_if_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 100 << 30
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert set_size(tmp_path, 16 << 30) == (18 << 30, "")
    size, note = set_size(tmp_path, 64 << 30)
    assert size == 48 << 30
    assert "66.0 GiB were wanted" in note
    free = 5 << 30
    with pytest.raises(ConfigError, match="too little"):
        set_size(tmp_path, 16 << 30)


@pytest.mark.parametrize("backend", ["memory", "lmdb"])
def test_stall_writes_while_it_matches(capsys: pytest.CaptureFixture[str], backend: str, tmp_path: object) -> None:
    shown = measured(capsys, "stall", "--backend", backend, "--path", str(tmp_path))
    assert shown["writing"]["matches"] > 0
    assert shown["written_gb_per_s"] > 0
    assert shown["ratio"] > 0


def test_serving_compares_hits_with_what_bytes_and_flops_allow(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shown = measured(capsys, "serving", "--model", "random:layers=2", "--threads", "1", "--path", str(tmp_path))
    rows = shown["ttft"]["rows"]
    assert [row["source"] for row in rows] == ["recompute", "device", "host", "storage"]
    assert [row["bytes"] for row in rows] == [0, 0, 256 * 1024, 2 * 256 * 1024]
    assert all(row["ratio"] > 0 and row["allowed_ratio"] > 0 for row in rows[1:])
    assert all(rate > 0 for rate in shown["ttft"]["rates"].values())
    throughput = shown["throughput"]
    assert [row["cache"] for row in throughput["rows"]] == ["device", "device and host", "device, host and disk"]
    assert all(0 < row["lowest"] <= row["ratio"] <= row["highest"] for row in throughput["rows"])
    assert list(tmp_path.iterdir()) == []


def test_a_prefix_from_elsewhere_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hicache.bench import serving

    monkeypatch.setattr(serving, "SOURCES", {"storage": ()})  # nothing forgets it, so it is on the device
    assert cli.run(["bench", "serving", "--quick", "--model", "random:layers=2"]) == 1
    assert "256 tokens should have come from storage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "heading"),
    [
        ("copy", "memcpy"),
        ("stall", "match_prefix"),
        ("tree", "radix tree"),
        ("storage", "of raw"),
        ("serving", "ratio / allowed"),
    ],
)
def test_tables(capsys: pytest.CaptureFixture[str], what: str, heading: str) -> None:
    assert cli.run(["bench", what, "--quick"]) == 0
    assert heading in capsys.readouterr().out


def test_an_unknown_backend_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "stall", "--backend", "lmbd"]) == 2
    assert "did you mean 'lmdb'?" in capsys.readouterr().err
