"""Lets the tests in this folder import `serving_models`: pytest's importlib mode puts no folder on sys.path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
