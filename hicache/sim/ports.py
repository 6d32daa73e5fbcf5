"""What the replay asks of the cache: the part of HiCache and RequestManager that a scheduler drives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hicache.sim.standin import PagedPlanes
from hicache.sim.workload import TokenArray
from hicache.streams.base import Event, Stream
from hicache.types import PageIndices, PrefixKey


class LoadTicket(Protocol):
    """A load back to the device under way."""

    def layer_done(self, layer: int, /) -> Event: ...

    def failed(self) -> bool:
        """Has a layer failed?"""
        ...


class Admission(Protocol):
    """A request let in: how many of its tokens each tier serves, and the loads to wait for."""

    @property
    def device_len(self) -> int: ...
    @property
    def host_len(self) -> int: ...
    @property
    def storage_len(self) -> int: ...
    @property
    def loads(self) -> Sequence[LoadTicket]: ...


class Counters(Protocol):
    @property
    def demoted_pages(self) -> Mapping[str, int]: ...
    @property
    def dropped_pages(self) -> Mapping[str, int]: ...
    @property
    def moved_bytes(self) -> Mapping[str, int]: ...
    @property
    def failures(self) -> Mapping[str, int]: ...
    @property
    def storage_loads(self) -> str | None: ...
    @property
    def storage_stores(self) -> str | None: ...


class Cache(Protocol):
    def poll(self) -> object: ...
    def end_step(self, after: Event | None, /) -> object: ...
    def prefetch(self, rid: str, key: PrefixKey, /) -> object: ...
    def prefetch_ready(self, rid: str, /) -> bool: ...
    @property
    def in_flight(self) -> bool: ...
    def evictable_size(self) -> int: ...
    def protected_size(self) -> int: ...
    def stats(self) -> Counters: ...
    def check_integrity(self) -> object: ...

    def drain(self, timeout: float) -> bool:
        """Commit everything in flight; False if something still is after `timeout` seconds."""
        ...


class Requests(Protocol):
    """The request lifecycle. A request object is made by the caller and opaque to the replay."""

    def admit(self, req: Any, /) -> Admission | None: ...
    def extend(self, req: Any, upto_tokens: int, /) -> bool: ...
    def append(self, req: Any, token_ids: TokenArray, /) -> object: ...
    def commit(self, req: Any, upto_tokens: int, /) -> object: ...
    def cache_unfinished_req(self, req: Any, /) -> object: ...
    def cache_finished_req(self, req: Any, /) -> object: ...
    def retract(self, req: Any, /) -> object: ...
    def pages(self, req: Any, /) -> PageIndices: ...


class Pool(PagedPlanes, Protocol):
    """The device pool."""

    @property
    def num_pages(self) -> int: ...


class Allocator(Protocol):
    def available_size(self) -> int:
        """Free device tokens."""
        ...


class RequestFactory(Protocol):
    def __call__(self, rid: str, tokens: TokenArray, namespace: bytes, /) -> Any: ...


@dataclass(frozen=True)
class ReplayTarget:
    """The wired cache a replay drives. Requests longer than `max_context_len` tokens are skipped."""

    cache: Cache
    requests: Requests
    new_request: RequestFactory
    allocator: Allocator
    pool: Pool
    compute: Stream
    max_context_len: int
