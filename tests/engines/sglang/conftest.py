"""Real SGLang on a CPU; where it is not installed nothing here is collected. `install.sh` makes an environment."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import sglang_cpu

if sglang_cpu.installed():
    sglang_cpu.load()
else:
    collect_ignore_glob = ["test_*.py"]
