from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hicache import cli
from hicache.observability.doctor import diagnosis
from hicache.observability.doctor.facts import CupyFacts, DriverFacts, NumbaFacts, TorchFacts
from hicache.observability.doctor.probes import Facts

BROKEN = Facts(
    DriverFacts(),
    TorchFacts("2.13.0+cpu"),
    CupyFacts(("cupy-cuda12x", "cupy-cuda13x"), "14.2.0", (13, 2)),
    NumbaFacts("0.68.1"),
)


@pytest.mark.parametrize("columns", ["80", "120"])
def test_this_machine(columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.run(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= int(columns)
    words = " ".join(out.split())
    assert "copies device: cpu ✓ ok compiled with numba" in words
    assert "device: cpu copies with numba; " in words.rpartition("tokenizers")[2], "the verdict comes last"


def test_json_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--json", "--path", str(tmp_path)]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert all(list(finding) == ["area", "name", "value", "status", "mend"] for finding in findings)
    assert all(isinstance(text, str) for finding in findings for text in finding.values())
    assert {finding["status"] for finding in findings} <= {"ok", "note", "missing", "broken"}
    names = {(finding["area"], finding["name"]) for finding in findings}
    assert names >= {
        ("software", "torch"), ("GPU", "driver"), ("GPU", "torch.cuda"), ("CuPy", "package"), ("copies", "device: cpu"),
        ("copies", "device: cuda"), ("memory", "available"), ("disk", "O_DIRECT"), ("extras", "codecs"),
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_what_is_broken_is_exit_1_with_the_mend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(diagnosis, "probe_all", lambda: BROKEN)
    assert cli.run(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert "✗ broken   cupy-cuda12x and cupy-cuda13x are installed over one another" in out
    assert "→ pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'hicache[cuda13]'" in out
    assert "\nbroken: CuPy package; device: cpu copies with numba; no GPU driver found" in out


def test_a_terminal_without_unicode(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "400"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "hicache", "doctor", "--path", str(tmp_path / "später")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "? ok" in done.stdout
    assert "sp?ter" in done.stdout
