"""Which blocks lie in host pages: a forest by chained block hashes, evicted leaf by leaf.

An entry is *ready* once its bytes are there; only ready entries are hits. Pins keep the page of an entry while a
job uses it. A discarded entry is unknown at once, its page is free when the last pin is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from hicache.errors import ProtocolError
from hicache.pages import PageAllocator
from hicache.policies.base import EvictionOrder
from hicache.policies.eviction import eviction_order
from hicache.policies.retention import Retention
from hicache.types import Tier


class Entry:
    """One block in host memory. `key` names it, `block_hash` is the engine's name of it, `start` tokens are before it.

    It is an `EntryView` for the eviction policies.
    """

    __slots__ = (
        "alive",
        "block_hash",
        "children",
        "created",
        "from_disk",
        "hits",
        "key",
        "page",
        "parent",
        "persisting",
        "pins",
        "priority",
        "ready",
        "retention",
        "start",
        "stored",
        "tick",
    )

    awaited = 0  # the engine does not show its queue

    def __init__(self, key: bytes, block_hash: bytes, start: int, parent: Entry | None, page: int) -> None:
        self.key, self.block_hash, self.start, self.parent, self.page = key, block_hash, start, parent, page
        self.children: set[Entry] = set()
        self.tick = self.created = 0
        self.hits = self.priority = self.pins = 0
        self.retention: Retention | None = None
        self.alive = True
        self.ready = False
        self.stored = False  # on disk, as far as is known
        self.persisting = False  # on its way there
        self.from_disk = False  # came from there and has not been used since

    @property
    def evictable(self) -> bool:
        return self.alive and self.ready and not self.pins and not self.children

    @property
    def lowest(self) -> int:
        return Tier.STORAGE if self.stored else Tier.HOST


class HostIndex:
    """The host pages of all ranks. `evicted` is told of every entry that leaves to make room."""

    def __init__(self, num_pages: int, eviction: str, evicted: Callable[[Entry], None]) -> None:
        self.pages = PageAllocator(num_pages)
        self._entries: dict[bytes, Entry] = {}
        self._order: EvictionOrder[Entry] = eviction_order(eviction, Tier.HOST)
        self._evicted = evicted
        self._tick = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def hits(self, keys: Sequence[bytes], start: int, stop: int) -> list[Entry]:
        """The ready entries of keys[start], keys[start + 1], ... before keys[stop], up to the first that is missing."""
        found = []
        for key in keys[start:stop]:
            entry = self._entries.get(key)
            if entry is None or not entry.ready:
                break
            found.append(entry)
        return found

    def use(self, entries: Iterable[Entry], priority: int = 0) -> None:
        """Count a use of each, as of now."""
        self._tick += 1
        for entry in entries:
            entry.tick = self._tick
            entry.hits += 1
            entry.priority = max(entry.priority, priority)
            if entry in self._order:
                self._order.touch(entry)

    def advance(self, now: float) -> None:
        """The clock shows `now`, in seconds."""
        self._order.advance(now)

    # ---- room -------------------------------------------------------------------------------

    def take_page(self) -> int | None:
        """A free page, of the next victim if there is none; None if everything is in use."""
        if not self.pages.free_pages:
            victim = self._order.first()
            if victim is None:
                return None
            self._order.evicted(victim)
            self.discard(victim)
            self._evicted(victim)
        pages = self.pages.alloc(1)
        assert pages is not None
        return int(pages[0])

    def give_page(self, page: int) -> None:
        self.pages.free(np.array([page], np.int32))

    # ---- entries ----------------------------------------------------------------------------

    def insert(self, entry: Entry) -> None:
        """A new entry that is not ready. Its parent is alive; None if the block before it is not known here."""
        if entry.key in self._entries or (entry.parent is not None and not entry.parent.alive):
            raise ProtocolError("a host entry is there already, or below one that is gone")
        self._tick += 1
        entry.tick = entry.created = self._tick
        self._entries[entry.key] = entry
        if entry.parent is not None:
            entry.parent.children.add(entry)
            self._refresh(entry.parent)

    def ready(self, entry: Entry) -> None:
        """The bytes of `entry` are there."""
        entry.hits += sum(known.hits for known in self._order.entered(entry))
        entry.ready = True
        self._refresh(entry)

    def pin(self, entry: Entry) -> None:
        entry.pins += 1
        self._refresh(entry)

    def unpin(self, entry: Entry) -> None:
        if not entry.pins:
            raise ProtocolError("a host entry was unpinned that is not pinned")
        entry.pins -= 1
        if entry.alive:
            self._refresh(entry)
        elif not entry.pins:
            self.give_page(entry.page)

    def discard(self, entry: Entry) -> list[Entry]:
        """Forget `entry` and all below it; returns what was known until now."""
        doomed, gone = [entry], []
        while doomed:
            one = doomed.pop()
            if one.alive:
                doomed += one.children
                self._remove(one)
                gone.append(one)
        return gone

    def _remove(self, entry: Entry) -> None:
        entry.alive = False
        self._refresh(entry)
        del self._entries[entry.key]
        if entry.parent is not None and entry.parent.alive:
            entry.parent.children.discard(entry)
            self._refresh(entry.parent)
        entry.children = set()
        entry.parent = None
        if not entry.pins:
            self.give_page(entry.page)

    def clear(self) -> int:
        """Forget everything; returns how many entries that were."""
        count = len(self._entries)
        for entry in self.entries():
            self.discard(entry)
        return count

    def _refresh(self, entry: Entry) -> None:
        tracked = entry in self._order
        if entry.evictable and not tracked:
            self._order.add(entry)
        elif tracked and not entry.evictable:
            self._order.discard(entry)

    # ---- integrity --------------------------------------------------------------------------

    def owned_pages(self) -> int:
        """Pages that are not free: those of entries, of dead ones that are still pinned, and those taken."""
        return self.pages.num_pages - self.pages.free_pages
