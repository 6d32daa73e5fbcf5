"""The whole cache on a GPU, real copies racing evictions: a replay whose every hit page is checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hicache.cli import run

MODEL = "{name: made-up, layers: 4, kv_heads: 2, head_dim: 32, dtype: bfloat16}"
WORKLOAD = "chats:conversations=10,turns=4,system_tokens=256,tool_tokens=512,user_tokens=64,output_tokens=64"


@pytest.mark.parametrize(
    "host",
    [
        "write: write_through",
        "write: write_back",
        "write: write_through_selective",
        "write: write_through, pinned: false",
    ],
)
def test_every_hit_of_a_replay_is_right(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "tiers.yaml"
    config.write_text(f"""
model: {MODEL}
page_size: 16
poison: true
tiers:
  - {{tier: device, device: cuda, size: 3000 tokens}}
  - {{tier: host, size: 4000 tokens, {host}}}
  - {{tier: storage, backend: lmdb, path: {tmp_path / "store"}, size: 256MiB}}
""")
    code = run(["replay", WORKLOAD, "--config", str(config), "--verify", "--json", "--max-running", "8"])
    result = json.loads(capsys.readouterr().out)
    assert code == 0 and result["wrong_pages"] == 0 and result["checked_pages"] > 500
    hits = result["hit_tokens"]
    assert hits["device"] > 0 and hits["host"] + hits["storage"] > 0
