"""What every eviction order is: the entries of one tier that may go now, and which of them goes first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar
from zlib import crc32

from hicache.policies.retention import Retention


class EntryView(Protocol):
    """What a policy may know of an entry. Ticks are the tree's logical clock, one per match or insertion."""

    @property
    def tick(self) -> int:
        """Of its last use."""
        ...

    @property
    def created(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def key(self) -> bytes:
        """Names its content, and its length is its size: a node's tokens, 4 bytes each."""
        ...

    @property
    def start(self) -> int:
        """Tokens before it in its prompt."""
        ...

    @property
    def awaited(self) -> int:
        """Requests that wait and will hit it."""
        ...

    @property
    def retention(self) -> Retention | None: ...

    @property
    def lowest(self) -> int:
        """The lowest tier that has a copy: 0 the device, 1 the host, 2 storage."""
        ...


E = TypeVar("E", bound=EntryView)

IDENTITY_BYTES = 64
"""The leading bytes of an entry's key by which it is known again: 16 tokens."""


def identity(key: bytes, offset: int = 0) -> int:
    """A number for the content that starts at `offset` of `key`, the same in every process: ranks must agree.

    It is a hint: equal content under another prefix is taken for the same.
    """
    return crc32(key[offset : offset + IDENTITY_BYTES])


class Remembered(NamedTuple):
    """`size` bytes of a key that were evicted, and how often they were hit, with this use."""

    size: int
    hits: int


class EvictionOrder(ABC, Generic[E]):
    """The evictable entries of one tier, in the order they should go.

    A request locks what it uses: an entry that is hit leaves the order and comes back. Halves of a split
    entry come back too: the lower one is the same object, the upper one is new and has the history of both.
    What an order keeps beside the entries it tracks must be bounded.
    """

    @abstractmethod
    def add(self, entry: E) -> None:
        """`entry` became evictable; it is not tracked yet."""

    @abstractmethod
    def discard(self, entry: E) -> None:
        """`entry` is no longer evictable; it is tracked."""

    @abstractmethod
    def touch(self, entry: E) -> None:
        """`entry`, which is tracked, was used: its tick and hits have just been raised."""

    @abstractmethod
    def first(self) -> E | None:
        """The next victim, still tracked."""

    @abstractmethod
    def __contains__(self, entry: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    def evicted(self, entry: E) -> None:
        """`entry`, which is tracked, was evicted. An order with ghosts remembers it here."""
        self.discard(entry)

    def entered(self, entry: E) -> Sequence[Remembered]:
        """A copy of `entry` comes to the tier, computed or loaded; it is not tracked yet.

        Returns what is remembered of its content since that was evicted from here, from the start of `entry` on:
        the whole, a part or nothing.
        """
        return ()

    def advance(self, now: float) -> None:
        """The clock shows `now`, in seconds, and did not go back. Told once a step."""
