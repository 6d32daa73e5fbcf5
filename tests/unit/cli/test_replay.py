from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hicache import cli
from hicache.cli import wiring
from hicache.cli.wiring import parse_workload
from hicache.errors import ConfigError
from hicache.sim.generator import ChatWorkload
from hicache.sim.standin import StandIn

CONFIG = """\
model: {{name: example/tiny, layers: 2, kv_heads: 1, head_dim: 4, dtype: float16}}
page_size: 4
poison: true
tiers:
  - {{tier: device, device: cpu, size: 96 tokens}}
  - {{tier: host, size: 160 tokens}}
  - {{tier: storage, path: {folder}/store, size: 4MiB, prefetch: {{policy: wait_complete, deadline: 5s}}}}
"""

# 10 sessions take 3 turns each, a block of 16 tokens longer every time; 3 more tokens are the request's own.
TRIE = "# block_size=16\nt_ms,session,in_tokens,out_tokens,attach,new\n" + "".join(
    f"{turn * 1000 + session},{session},{(turn + 1) * 16 + 3},2,{-1 if turn == 0 else (turn - 1) * 10 + session},1\n"
    for turn in range(3)
    for session in range(10)
)
MOONCAKE = "".join(
    json.dumps({"timestamp": 0, "input_length": 520, "output_length": 1, "hash_ids": [block // 2, 100 + block]}) + "\n"
    for block in range(6)
)

REQUIRED = {
    "requests",
    "prompt_tokens",
    "hit_tokens",
    "computed_tokens",
    "demoted_pages",
    "dropped_pages",
    "wrong_pages",
    "seconds",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiers.yaml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRIE)
    return path


def replayed(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    assert cli.run(["replay", *map(str, arguments), "--verify", "--json"]) == 0
    shown: dict[str, object] = json.loads(capsys.readouterr().out)
    return shown


def total(shown: dict[str, object]) -> int:
    hits, computed = shown["hit_tokens"], shown["computed_tokens"]
    assert isinstance(hits, dict) and isinstance(computed, int)
    return sum(hits.values()) + computed


def test_json_of_a_trace_through_three_tiers(config: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = replayed(capsys, trace, "--config", config)
    assert set(shown) >= REQUIRED
    assert shown["requests"] == 30
    assert shown["prompt_tokens"] == total(shown) == 10 * (19 + 35 + 51)
    assert shown["hit_tokens"].keys() == {"device", "host", "storage"}  # type: ignore[attr-defined]
    assert shown["demoted_pages"].keys() == {"device_host", "host_storage"}  # type: ignore[attr-defined]
    assert shown["wrong_pages"] == 0
    assert isinstance(shown["checked_pages"], int) and shown["checked_pages"] > 0


def test_a_second_run_hits_what_the_first_left_on_disk(
    config: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = replayed(capsys, trace, "--config", config)
    second = replayed(capsys, trace, "--config", config)
    assert second["hit_tokens"]["storage"] > first["hit_tokens"]["storage"]  # type: ignore[index]
    assert second["wrong_pages"] == 0


def test_the_device_alone(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device_alone = "\n".join(config.read_text().splitlines()[:5])
    config.write_text(device_alone.replace("96 tokens", "4096 tokens"))
    mooncake = tmp_path / "trace.jsonl"
    mooncake.write_text(MOONCAKE)
    shown = replayed(capsys, mooncake, "--config", config, "--max-running", 1)
    assert shown["hit_tokens"] == {"device": 3 * 512, "host": 0, "storage": 0}
    assert total(shown) == 6 * 520


def test_limit_and_overrides(config: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = replayed(capsys, trace, "--config", config, "--limit", 7, "--set", "tiers.0.size=512 tokens")
    assert shown["requests"] == 7
    assert shown["demoted_pages"]["device_host"] >= 0  # type: ignore[index]


def test_the_table_for_people(config: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["replay", str(trace), "--config", str(config), "--verify"]) == 0
    out, err = capsys.readouterr()
    assert "hit on storage" in out and "wrong pages = 0 of" in out
    assert err == ""


def test_generated_chats(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = "chats:seed=3,conversations=3,turns=2,system_tokens=8,tool_tokens=8,user_tokens=8,output_tokens=4"
    shown = replayed(capsys, chats, "--config", config, "--set", "tiers.0.size=4096 tokens")
    assert shown["prompt_tokens"] == total(shown) > 0


@pytest.mark.parametrize("codec", ["tiers.1.codec=fp8", "tiers.2.codec=int8"])
def test_verify_is_not_for_lossy_codecs(
    config: Path, trace: Path, capsys: pytest.CaptureFixture[str], codec: str
) -> None:
    arguments = ["replay", str(trace), "--config", str(config), "--set", codec]
    assert cli.run([*arguments, "--verify"]) == 2
    place = codec.split("=")[0].replace(".1", "[1]").replace(".2", "[2]")
    assert f"{place}: --verify would find what this codec changes" in capsys.readouterr().err
    assert not (config.parent / "store").exists()
    assert cli.run(arguments) == 0


def test_a_wrong_page_is_exit_1(
    config: Path, trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandIn, "wrong_pages", lambda self, pool, pages, *_: np.ones(len(pages), np.bool_))
    assert cli.run(["replay", str(trace), "--config", str(config), "--verify", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["wrong_pages"] > 0
    assert err.startswith("error: IntegrityError: ") and "held wrong bytes" in err


def test_a_bad_line_is_named_before_anything_is_written(
    config: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_text(TRIE + "1,2,x,4,5,6\n")
    assert cli.run(["replay", str(trace), "--config", str(config)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {trace}:33: ") and err.count("\n") == 1
    assert not (config.parent / "store").exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("chats:turn=3", "chats: unknown option 'turn'; the options are seed, conversations, "),
        ("chats:turns=x", "chats: turns=x: write a number"),
        ("chats:seed=1.5", "chats: seed=1.5: write a whole number"),
        ("chats:seed", "chats: seed=: write a whole number"),
        ("chats:seed=1,seed=2", "chats: seed is given twice"),
        ("chats:conversations=0", "conversations is 0, it must be at least 1"),
        ("chat", "chat: no such file"),
    ],
)
def test_what_is_no_trace_is_exit_2(
    config: Path, capsys: pytest.CaptureFixture[str], source: str, message: str
) -> None:
    assert cli.run(["replay", source, "--config", str(config)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


def test_options_of_the_generator() -> None:
    assert parse_workload("") == ChatWorkload()
    assert parse_workload("seed=3, sigma=0.5") == ChatWorkload(seed=3, sigma=0.5)
    with pytest.raises(ConfigError):
        parse_workload("agents=2")


def test_ctrl_c_closes_the_cache_and_keeps_what_was_computed(
    config: Path, trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = wiring._interruptible

    def interrupted(progress: Callable[[int, int], None]) -> object:
        def press_after_five(requests: int, prompt_tokens: int) -> None:
            progress(requests, prompt_tokens)
            if requests == 5:
                os.kill(os.getpid(), signal.SIGINT)

        return original(press_after_five)

    before = signal.getsignal(signal.SIGINT)  # a job in the background has it ignored
    with monkeypatch.context() as patch:
        patch.setattr(wiring, "_interruptible", interrupted)
        assert cli.run(["replay", str(trace), "--config", str(config), "--max-running", "1"]) == 130
    assert capsys.readouterr() == ("", "")
    assert signal.getsignal(signal.SIGINT) is before
    shown = replayed(capsys, trace, "--config", config, "--limit", 5)
    assert shown["hit_tokens"]["storage"] == 5 * 16  # type: ignore[index]


# ---- without bytes ------------------------------------------------------------------------------

PREFILL = ("--set", "costs.prefill.tokens_per_second=5000")


def test_without_bytes_json_has_times_and_no_store_is_made(
    config: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["replay", str(trace), "--config", str(config), "--no-bytes", "--json", *PREFILL]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["prompt_tokens"] == total(shown) == 10 * (19 + 35 + 51)
    assert sum(shown["hit_rate"].values()) == pytest.approx(1 - shown["computed_tokens"] / shown["prompt_tokens"])
    assert shown["ttft"]["p99"] >= shown["ttft"]["p50"] > 0 and shown["queued"]["mean"] >= 0
    assert shown["busy_seconds"].keys() >= {"compute", "host_device", "storage_host"}
    assert shown["virtual_seconds"] > 2.0, "the last turn arrives after 2 s"
    assert not shown.keys() & {"wrong_pages", "checked_pages"}
    assert not (config.parent / "store").exists()


def test_the_table_without_bytes(config: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["replay", str(trace), "--config", str(config), "--no-bytes", "--speed", "4", *PREFILL]) == 0
    out, err = capsys.readouterr()
    assert "time to first token" in out and "of that in the queue" in out and "host to storage" in out
    assert err == ""


def test_costs_from_a_file_replace_those_of_the_configuration(
    config: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = tmp_path / "costs.yaml"
    means = []
    for speed in (1000, 100):
        costs.write_text(f"costs: {{prefill: {{tokens_per_second: {speed}}}}}\n")
        arguments = ["replay", str(trace), "--config", str(config), "--no-bytes", "--json", "--costs", str(costs)]
        assert cli.run(arguments) == 0
        means.append(json.loads(capsys.readouterr().out)["ttft"]["mean"])
    assert means[1] > 5 * means[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-bytes", "--verify"], "--verify checks bytes and --no-bytes has none"),
        (["--speed", "2"], "--speed paces a virtual clock: add --no-bytes"),
        (["--costs", "costs.yaml"], "--costs are those of a virtual clock: add --no-bytes"),
        (["--no-bytes", *PREFILL, "--speed", "0"], "speed is 0, it must be above 0"),
        (["--no-bytes"], "costs.prefill: how long prefill of example/tiny takes is not known"),
        (["--no-bytes", "--costs", "none.yaml"], "none.yaml: cannot be read"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(
    config: Path, trace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.run(["replay", str(trace), "--config", str(config), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and message in err and err.count("\n") == 1


def test_a_backend_that_cannot_be_modelled_is_named(
    config: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(config.read_text().replace("path: ", "backend: other, path: "))
    assert cli.run(["replay", str(trace), "--config", str(config), "--no-bytes", *PREFILL]) == 2
    assert "tiers[2].backend: a replay without bytes knows how lmdb and memory" in capsys.readouterr().err
