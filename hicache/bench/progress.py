"""How a benchmark tells what it is at."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]
