"""What a storage tier must do: blocking batch operations over pages named by digests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hicache.errors import ProtocolError
from hicache.hashing import Field, StoreIdentity
from hicache.layout import HostFormat


@dataclass(frozen=True)
class PageRun:
    """Consecutive pages of one prefix chain to be written.

    `keys[i+1]` is the child of `keys[i]`; `parent` is the digest before `keys[0]`, None at the start of a
    chain. `buffers[i]` holds the bytes of page `keys[i]`. A run made for another `generation` than the
    store's is too late, its pages were flushed: it is not stored. None: it is of any.
    """

    keys: Sequence[bytes]
    buffers: Sequence[memoryview]
    parent: bytes | None
    generation: int | None = None


class Neighbour(NamedTuple):
    """Another identity that the store is for: its fields as `StoreIdentity.flat` names them, and how many of the keys
    that were made for it are there."""

    fields: Mapping[str, Field]
    leading: int


@dataclass(frozen=True)
class StorageUsage:
    """`pages` and `evicted_pages` are this identity's. Bytes are the medium's, all identities together, as the
    medium counts them; `budget_bytes` is None where the backend is unbounded."""

    pages: int
    used_bytes: int
    budget_bytes: int | None
    evicted_pages: int


def kept_format(identity: StoreIdentity) -> HostFormat:
    """The pages of a store that keeps them as they come, so that its codec is the host tier's.

    Raises ConfigError if no host tier has this codec.
    """
    return HostFormat(identity.layout, identity.codec)


def check_buffers(form: HostFormat, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
    """Raises ProtocolError unless there is one buffer of page_bytes or page_stride bytes for each key."""
    if len(keys) != len(buffers):
        raise ProtocolError(f"{len(keys)} keys came with {len(buffers)} buffers")
    sizes = (form.page_stride, form.page_bytes)
    for buffer in buffers:
        if buffer.nbytes not in sizes:
            raise ProtocolError(f"a buffer has {buffer.nbytes} bytes, a page has {sizes[1]} ({sizes[0]} padded)")


class StorageBackend(ABC):
    """A place for pages that outlives host memory.

    Calls block and may come from several threads of the storage engine at once. `keys` are 32-byte
    page digests of consecutive pages of one prefix chain: keys[i+1] is the child of keys[i]. Buffers
    are host pages of `page_bytes` bytes (`kept_format` of the identity), 4 KiB-aligned and 4 KiB-padded
    when they come from a host pool, so that `memoryview` slices can be given to O_DIRECT.

    `identity` tells whose pages it keeps; None where that is not known, as of a wrapper.

    Nothing else here is optional. A backend signals trouble by raising StorageError; whatever it raises,
    pages that were not reported as written or read are absent to the caller.
    """

    identity: StoreIdentity | None = None

    @abstractmethod
    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """Number of leading keys present. A hint: found is not readable until `read_into` says so."""

    def contains_each(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` are stored, whether or not they belong to one chain; a hint, as in `contains_prefix`."""
        return [self.contains_prefix([key]) == 1 for key in keys]

    @abstractmethod
    def read_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        """Read leading pages into writable `buffers`; returns how many were read AND verified.

        Stops at the first page that is absent, short or fails its checksum; the index entry of such
        a page is removed. Buffers beyond the returned count hold garbage.
        """

    @abstractmethod
    def write(self, runs: Sequence[PageRun]) -> list[int]:
        """Store runs in one transaction; returns how many leading pages of each run are stored.

        A page that was present before counts as stored. A page whose parent is not in the store is
        not written: it could never be reached. Parents are evicted after their children only.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove pages and everything below them; returns the number of pages removed."""

    @abstractmethod
    def clear(self) -> int:
        """Remove every page of this identity and move its generation on; returns the number of pages removed."""

    @abstractmethod
    def generation(self) -> int:
        """How often this identity's pages have been cleared, by whomever. Cheap: asked for every batch."""

    @abstractmethod
    def usage(self) -> StorageUsage: ...

    def neighbours(self, keys_of: Callable[[Mapping[str, Field]], Sequence[bytes]]) -> list[Neighbour]:
        """What the store has for its other identities, for those who ask why nothing is found. `keys_of` gives the
        keys to look for from an identity's fields. None where each identity has a store of its own."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Make acknowledged pages durable as configured and release files. Idempotent."""
