from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hicache.cli import app, run

CONFIG = """
model: {name: Qwen/Qwen3-0.6B}
page_size: 64
tiers:
  - {tier: device, device: cpu, size: 4GiB, eviction: lru}
  - {tier: host, size: 3GiB}
"""
CHATS = "chats:conversations=12"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiers.yaml"
    path.write_text(CONFIG)
    return path


def test_a_request_of_a_trace_is_explained(config: Path) -> None:
    command = ["why", CHATS, "--config", str(config), "--request", "00003.0001"]
    text = CliRunner().invoke(app, command).stdout
    assert "request 00003.0001" in text and "never stored: nobody has computed it yet" in text
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert found["request"] == "00003.0001"
    assert [tier["tier"] for tier in found["tiers"]] == ["device", "host"]
    assert found["tiers"][0]["match_tokens"] % 64 == 0 < found["tiers"][0]["match_tokens"]


def test_a_part_of_its_prompt(config: Path) -> None:
    command = ["why", CHATS, "--config", str(config), "--request", "00003.0001", "--prefix-tokens", "130", "--json"]
    found = json.loads(CliRunner().invoke(app, command).stdout)
    assert found["tokens"] == 130
    assert {tier["reason"] for tier in found["tiers"]} == {"page not aligned"}
    assert found["tiers"][0]["match_tokens"] == 128


def test_what_was_evicted_is_known_with_its_time(config: Path) -> None:
    command = ["why", "chats:conversations=40", "--config", str(config), "--request", "00005.0003", "--json"]
    found = json.loads(CliRunner().invoke(app, [*command, "--set", "tiers.0.size=3GiB"]).stdout)
    device = found["tiers"][0]
    assert device["reason"] == "evicted" and "by lru" in device["text"]
    assert 0 < device["at"] < found["now"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request", "99"], "there is no request '99', they go from 00000.0000 to"),
        (["--request", "00003.0001", "--set", "tiers.0.size=128 tokens"], "longer than the device tier"),
    ],
)
def test_mistakes_are_one_line(
    config: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["why", CHATS, "--config", str(config), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
