"""Storage backends by name: those that ship, those a program registers, those other packages offer.

A package offers a backend as an entry point: name = the backend's name, object = a factory.

    [project.entry-points."hicache.storage_backends"]
    redis = "my_package.hicache_redis:create"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeAlias

from hicache.errors import ConfigError
from hicache.hashing import StoreIdentity
from hicache.storage_backends.base import StorageBackend

ENTRY_POINT_GROUP = "hicache.storage_backends"


@dataclass(frozen=True)
class BackendSpec:
    """What a factory gets: whose pages are stored, how many bytes they may take, where, and its own options."""

    identity: StoreIdentity
    budget_bytes: int
    path: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def check_options(self, backend: str, *known: str) -> None:
        """Raises ConfigError for an option that `backend` does not have."""
        for name in self.options:
            if name not in known:
                raise ConfigError(f"storage backend {backend!r} has no option {name!r}{_suggestion(name, known)}")


BackendFactory: TypeAlias = Callable[[BackendSpec], StorageBackend]


@dataclass(frozen=True)
class _Registration:
    factory: BackendFactory
    install_hint: str


_registered: dict[str, _Registration] = {}


def register(name: str, factory: BackendFactory, install_hint: str = "") -> None:
    """Make `create(name, ...)` call `factory`.

    `install_hint` completes the error message if the factory raises ImportError. Raises ConfigError
    if the name is taken: a backend is never replaced silently.
    """
    if name in names():
        raise ConfigError(f"storage backend {name!r} is registered already, choose another name")
    _registered[name] = _Registration(factory, install_hint)


def names() -> list[str]:
    """Every backend that `create` knows, sorted."""
    return sorted(_registered.keys() | {point.name for point in entry_points(group=ENTRY_POINT_GROUP)})


def create(name: str, spec: BackendSpec) -> StorageBackend:
    """Open the backend `name`. Raises ConfigError if it is unknown, ambiguous or not installed."""
    registration = _registered.get(name) or _from_entry_point(name)
    try:
        return registration.factory(spec)
    except ImportError as error:
        hint = registration.install_hint or f"install what it needs ({error})"
        raise ConfigError(f"storage backend {name!r} cannot be loaded: {error}; {hint}") from error


def _from_entry_point(name: str) -> _Registration:
    points = tuple(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not points:
        known = names()
        raise ConfigError(f"storage backend {name!r} is not known{_suggestion(name, known)}; known: {', '.join(known)}")
    if len(points) > 1:
        offers = " and ".join(point.value for point in points)
        raise ConfigError(f"storage backend {name!r} is offered twice, by {offers}; uninstall one of them")
    return _Registration(_load(points[0]), f"check the package that offers {points[0].value!r}")


def _load(point: EntryPoint) -> BackendFactory:
    def factory(spec: BackendSpec) -> StorageBackend:
        made = point.load()(spec)
        if not isinstance(made, StorageBackend):
            raise ConfigError(f"storage backend {point.name!r}: {point.value} did not return a StorageBackend")
        return made

    return factory


def _suggestion(name: str, known: list[str] | tuple[str, ...]) -> str:
    close = get_close_matches(name, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _create_memory(spec: BackendSpec) -> StorageBackend:
    from hicache.storage_backends.memory import MemoryBackend

    spec.check_options("memory")
    return MemoryBackend(spec.identity, spec.budget_bytes)


def _create_lmdb(spec: BackendSpec) -> StorageBackend:
    from hicache.storage_backends.lmdb_backend import LmdbBackend

    spec.check_options("lmdb", "values", "durability", "eviction", "ttl", "quota_bytes", "encoded", "shrink")
    if spec.path is None:
        raise ConfigError("storage backend 'lmdb' needs a path: the folder it keeps its files in")
    return LmdbBackend(spec.path, spec.identity, spec.budget_bytes, **spec.options)


register("memory", _create_memory)
register("lmdb", _create_lmdb, "pip install lmdb xxhash")
