"""The disk tier: the pages of one identity in an LMDB store, encoded as its codec says."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from hicache.errors import ConfigError, StoreCorruptError, StoreUnavailableError
from hicache.hashing import Field, StoreIdentity
from hicache.layout import HostFormat
from hicache.storage_backends.base import Neighbour, PageRun, StorageBackend, StorageUsage, check_buffers, kept_format
from hicache.storage_backends.budget import MIN_PAGES, BudgetPlan, ValuesMode, page_cost
from hicache.storage_backends.checksums import page_checksum
from hicache.storage_backends.codecs import Codec, create_codec
from hicache.storage_backends.lmdb_env import Durability
from hicache.storage_backends.lmdb_index import POLICIES
from hicache.storage_backends.lmdb_opening import close_store, open_store
from hicache.storage_backends.lmdb_schema import Encoded, NewPage, PageRecord, Space
from hicache.storage_backends.recency import FLUSH_AT, RecentKeys

Eviction: TypeAlias = Literal["lru", "slru", "fifo"]

READ_ATTEMPTS = 3
"""A read that met a page being replaced goes on from there, this often."""

NOTES_PER_TTL = 8
"""How often within a TTL uses are written down where nothing else is written: ages are exact to a quarter of it."""

DECODE_PAGES = 16
"""Encoded pages that are read at a time: their scratch memory is kept by each thread."""


class LmdbBackend(StorageBackend):
    """A namespace of the store in the folder `path`, which is created. Several may share a folder, from one
    process or from several.

    `budget_bytes` bounds what index and slabs of the store take on disk, all namespaces together, as the
    file system counts it, at all times; whoever opens the store first sets it. `quota_bytes` bounds the
    pages of this namespace (0: not). Pages leave in the order of `eviction`, children before parents,
    and when they have not been used for `ttl` seconds (0: never); with fifo, since they were written.
    Pages survive a killed process as soon as `write` has returned; `durability` says what a power loss
    may take. `identity.codec` says how pages are encoded; with `encoded` they come and go encoded, as a host
    tier of that codec has them, and are kept as they are.

    A budget or quota that is lower than before and too low for the pages that are there needs `shrink`, which has them
    evicted. Raises ConfigError, with nothing changed, for that without `shrink`, and for a path, a budget or a codec
    that cannot be used, StoreIdentityError, with nothing
    changed on disk, if the folder holds something else, StoreUnavailableError if the store cannot be
    opened now. A store that cannot be trusted is set aside as PATH.aside-N and a new one begun.
    """

    def __init__(  # noqa: PLR0913 - one parameter per option of the tier
        self,
        path: Path | str,
        identity: StoreIdentity,
        budget_bytes: int,
        values: ValuesMode = "slab",
        durability: Durability = "batch",
        eviction: Eviction = "lru",
        ttl: float = 0.0,
        quota_bytes: int = 0,
        encoded: bool = False,
        shrink: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for field, value, choices in (
            ("values", values, get_args(ValuesMode)),
            ("durability", durability, get_args(Durability)),
            ("eviction", eviction, POLICIES),
        ):
            _check_choice(field, value, choices)
        self.identity = identity
        self._form = kept_format(identity) if encoded else HostFormat(identity.layout)
        self._page_bytes = self._form.page_bytes
        self._codec = None if encoded else create_codec(identity.codec, identity.layout)
        self._slots = self._codec.slot_bytes if self._codec is not None else (self._form.page_stride,)
        cost = page_cost(identity.layout, identity.codec, values)
        if quota_bytes and quota_bytes < MIN_PAGES * cost:
            raise ConfigError(
                f"a quota of {quota_bytes} bytes does not hold one batch of {MIN_PAGES} pages of {cost} bytes"
            )
        self._recent = RecentKeys()
        self._scratch = threading.local()
        self._damaged_pages = 0
        self._closed = False
        self._ttl = ttl
        self._clock = clock
        self._store = open_store(Path(path), BudgetPlan(values, budget_bytes, cost), durability, clock, shrink)
        rules = Space(policy=POLICIES.index(eviction), ttl_us=int(ttl * 1e6), quota=quota_bytes)
        try:
            self._number = self._store.join_space(identity.flat(), rules, shrink)
        except BaseException:
            close_store(self._store)
            raise

    @property
    def damaged_pages(self) -> int:
        """Pages removed because their bytes did not match their checksum."""
        return self._damaged_pages

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        self._check_open()
        self._expire()
        count = self._store.leading(self._number, keys)
        self._note(keys, count)
        return count

    def contains_each(self, keys: Sequence[bytes]) -> list[bool]:
        self._check_open()
        self._expire()
        return self._store.present(self._number, keys)

    def neighbours(self, keys_of: Callable[[Mapping[str, Field]], Sequence[bytes]]) -> list[Neighbour]:
        self._check_open()
        others = {number: fields for number, fields in self._store.labels().items() if number != self._number}
        return [Neighbour(fields, self._store.leading(number, keys_of(fields))) for number, fields in others.items()]

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        self._check_open()
        check_buffers(self._form, keys, buffers)
        self._expire()
        count = 0
        for _ in range(READ_ATTEMPTS):
            found, verified = self._read(keys[count:], buffers[count:])
            count += verified
            if verified == found or self._is_lost(keys[count]):
                break
        self._note(keys, count)
        return count

    def write(self, runs: Sequence[PageRun]) -> list[int]:
        self._check_open()
        for run in runs:
            check_buffers(self._form, run.keys, run.buffers)
        self._expire()
        return self._store.write(self._number, runs, self._encode, self._take_notes())

    def delete(self, keys: Sequence[bytes]) -> int:
        self._check_open()
        return self._store.delete(keys)

    def clear(self) -> int:
        self._check_open()
        return self._store.clear(self._number).pages

    def generation(self) -> int:
        self._check_open()
        return self._store.view(lambda view: view.space(self._number).generation)

    def usage(self) -> StorageUsage:
        self._check_open()
        space, state = self._store.view(lambda view: (view.space(self._number), view.state()))
        return StorageUsage(space.pages, self._store.used_bytes, state.budget_bytes, space.evicted + space.expired)

    def close(self) -> None:
        if self._closed or self._store.foreign:
            return
        self._closed = True
        self._store.touch_at_close(self._take_notes())
        close_store(self._store)

    def flip_byte(self, key: bytes) -> bool:
        """Damage a stored page, for drills; False if it is not stored."""
        return self._store.flip_byte(key)

    # ---- reading ------------------------------------------------------------------------------

    def _read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> tuple[int, int]:
        """How many leading pages are stored, and how many of those are in `buffers` now, verified."""
        if self._codec is None:
            records, verified = self._store.load(
                self._number,
                keys,
                lambda records: buffers,
                lambda number, record, buffer: self._is_intact(keys[number], record, buffer),
            )
            return len(records), verified
        found = verified = 0
        for start in range(0, len(keys), DECODE_PAGES):
            part = slice(start, start + DECODE_PAGES)
            part_found, part_verified = self._decode(self._codec, keys[part], buffers[part])
            found, verified = found + part_found, verified + part_verified
            if part_verified < len(keys[part]):
                break
        return found, verified

    def _is_intact(self, key: bytes, record: PageRecord, buffer: memoryview) -> bool:
        size = self._page_bytes
        return record.length == size and page_checksum(key, buffer[:size]) == record.checksum

    def _decode(self, codec: Codec, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> tuple[int, int]:
        """As `_read`, of few pages."""
        places = self._scratch_pages(len(keys))

        def decoded(number: int, record: PageRecord, place: memoryview) -> bool:
            data = place[: record.length]
            if page_checksum(keys[number], data) != record.checksum:
                return False
            try:
                codec.decode(data, buffers[number])
            except StoreCorruptError:
                return False
            return True

        records, verified = self._store.load(
            self._number,
            keys,
            lambda found: [place[: record.slot_bytes] for place, record in zip(places, found)],
            decoded,
        )
        return len(records), verified

    def _is_lost(self, key: bytes) -> bool:
        """False if the page that failed its checksum had only been moved by a writer; else it is removed."""
        removed = self._store.remove_damaged(key)
        self._damaged_pages += removed > 0
        return removed > 0 or not self._store.leading(self._number, [key])

    def _note(self, keys: Sequence[bytes], count: int) -> None:
        self._recent.note(keys, count, self._clock())
        if len(self._recent) >= FLUSH_AT:
            self._store.touch(self._take_notes())

    def _take_notes(self) -> list[bytes]:
        """Pages to be stamped with the present time: of those that may expire, none that was used long before."""
        return self._recent.take(self._clock() - 2 * self._ttl / NOTES_PER_TTL if self._ttl else 0.0)

    # ---- writing ------------------------------------------------------------------------------

    def _encode(self, page: NewPage) -> Encoded:
        if self._codec is None:
            return Encoded(self._page_bytes, self._slots[0], page.buffer)
        scratch = memoryview(mmap.mmap(-1, self._slots[-1]))
        length = self._codec.encode(page.buffer[: self._page_bytes], scratch)
        slot_bytes = next(size for size in self._slots if size >= length)
        return Encoded(length, slot_bytes, scratch[:slot_bytes])

    def _scratch_pages(self, count: int) -> list[memoryview]:
        """Aligned memory for encoded pages, this thread's own."""
        size = self._slots[-1]
        if getattr(self._scratch, "count", 0) < count:
            self._scratch.arena = memoryview(mmap.mmap(-1, DECODE_PAGES * size))
            self._scratch.count = DECODE_PAGES
        return [self._scratch.arena[start : start + size] for start in range(0, count * size, size)]

    def _expire(self) -> None:
        """Remove what has not been used for too long; first write down what has been used, if that is due."""
        if not self._ttl:
            return
        if self._recent.older_than(self._clock() - self._ttl / NOTES_PER_TTL):
            self._store.touch(self._take_notes())
        self._store.expire(self._number)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError(f"{self._store.name} is closed", "closed")


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{field} is {value!r}, use one of {', '.join(choices)}")
