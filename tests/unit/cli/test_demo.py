from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hicache import cli
from hicache.serving import demo as served_demo
from hicache.serving.demo import DemoOptions, Script

CHATS = tuple(tuple(f"Chat {chat}, question {turn}, and some more words." for turn in range(3)) for chat in range(6))
SMALL = DemoOptions(Script("All chats begin with this.", CHATS), 192, 224, 4096, answer_tokens=4, ignore_eos=True)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_demo, "EMBEDDED", SMALL)


def words(text: str) -> str:
    return " ".join(text.split())


def test_json_has_every_pass_and_every_turn(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["demo", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["equal"] and shown["failures"] == []
    assert shown["passes"].keys() == {"no_cache", "cold_to_warm", "restart"}
    assert all(len(served["turns"]) == 18 for served in shown["passes"].values())
    assert all(shown["passes"]["cold_to_warm"]["tokens"][tier] > 0 for tier in ("device", "host", "storage"))
    assert shown["passes"]["restart"]["tokens"]["storage"] > 0
    assert {row["source"] for row in shown["ttft"]["cold_to_warm"]} > {"device", "storage"}
    assert shown["passes"]["restart"]["evidence"]["policy"]["device_eviction"] == "adaptive"


def test_text_says_what_happens_and_the_store_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept"
    assert cli.run(["demo", "--keep", str(kept)]) == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 90
    for text in (
        "6 chats of 3 turns",
        "device 192, host 224, disk 4,096",
        "device hit",
        "disk hit",
        "after a restart",
        "All 18 answers, 72 tokens, are the same all three times, and so is every logit, bit for bit.",
        "every page is accounted for",
    ):
        assert text in words(out)
    assert "assistant" not in out
    assert err == ""
    assert (kept / "store").is_dir()


def test_a_model_with_words_shows_its_chats(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from hicache.serving import weights

    random, load = "random:seed=1", weights.load_model
    monkeypatch.setattr(weights, "load_model", lambda spec: load(random))
    monkeypatch.setattr(served_demo, "ENGLISH", replace(SMALL, mode="fast"))
    assert cli.run(["demo", "--model", "model.gguf"]) == 0
    out = words(capsys.readouterr().out)
    assert "chat 1" in out and "chat 6" in out
    assert "user Chat 5, question 2, and some more words. assistant" in out
    assert "tokens cached (" in out and "without cache" in out
    assert "Fast mode" in out and "every logit" not in out


def test_a_tier_that_serves_nothing_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    large = replace(SMALL, device_tokens=2048, host_tokens=4096)
    monkeypatch.setattr(served_demo, "EMBEDDED", large)  # only the device is needed before the restart
    assert cli.run(["demo", "--json"]) == 1
    out, err = capsys.readouterr()
    expected = ["cold to warm: host served no hits", "cold to warm: storage served no hits"]
    assert json.loads(out)["failures"] == expected
    assert err == f"error: IntegrityError: {'; '.join(expected)}\n"


def test_a_folder_in_use_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert cli.run(["demo", "--keep", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --keep {tmp_path}: exists")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_unknown_model_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["demo", "--model", "nowhere.gguf"]) == 2
    assert "nowhere.gguf: no such file" in capsys.readouterr().err
