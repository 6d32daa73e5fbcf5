"""From a configuration to a cache whose store cannot be opened, or not as it is."""

from __future__ import annotations

from typing import NoReturn

import pytest

from hicache import build
from hicache.build import build_cache
from hicache.config import CacheConfig, config_from_mapping
from hicache.errors import CapacityError, ConfigError, StoreIdentityError, StoreUnavailableError
from hicache.storage_backends.base import StorageBackend
from hicache.storage_backends.memory import MemoryBackend
from hicache.storage_backends.registry import BackendSpec


def config(**options: object) -> CacheConfig:
    storage = {"tier": "storage", "backend": "memory", "size": "1MiB", "threads": 1, **options}
    tiers = [{"tier": "device", "device": "cpu", "size": "1MiB"}, {"tier": "host", "size": "1MiB"}, storage]
    model = {"name": "example/build", "layers": 2, "kv_heads": 1, "head_dim": 16, "dtype": "float16"}
    return config_from_mapping({"model": model, "page_size": 16, "tiers": tiers}, source="b.yaml")


class Shop:
    """A registry that fails to open a store as often as it has errors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> None:
        self.errors = list(errors)
        monkeypatch.setattr(build, "create", self.create)

    def create(self, name: str, spec: BackendSpec) -> StorageBackend:
        if self.errors:
            raise self.errors.pop(0)
        return MemoryBackend(spec.identity, spec.budget_bytes)


def test_a_store_that_is_away_is_tried_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Shop(monkeypatch, StoreUnavailableError("another process looks it over", "busy"))
    cache = build_cache(config())
    stats = cache.stats()
    assert (stats.storage_loads, stats.storage_stores, stats.storage_pages) == ("off", "off", None)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "busy: another process looks it over" in caplog.text and "next try in 1 s" in caplog.text
    assert cache.tiers.storage is not None
    assert cache.tiers.storage.engine.backend.contains_prefix([]) == 0  # what the next try does
    cache.close()


@pytest.mark.parametrize("error", [ConfigError("no folder"), StoreIdentityError("another model")])
def test_a_store_that_does_not_fit_the_configuration_fails_the_build(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    Shop(monkeypatch, error)
    with pytest.raises(type(error), match=r"b\.yaml.*tiers\[2\].*(no folder|another model)"):
        build_cache(config())


@pytest.mark.parametrize("part", ["HostPool", "CopyEngine"])
def test_a_host_tier_that_cannot_be_made_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    closed: list[str] = []
    monkeypatch.setattr(MemoryBackend, "close", lambda backend: closed.append("store"))
    if part == "HostPool":
        monkeypatch.setattr(build, "HostPool", refuse)
    else:
        monkeypatch.setattr(build.CopyEngine, "between", refuse)
        monkeypatch.setattr(build.HostPool, "close", lambda pool: closed.append("host pool"))
    with pytest.raises(CapacityError, match=r"b\.yaml.*tiers\[1\]: no memory can be pinned"):
        build_cache(config())
    assert closed == {"HostPool": ["store"], "CopyEngine": ["host pool", "store"]}[part]


def refuse(*arguments: object) -> NoReturn:
    raise CapacityError("no memory can be pinned")


def test_options_of_the_storage_tier_arrive() -> None:
    admission = {"policy": "hits", "min_hits": 3}
    cache = build_cache(
        config(queue_time="2s", load_deadline="3s", store_deadline="4s", queue="8 pages", admission=admission)
    )
    storage = cache.tiers.storage
    assert storage is not None
    limits = storage.engine.limits
    assert (limits.queue_seconds, limits.load_deadline, limits.store_deadline) == (2.0, 3.0, 4.0)
    assert limits.queue_bytes == 8 * cache.layout.page_stride
    assert (storage.admission.mode, storage.admission.min_hits) == ("hits", 3)
    cache.close()
