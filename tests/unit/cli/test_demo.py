from __future__ import annotations

import json
from pathlib import Path

import pytest

from hicache import cli
from hicache.cli import demo_cmd
from hicache.sim.generator import ChatWorkload

SMALL = ChatWorkload(conversations=40, turns=6, system_tokens=256, tool_tokens=512, context_tokens=2048)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_cmd, "WORKLOAD", SMALL)
    monkeypatch.setattr(demo_cmd, "RESTART_REQUESTS", 10)
    monkeypatch.setattr(demo_cmd, "DEVICE_TOKENS", 4096)
    monkeypatch.setattr(demo_cmd, "HOST_TOKENS", 8192)


def test_every_tier_serves_hits_and_a_restart_hits_the_disk(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["demo", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert all(tokens > 0 for tokens in shown["replay"]["hit_tokens"].values())
    assert shown["restart"]["hit_tokens"]["storage"] > 0
    assert shown["replay"]["wrong_pages"] == shown["restart"]["wrong_pages"] == 0
    assert shown["replay"]["checked_pages"] > 0
    assert shown["failures"] == []


def test_text_says_what_happens_and_the_store_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept"
    assert cli.run(["demo", "--keep", str(kept)]) == 0
    out, err = capsys.readouterr()
    for text in (
        "long chats",
        "pages demoted: host to storage",
        "wrong pages = 0",
        "Restarted",
        "every byte was right",
    ):
        assert text in " ".join(out.split())
    assert err == ""
    assert (kept / "store").is_dir()


def test_a_tier_that_serves_nothing_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_cmd, "HOST_TOKENS", 200_000)  # storage is never needed before the restart
    assert cli.run(["demo", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["failures"] == ["storage served no hits"]
    assert err == "error: IntegrityError: storage served no hits\n"


def test_a_folder_in_use_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert cli.run(["demo", "--keep", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --keep {tmp_path}: exists")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
