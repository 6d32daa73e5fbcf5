"""Tests that need a GPU: all in this folder are marked `gpu`, and skipped with a reason where there is none."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _missing()
    for item in items:
        if _FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def _missing() -> str:
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    return "" if find_spec("cupy") else "CuPy is not installed"
