"""The Python in docs/policies.md runs, and the policy in it passes the suite that the page recommends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from hicache.policies.eviction import EVICTION_POLICIES

DOCS = Path(__file__).parents[3] / "docs"
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def page() -> str:
    return (DOCS / "policies.md").read_text()


def snippets() -> list[str]:
    return CODE.findall(page().partition("## Add one")[2])


def test_a_policy_takes_thirty_lines() -> None:
    policy = snippets()[0]
    assert "class DeepLast(EvictionOrder[E])" in policy
    assert sum(bool(line.strip()) for line in policy.splitlines()) <= 30


def test_the_policy_of_the_page_passes_the_suite_and_can_be_configured(tmp_path: Path) -> None:
    """In a pytest of its own, so that it registers its name there."""
    module = tmp_path / "test_page.py"
    configured = """

def test_it_can_be_configured() -> None:
    from hicache.config import parse_config

    config = parse_config(
        "model: {name: tiny, layers: 1, kv_heads: 1, head_dim: 2, dtype: int8}\\n"
        "tiers: [{tier: device, size: 640 tokens, eviction: deep_last}]"
    )
    assert config.device.eviction == "deep_last"
"""
    module.write_text("\n".join(snippets()) + configured)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", str(module)]
    root = str(DOCS.parent)
    run = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, text=True, capture_output=True)
    assert run.returncode == 0, run.stdout
    assert re.search(r"\b2[0-9]+ passed", run.stdout), run.stdout


def test_the_page_knows_every_policy() -> None:
    named = set(re.findall(r"`(\w+)`", page()))
    assert set(EVICTION_POLICIES) <= named
