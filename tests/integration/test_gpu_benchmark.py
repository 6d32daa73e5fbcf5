"""benchmarks/gpu.py at its smallest and on the CPU: every part that needs no GPU runs and gives its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hicache.bench import gpu_overlap
from hicache.bench.gpu_model import TINY, device_model
from hicache.errors import IntegrityError
from hicache.serving.tensors import check_tensors

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture
def script() -> ModuleType:
    spec = spec_from_file_location("gpu_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    command = [sys.executable, SCRIPT, "--quick", "--device", "cpu", "--json", table, "--path", tmp_path]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=one_thread, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert json.loads(table.read_text()) == report
    parts = report["parts"]
    assert list(parts) == ["machine", "overlap", "steps", "ttft"] and "revision" in parts["machine"]
    assert [case["case"] for case in parts["overlap"]["cases"]] == [
        "load = compute",
        "load > compute",
        "load < compute",
    ]
    assert {"poll", "end_step", "step"} < parts["steps"]["calls"].keys()
    assert parts["steps"]["loads"] > 0 and parts["steps"]["load_back"]["pages"] == 8
    assert [row["source"] for row in parts["ttft"]["rows"]] == [
        "recompute",
        "cold, with cache",
        "device",
        "host",
        "storage",
    ]
    assert parts["ttft"]["logits_equal"] and len(report["goals"]) == 4
    assert "scheduler's thread" in done.stderr and list(tmp_path.iterdir()) == [table]


def test_a_part_that_fails_does_not_take_the_others_along(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> dict[str, Any]:
        raise ValueError("no such thing")

    calls = {"p50_us": 1.0, "p99_us": 2.0, "max_us": 3.0, "calls": 4}
    load = {"pages": 1, "p50_us": 5.0, "max_us": 6.0}
    steps = {"layers": 2, "prompt_tokens": 128, "calls": {"step": calls}, "load_back": load}
    monkeypatch.setattr(script, "_parts", lambda options: {"overlap": broken, "steps": lambda: steps})
    assert script.main([]) == 1
    parts = json.loads(capsys.readouterr().out)["parts"]
    assert parts == {"overlap": {"error": "ValueError: no such thing"}, "steps": steps}


def test_a_part_ends_when_its_time_is_over(script: ModuleType) -> None:
    def endless() -> dict[str, Any]:
        while True:
            pass

    script.BUDGETS["steps"] = 0.05
    assert script._attempt("steps", endless) == {"error": "OutOfTime: not done after 0.05 s"}
    assert script._attempt("steps", dict) == {}


def test_goals_are_judged_by_the_worst_row(script: ModuleType) -> None:
    def row(layer: int, target: float | None, gather: float) -> dict[str, Any]:
        return {"layer_bytes": layer, "target": target, "gather": gather, "scatter": 0.95, "by_layer": 0.93}

    rows = [row(4 << 10, 0.7, 0.8), row(32 << 10, 0.9, 0.92), row(64 << 10, 0.9, 0.89), row(64 << 10, None, 0.1)]
    found = script.goals({"copies": {"results": rows}, "ttft": {"error": "TypeError"}})
    assert [(goal["value"], goal["target"], goal["met"]) for goal in found] == [
        (0.89, 0.9, False),
        (0.95, 0.9, True),
        (0.93, 0.9, True),
        (0.8, 0.7, True),
        (0.95, 0.7, True),
        (0.93, 0.7, True),
    ]
    assert "from 32 KiB a layer" in found[0]["goal"] and "from 4 KiB a layer" in found[3]["goal"]


# ---- its parts ----------------------------------------------------------------------------------


def test_a_seed_makes_a_model() -> None:
    first, again, other = (device_model(TINY, "cpu", seed) for seed in (1, 1, 2))
    check_tensors(TINY, first.tensors, "made up")
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in first.tensors.items())
    assert first.weights_digest == again.weights_digest != other.weights_digest
    assert not torch.equal(first.tensors["embed"], other.tensors["embed"])
    spread = {name: float(first.tensors[name].std()) for name in ("embed", "layers.0.q", "layers.1.down")}
    expected = {"embed": 0.02, "layers.0.q": TINY.hidden**-0.5, "layers.1.down": TINY.ffn**-0.5}
    assert spread == pytest.approx(expected, rel=0.1)
    assert float(first.tensors["norm"].mean()) == pytest.approx(1.0, abs=0.1)


def test_kv_that_is_read_before_it_is_loaded_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwaited(overlap: gpu_overlap._Overlap, prefix: int, suffix: int) -> torch.Tensor:
        return overlap._compute(prefix, suffix)

    monkeypatch.setattr(gpu_overlap._Overlap, "_together", unwaited)
    with pytest.raises(IntegrityError, match="load = compute: KV was read before it was loaded"):
        gpu_overlap.run(device_model(TINY, "cpu"), "cpu", gpu_overlap.QUICK)
