"""`hicache serve` and `hicache stress` on the command line: options, and what is wrong in one line."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from hicache import cli
from hicache.cli import serve_cmd
from hicache.serving import stress as stress_run
from hicache.serving.weights import load_model
from hicache.types import Tier

TINY = "random:layers=1,heads=2,kv_heads=1,hidden=32,ffn=32"


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command with exit code 2 says."""
    assert cli.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


# ---- serve --------------------------------------------------------------------------------------


@pytest.fixture
def packages() -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")


def test_missing_packages_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_cmd, "find_spec", lambda name: None)
    assert "pip install 'hicache[serve]'" in error_of(capsys, "serve")


@pytest.mark.usefixtures("packages")
def test_a_port_in_use_is_said_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1 port {port} cannot be used" in error_of(capsys, "serve", "--port", str(port), "--model", "x")


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
        (["--model", "no/such/model"], "no/such/model"),
        (["--config", "no-such.yaml"], "no-such.yaml: cannot be read"),
        (["--config", "a.yaml", "--store", "b"], "--store: --config names the store"),
        (["--set", "tiers.0.size=3"], "tiers"),
        (["--set", "tiers.0.sizes=3MiB"], "did you mean 'size'"),
        (["--grace", "10"], "--grace: 10: a duration needs a unit"),
        (["--policy", "best"], "--policy"),
        (["--port", "70000"], "--port"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in error_of(capsys, "serve", "--port", "0", *arguments)


def test_the_built_in_tiers_are_for_the_model(tmp_path: Path) -> None:
    loaded = load_model(TINY)
    config = serve_cmd.serve_config(loaded, None, tmp_path / "store", ["tiers.0.size=64 tokens"])
    assert config.model.weights_digest == loaded.weights_digest
    capacity = config.capacity(Tier.DEVICE)
    assert capacity is not None and capacity.tokens == 64
    assert config.storage is not None and config.storage.path == str(tmp_path / "store")
    assert serve_cmd.serve_config(loaded, None, None).storage is None


def test_the_model_of_a_file_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "tiers.yaml"
    file.write_text("model: {name: other, layers: 7, kv_heads: 7, head_dim: 8}\ntiers: [{tier: device, size: 1MiB}]\n")
    assert serve_cmd.serve_config(load_model(TINY), file, None).model.layers == 1


# ---- stress -------------------------------------------------------------------------------------

SHORT = ("stress", "--duration", "10ms", "--sessions", "1", "--concurrent", "4")


@pytest.fixture
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    class Few(stress_run.StressOptions):
        def __init__(self, **values: object) -> None:
            super().__init__(session_requests=10, **values)  # type: ignore[arg-type]

    monkeypatch.setattr(stress_run, "StressOptions", Few)


@pytest.mark.usefixtures("few_requests")
def test_a_stress_run_reports(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run([*SHORT, "--json", "--path", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["failures"] == [] and "session 1" in err


@pytest.mark.usefixtures("few_requests")
def test_a_wrong_answer_is_exit_code_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress_run.StressReport, "failures", property(lambda report: ["1 answers differ"]))
    assert cli.run(list(SHORT)) == 1
    out, err = capsys.readouterr()
    assert "answers of" in out and "error: IntegrityError: 1 answers differ" in err


def test_a_bad_duration_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--duration: 5: a duration needs a unit" in error_of(capsys, "stress", "--duration", "5")
