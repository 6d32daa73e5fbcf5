"""Real transformers; where it is not installed nothing here is collected. `install.sh` makes an environment."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]
