from __future__ import annotations

import json
from pathlib import Path

import pytest

from hicache import cli
from hicache.bench.calibrate import fitted
from hicache.config.loading import load_costs

TRACE = "# block_size=16\nt_ms,session,in_tokens,out_tokens,attach,new\n0,7,40,4,-1,2\n9,7,56,4,1,1\n"
CONFIG = """\
model: {name: example/tiny, layers: 2, kv_heads: 1, head_dim: 4, dtype: float16}
page_size: 4
tiers:
  - {tier: device, device: cpu, size: 512 tokens}
"""


def test_bandwidth_and_latency_come_from_one_page_and_many() -> None:
    link = fitted(one=0.3, all_of_them=1.2, page_bytes=100, count=10)
    assert link.bytes_per_second == pytest.approx(1000.0) and link.latency == pytest.approx(0.2)
    noisy = fitted(one=2.0, all_of_them=1.2, page_bytes=100, count=10)  # one page slower than ten
    assert noisy.bytes_per_second > 0 and noisy.latency > 0


def test_what_calibrate_writes_a_replay_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, store = tmp_path / "costs.yaml", tmp_path / "disk"
    store.mkdir()
    model = "random:layers=2,heads=2,kv_heads=1,head_dim=16,hidden=32,ffn=64"
    arguments = ["bench", "calibrate", "--quick", "--device", "cpu", "--model", model, "--path", str(store)]
    assert cli.run([*arguments, "--out", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["model"] == model and shown["page_bytes"] == 2 * 2 * 16 * 16 * 4
    costs = load_costs(out)
    assert costs.model_dump(mode="json")["to_device"] == shown["costs"]["to_device"]
    assert costs.prefill.tokens_per_second is not None and costs.prefill.tokens_per_second > 0
    assert min(costs.disk_read.bandwidth, costs.disk_write.bandwidth, costs.lookup, costs.decode_step) > 0
    assert list(store.iterdir()) == []
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "tiers.yaml").write_text(CONFIG)
    replay = ["replay", str(tmp_path / "trace.csv"), "--config", str(tmp_path / "tiers.yaml")]
    assert cli.run([*replay, "--no-bytes", "--costs", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ttft"]["mean"] > 0


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = "random:layers=1,heads=1,kv_heads=1,head_dim=16,hidden=16,ffn=16"
    out = tmp_path / "none" / "costs.yaml"
    assert cli.run(["bench", "calibrate", "--quick", "--device", "cpu", "--model", model, "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"error: {out}: cannot be written: No such file or directory\n"
