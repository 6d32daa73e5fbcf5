from __future__ import annotations

import json
from typing import Any

import pytest

from hicache import cli
from hicache.bench.tree import Figure


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
    assert shown["media"].keys() == {"raw", "slab", "inline"}


@pytest.mark.parametrize("backend", ["memory", "lmdb"])
def test_stall_writes_while_it_matches(capsys: pytest.CaptureFixture[str], backend: str, tmp_path: object) -> None:
    shown = measured(capsys, "stall", "--backend", backend, "--path", str(tmp_path))
    assert shown["writing"]["matches"] > 0
    assert shown["written_gb_per_s"] > 0
    assert shown["ratio"] > 0


@pytest.mark.parametrize(
    ("what", "heading"), [("copy", "memcpy"), ("stall", "match_prefix"), ("tree", "radix tree"), ("storage", "of raw")]
)
def test_tables(capsys: pytest.CaptureFixture[str], what: str, heading: str) -> None:
    assert cli.run(["bench", what, "--quick"]) == 0
    assert heading in capsys.readouterr().out


def test_an_unknown_backend_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "stall", "--backend", "lmbd"]) == 2
    assert "did you mean 'lmdb'?" in capsys.readouterr().err
