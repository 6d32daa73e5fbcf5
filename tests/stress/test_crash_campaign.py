"""Killed writers: no wrong page, no acknowledged page lost, no slot unaccounted for. See crash_campaign.py.

200 kills; HICACHE_KILLS=5000 for a long campaign, HICACHE_SEED=7 for another one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("crash_campaign.py")
PLANS = (
    "slab",
    "slab-tight",
    "slab-slru",
    "inline",
    "inline-tight",
    "two",
    "two-tight",
    "two-inline",
    "codec",
    "codec-tight",
)
KILLS = int(os.environ.get("HICACHE_KILLS", "200"))
SEED = os.environ.get("HICACHE_SEED", "0")


@pytest.mark.stress
@pytest.mark.timeout(120 + 2 * KILLS)
@pytest.mark.parametrize("plan", PLANS)
def test_killed_writers_leave_a_whole_store(tmp_path: Path, plan: str) -> None:
    if plan.startswith("codec") and not any(map(importlib.util.find_spec, ("zstandard", "lz4"))):
        pytest.skip("needs zstandard or lz4")
    kills = -(-KILLS // len(PLANS))
    command = [sys.executable, str(SCRIPT), plan, str(tmp_path), "--kills", str(kills), "--seed", SEED]
    campaign = subprocess.run(command, capture_output=True, text=True, check=False)
    assert campaign.returncode == 0, f"{' '.join(command)}\n{campaign.stderr}"
    found = json.loads(campaign.stdout)
    print(plan, found)
    assert found["kills"] >= kills
    assert found["pages"] > 0
