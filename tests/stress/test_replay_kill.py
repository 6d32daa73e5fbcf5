"""A replay killed in the middle is started again on the same store: it opens, hits and has no wrong page."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hicache.errors import HiCacheError
from hicache.storage_backends.lmdb_opening import close_store, open_existing

CONFIG = """
model: {{name: stand-in, layers: 2, kv_heads: 1, head_dim: 8, dtype: float16}}
page_size: 16
poison: true
tiers:
  - {{tier: device, device: cpu, size: 40000 tokens}}
  - {{tier: host, size: 60000 tokens}}
  - {{tier: storage, path: {store}, size: 400000 tokens, prefetch: {{policy: wait_complete, deadline: 10s}}}}
"""
WORKLOAD = "chats:seed=5,conversations=40"


def replay(config: Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "hicache", "replay", WORKLOAD]
    return [*command, "--config", str(config), "--verify", "--json", *options]


@pytest.mark.stress
def test_a_killed_replay_goes_on_from_what_was_committed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    config = tmp_path / "tiers.yaml"
    config.write_text(CONFIG.format(store=store))
    for _ in range(3):
        running = subprocess.Popen(replay(config), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_pages(store, running)
        running.send_signal(signal.SIGKILL)
        running.wait()
        again = subprocess.run(replay(config, "--limit", "8"), capture_output=True, text=True, check=False)
        assert again.returncode == 0, again.stderr
        result = json.loads(again.stdout)  # so few requests that they demote nothing to storage themselves
        assert result["wrong_pages"] == 0
        assert result["hit_tokens"]["storage"] > 0
        assert sum(result["hit_tokens"].values()) + result["computed_tokens"] == result["prompt_tokens"]
    assert not list(tmp_path.glob("store.aside-*"))


def wait_for_pages(store: Path, running: subprocess.Popen[bytes]) -> None:
    """Until thousands of pages are stored, some of them by this process."""
    before, until = committed(store)[1], time.monotonic() + 60
    while running.poll() is None and time.monotonic() < until:
        pages, clock = committed(store)
        if pages >= 2000 and clock > before:
            return
        time.sleep(0.05)


def committed(store: Path) -> tuple[int, int]:
    """Pages that are stored, and a number that moves with every commit; zeros before there is a store."""
    try:
        opened = open_existing(store)
    except HiCacheError:
        return 0, 0
    try:
        return opened.view(lambda view: (sum(space.pages for space in view.spaces().values()), view.state().clock))
    finally:
        close_store(opened)
