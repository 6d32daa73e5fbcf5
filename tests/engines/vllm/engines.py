"""Prompts, and engines in processes of their own: one that has run a model does not leave a process cleanly."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def prompt(seed: int, length: int = 1000) -> list[int]:
    """Token ids of the tiny model, the same for the same seed."""
    source = random.Random(seed)
    return [source.randrange(3, 1000) for _ in range(length)]


def second_turn(seed: int, answer: list[int]) -> list[int]:
    """A chat goes on: the first prompt, its answer, and 50 more tokens."""
    return prompt(seed) + answer + prompt(seed + 100, 50)


def run_engine(
    steps: Sequence[Sequence[Any]], env: Mapping[str, str] | None = None, *, logged: bool = False, **scenario: Any
) -> list[Any]:
    """Results of the steps, see engine_process.py, with `logged` the engine's log behind them. Fails with its end."""
    paths = f"{ROOT}{os.pathsep}{HERE}"
    done = subprocess.run(
        [sys.executable, str(HERE / "engine_process.py")],
        input=json.dumps({**scenario, "steps": list(steps)}),
        env={**os.environ, "PYTHONPATH": paths, **(env or {})},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    results: list[Any] = json.loads(done.stdout)
    return [*results, done.stderr] if logged else results
