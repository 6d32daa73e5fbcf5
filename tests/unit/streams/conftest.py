"""Lets the tests in this folder import `fake_cuda`: pytest's importlib mode puts no folder on sys.path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.streams.cuda_events import event_pool

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def pools_of_their_own() -> Iterator[None]:
    """No events of the fake device in a pool of the real one, nor the other way round."""
    event_pool.cache_clear()
    yield
    event_pool.cache_clear()
