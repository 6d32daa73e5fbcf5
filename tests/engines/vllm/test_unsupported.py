"""Models that the plug-in does not support run without lower tiers; mistakes of configuration end a start early."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import HERE, ROOT, prompt, run_engine
from tiny_model import make_windowed

Tiers = Callable[..., str]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mistral", "the attention has a window|of kind SlidingWindowSpec"),
        ("gemma3", "2 KV cache groups|KV cache groups, one is supported"),
    ],
)
def test_a_model_with_windows_is_served_without_lower_tiers(
    tmp_path: Path, tiers: Tiers, family: str, reason: str
) -> None:
    """It is to give the answers of an engine without the plug-in, hits of vLLM's own pool included."""
    model = str(make_windowed(tmp_path / "model", family))
    steps = [["generate", [prompt(0, 300)]], ["generate", [prompt(0, 300)]], ["reset", True]]
    plain = run_engine(steps[:2], model=model)
    result = run_engine(steps, model=model, tiers=tiers(), logged=True)
    assert [one["tokens"] for one in result[:2]] == [one["tokens"] for one in plain]
    assert [one["cached"] for one in result[:2]] == [one["cached"] for one in plain]
    assert result[2] is True
    (warning,) = [line for line in result[-1].splitlines() if "hicache" in line and "nothing is cached" in line]
    assert any(part in warning for part in reason.split("|")), warning


MISTAKES = {
    "no such file": ("/nowhere/tiers.yaml", None, "/nowhere/tiers.yaml: cannot be read: No such file or directory"),
    "a misspelt key": (None, "tiers:\n  - {tier: host, siez: 5MiB}\n", "tiers[0].siez: unknown key, did you mean"),
    "no unit": (None, "tiers:\n  - {tier: host, size: 5}\n", "a size needs a unit"),
    "the engine's part": (None, "model: {}\ntiers: []\n", "model: the engine says that itself"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_in_the_configuration_is_one_line_before_weights_are_loaded(
    tmp_path: Path, model: str, what: str
) -> None:
    path, text, message = MISTAKES[what]
    file = tmp_path / "tiers.yaml"
    if text is not None:
        file.write_text(text)
    weights = Path(model) / "model.safetensors"
    folder = tmp_path / "without weights"
    folder.mkdir()
    for one in Path(model).iterdir():
        if one.name != weights.name:
            (folder / one.name).write_bytes(one.read_bytes())
    extra = f'{{"config": "{path or file}"}}'
    connector = (
        '{"kv_connector": "HiCacheConnector", "kv_connector_module_path": "hicache.integrations.vllm", '
        f'"kv_role": "kv_both", "kv_connector_extra_config": {extra}}}'
    )
    command = [sys.executable, str(HERE / "vllm_command.py"), "serve", str(folder), "--skip-tokenizer-init"]
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--enforce-eager", "--kv-transfer-config", connector],
        env={**environment, "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("hicache: ") and message in last
    assert "Traceback" not in done.stderr and "EngineCore" not in done.stderr
