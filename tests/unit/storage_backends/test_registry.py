from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.errors import ConfigError
from hicache.storage_backends import registry
from hicache.storage_backends.base import StorageBackend
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.storage_backends.memory import MemoryBackend
from hicache.storage_backends.registry import BackendSpec, create, names, register
from hicache.testing.storage import IDENTITY

SPEC = BackendSpec(IDENTITY, 4 << 20)


@pytest.fixture(autouse=True)
def restored_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    yield


def test_backends_that_ship(tmp_path: Path) -> None:
    assert {"lmdb", "memory"} <= set(names())
    assert isinstance(create("memory", SPEC), MemoryBackend)
    spec = BackendSpec(IDENTITY, 4 << 20, tmp_path / "s", {"values": "inline", "durability": "none"})
    store = create("lmdb", spec)
    assert isinstance(store, LmdbBackend)
    store.close()


def test_a_name_is_never_replaced() -> None:
    with pytest.raises(ConfigError, match="'memory' is registered already"):
        register("memory", lambda spec: MemoryBackend(spec.identity, spec.budget_bytes))
    register("mine", lambda spec: MemoryBackend(spec.identity, spec.budget_bytes))
    assert isinstance(create("mine", SPEC), MemoryBackend)


def test_an_unknown_name_comes_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'lmdb'") as raised:
        create("lmbd", SPEC)
    assert "memory" in str(raised.value)


def test_an_unknown_option_comes_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="no option 'value', did you mean 'values'"):
        create("lmdb", BackendSpec(IDENTITY, 4 << 20, Path("s"), {"value": "slab"}))


def test_lmdb_needs_a_path() -> None:
    with pytest.raises(ConfigError, match="needs a path"):
        create("lmdb", SPEC)


def test_a_missing_package_comes_with_its_install_hint() -> None:
    def factory(spec: BackendSpec) -> StorageBackend:
        raise ImportError("No module named 'elsewhere'")

    register("elsewhere", factory, "pip install elsewhere")
    with pytest.raises(ConfigError, match="pip install elsewhere"):
        create("elsewhere", SPEC)
