"""Real vLLM on a CPU; where it is not installed nothing here is collected. `install.sh` makes an environment."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tiny_model import make_model

    return str(make_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def tiers(tmp_path: Path) -> Callable[..., str]:
    """Writes a file of tiers: `tiers(host, disk)`, sizes with units, without a disk if that is None."""

    def write(host: str = "128MiB", disk: str | None = "1GiB", more: str = "", host_more: str = "") -> str:
        lines = ["tiers:", f"  - {{tier: host, size: {host}{host_more}}}"]
        if disk is not None:
            prefetch = "prefetch: {deadline: 10s}"
            lines.append(f"  - {{tier: storage, path: {tmp_path / 'store'}, size: {disk}, {prefetch}{more}}}")
        file = tmp_path / "tiers.yaml"
        file.write_text("\n".join(lines) + "\n")
        return str(file)

    return write


@pytest.fixture(scope="session")
def reference(model: str) -> list[list[int]]:
    """What the engine answers to prompts 0 .. 7 without a connector, one at a time, and to the second turns of 0 and
    1 (numbers 8 and 9)."""
    from engines import prompt, run_engine, second_turn

    steps = [["generate", [prompt(seed)]] for seed in range(8)]
    tokens = [result["tokens"][0] for result in run_engine(steps, model=model, engine={"enable_prefix_caching": False})]
    turns = [["generate", [second_turn(seed, tokens[seed])]] for seed in range(2)]
    more = run_engine(turns, model=model, engine={"enable_prefix_caching": False})
    return tokens + [result["tokens"][0] for result in more]
