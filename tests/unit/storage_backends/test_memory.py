from __future__ import annotations

from dataclasses import replace

import pytest

from hicache.errors import ConfigError
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.storage import IDENTITY, chain, read_checked, run_of

LAYOUT = IDENTITY.layout


def test_a_budget_below_one_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds no page"):
        MemoryBackend(IDENTITY, LAYOUT.page_bytes - 1)


def test_a_codec_that_no_host_tier_has_is_refused() -> None:
    """Nobody would encode the pages: they are kept as they come."""
    with pytest.raises(ConfigError, match="cannot have codec 'zstd'"):
        MemoryBackend(replace(IDENTITY, codec="zstd"), 1 << 20)


def test_the_budget_is_exact() -> None:
    store = MemoryBackend(IDENTITY, 3 * LAYOUT.page_bytes)
    assert store.write([run_of(LAYOUT, chain("a", 5))]) == [3]
    assert store.write([run_of(LAYOUT, chain("b", 2))]) == [2]
    usage = store.usage()
    assert (usage.pages, usage.used_bytes, usage.evicted_pages) == (3, 3 * LAYOUT.page_bytes, 2)
    assert read_checked(store, LAYOUT, chain("a", 5)) == 1


def test_damage_to_an_absent_page_is_reported() -> None:
    assert not MemoryBackend(IDENTITY, 1 << 20).flip_byte(chain("a", 1)[0])
