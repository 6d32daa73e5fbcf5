"""The promises of a storage backend as tests: subclass `StorageConformance` in the tests of a backend."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import TypeAlias

from hicache.errors import HiCacheError, ProtocolError, StoreUnavailableError
from hicache.hashing import StoreIdentity
from hicache.layout import HostFormat, KVLayout
from hicache.storage_backends.base import PageRun, StorageBackend, kept_format

OpenBackend: TypeAlias = Callable[[], StorageBackend]

Pages: TypeAlias = KVLayout | HostFormat
"""What says how long a page is."""

IDENTITY = StoreIdentity(KVLayout(num_layers=2, num_kv_heads=1, head_dim=64, page_size=8), model="conformance")
"""Pages of 4 KiB."""


def chain(name: str, length: int) -> list[bytes]:
    """Keys of a chain of pages; chains of different names share no key."""
    return [sha256(f"{name}/{number}".encode()).digest() for number in range(length)]


def blank_pages(layout: Pages, count: int) -> list[memoryview]:
    """Aligned and padded host pages."""
    if not count:
        return []
    view = memoryview(mmap.mmap(-1, count * layout.page_stride))
    return [view[start : start + layout.page_stride] for start in range(0, view.nbytes, layout.page_stride)]


def content(layout: Pages, key: bytes) -> bytes:
    """The bytes that the suite stores under a key: no two keys have the same."""
    return (key * (layout.page_bytes // len(key) + 1))[: layout.page_bytes]


def filled_pages(layout: Pages, keys: Sequence[bytes]) -> list[memoryview]:
    pages = blank_pages(layout, len(keys))
    for page, key in zip(pages, keys):
        page[: layout.page_bytes] = content(layout, key)
    return pages


def run_of(layout: Pages, keys: Sequence[bytes], parent: bytes | None = None) -> PageRun:
    return PageRun(keys, filled_pages(layout, keys), parent)


def read_checked(backend: StorageBackend, layout: Pages, keys: Sequence[bytes]) -> int:
    """Read leading pages and compare every byte of those that count as read."""
    pages = blank_pages(layout, len(keys))
    count = backend.read_into(keys, pages)
    for key, page in zip(keys[:count], pages):
        assert page[: layout.page_bytes] == content(layout, key), f"wrong bytes for page {key.hex()}"
    return count


def raises(expected: type[HiCacheError], call: Callable[[], object]) -> None:
    try:
        call()
    except expected:
        return
    raise AssertionError(f"{expected.__name__} was not raised")


class StorageConformance:
    """Tests that every backend passes. Collected by pytest in a subclass, which gives a fixture

        backend_factory() -> StorageBackend     opens the same store, empty at first, each time

    for `identity`, with a budget of at most 1000 pages. `persistent`: pages outlive `close`. `encoded`: pages come as
    a host tier with the codec of the identity has them.
    """

    identity = IDENTITY
    persistent = False
    encoded = False

    @property
    def layout(self) -> Pages:
        return kept_format(self.identity) if self.encoded else self.identity.layout

    def damage(self, backend: StorageBackend, key: bytes) -> None:
        """Change a byte of a stored page behind the backend's back."""
        raise NotImplementedError

    def write(self, backend: StorageBackend, keys: Sequence[bytes], parent: bytes | None = None) -> int:
        return backend.write([run_of(self.layout, keys, parent)])[0]

    def read(self, backend: StorageBackend, keys: Sequence[bytes]) -> int:
        return read_checked(backend, self.layout, keys)

    def fill(self, backend: StorageBackend, keep: Sequence[bytes] = ()) -> list[list[bytes]]:
        """Write chains of 20 pages until 100 pages have been evicted, reading `keep` all the time."""
        chains: list[list[bytes]] = []
        while backend.usage().evicted_pages < 100:
            chains.append(chain(f"fill {len(chains)}", 20))
            assert self.write(backend, chains[-1]) == 20
            assert self.read(backend, keep) == len(keep)
            assert len(chains) < 500, "nothing is evicted"
        return chains

    # ---- reading and writing ------------------------------------------------------------------

    def test_nothing_is_in_an_empty_store(self, backend_factory: OpenBackend) -> None:
        backend = backend_factory()
        assert backend.contains_prefix(chain("a", 3)) == 0
        assert self.read(backend, chain("a", 3)) == 0
        assert backend.contains_prefix([]) == 0
        assert backend.write([]) == []
        assert backend.usage().pages == 0

    def test_pages_come_back(self, backend_factory: OpenBackend) -> None:
        backend, keys = backend_factory(), chain("a", 40)
        assert self.write(backend, keys) == 40
        assert backend.contains_prefix(keys) == 40
        assert self.read(backend, keys) == 40
        assert self.read(backend, keys[7:9]) == 2

    def test_the_leading_pages_count(self, backend_factory: OpenBackend) -> None:
        backend, keys = backend_factory(), chain("a", 9)
        self.write(backend, keys[:4])
        assert backend.contains_prefix(keys) == 4
        assert self.read(backend, keys) == 4
        assert self.read(backend, [*chain("b", 1), *keys[:2]]) == 0

    def test_buffers_need_neither_alignment_nor_padding(self, backend_factory: OpenBackend) -> None:
        backend, keys, size = backend_factory(), chain("a", 3), self.layout.page_bytes
        arena = memoryview(bytearray(1 + 3 * size))
        pages = [arena[start : start + size] for start in range(1, 1 + 3 * size, size)]
        for page, key in zip(pages, keys):
            page[:] = content(self.layout, key)
        assert backend.write([PageRun(keys, pages, None)]) == [3]
        arena[:] = bytes(arena.nbytes)
        assert backend.read_into(keys, pages) == 3
        assert [page.tobytes() for page in pages] == [content(self.layout, key) for key in keys]
        assert self.read(backend, keys) == 3

    def test_a_rewrite_counts_as_stored(self, backend_factory: OpenBackend) -> None:
        backend, keys = backend_factory(), chain("a", 6)
        assert self.write(backend, keys[:4]) == 4
        assert self.write(backend, keys) == 6
        assert self.write(backend, keys[2:5], parent=keys[1]) == 3
        assert backend.usage().pages == 6
        assert self.read(backend, keys) == 6

    def test_a_page_without_its_parent_is_not_written(self, backend_factory: OpenBackend) -> None:
        backend, keys = backend_factory(), chain("a", 4)
        assert self.write(backend, keys[2:], parent=keys[1]) == 0
        assert backend.usage().pages == 0
        assert backend.write([run_of(self.layout, keys[:2]), run_of(self.layout, keys[2:], keys[1])]) == [2, 2]
        assert self.read(backend, keys) == 4

    def test_a_buffer_of_another_size_is_refused(self, backend_factory: OpenBackend) -> None:
        backend, keys = backend_factory(), chain("a", 1)
        odd = [memoryview(bytearray(self.layout.page_bytes - 1))]
        raises(ProtocolError, lambda: backend.read_into(keys, odd))
        raises(ProtocolError, lambda: backend.write([PageRun(keys, odd, None)]))
        raises(ProtocolError, lambda: backend.write([PageRun(keys, [], None)]))

    # ---- removing -----------------------------------------------------------------------------

    def test_delete_takes_what_is_below(self, backend_factory: OpenBackend) -> None:
        backend, stem, left, right = backend_factory(), chain("stem", 3), chain("left", 4), chain("right", 2)
        self.write(backend, stem)
        self.write(backend, left, parent=stem[1])
        self.write(backend, right, parent=left[0])
        assert backend.delete([left[0], left[1]]) == 6
        assert backend.contains_prefix(stem) == 3
        assert backend.contains_prefix(left) == backend.contains_prefix(right) == 0
        assert backend.delete([left[0]]) == 0
        assert self.write(backend, left, parent=stem[1]) == 4
        assert backend.usage().pages == 7

    def test_clear_takes_everything(self, backend_factory: OpenBackend) -> None:
        backend, keys = backend_factory(), chain("a", 5)
        self.write(backend, keys)
        assert backend.clear() == 5
        assert backend.usage().pages == 0
        assert backend.contains_prefix(keys) == self.read(backend, keys) == 0
        assert self.write(backend, keys) == 5
        assert self.read(backend, keys) == 5

    def test_a_late_write_does_not_bring_cleared_pages_back(self, backend_factory: OpenBackend) -> None:
        backend, keys = backend_factory(), chain("a", 5)
        before = backend.generation()
        late = PageRun(keys, filled_pages(self.layout, keys), None, before)
        assert backend.write([late]) == [5]
        backend.clear()
        assert backend.generation() != before
        assert backend.write([late]) == [0]
        assert backend.contains_prefix(keys) == 0
        assert backend.write([replace(late, generation=backend.generation())]) == [5]
        assert self.read(backend, keys) == 5

    def test_a_damaged_page_is_a_miss_and_goes(self, backend_factory: OpenBackend) -> None:
        backend, keys = backend_factory(), chain("a", 8)
        self.write(backend, keys)
        self.damage(backend, keys[5])
        assert self.read(backend, keys) == 5
        assert backend.contains_prefix(keys) == 5
        assert backend.usage().pages == 5
        assert self.write(backend, keys) == 8
        assert self.read(backend, keys) == 8

    # ---- the budget ---------------------------------------------------------------------------

    def test_the_budget_holds_and_children_go_first(self, backend_factory: OpenBackend) -> None:
        backend = backend_factory()
        chains = self.fill(backend)
        usage = backend.usage()
        assert usage.budget_bytes is not None
        assert usage.used_bytes <= usage.budget_bytes
        stored = 0
        for keys in chains:
            present = [backend.contains_prefix([key]) for key in keys]
            assert present == sorted(present, reverse=True), "a page is stored without its parent"
            stored += sum(present)
        assert stored == usage.pages
        assert self.read(backend, chains[-1]) == 20
        assert backend.contains_prefix(chains[0]) == 0

    def test_what_is_read_stays_with_its_ancestors(self, backend_factory: OpenBackend) -> None:
        backend, stem, tail = backend_factory(), chain("stem", 10), chain("tail", 5)
        self.write(backend, stem)
        self.write(backend, tail, parent=stem[-1])
        self.fill(backend, keep=tail)
        assert self.read(backend, [*stem, *tail]) == 15

    def test_what_is_written_again_stays(self, backend_factory: OpenBackend) -> None:
        backend, keys, number = backend_factory(), chain("a", 10), 0
        self.write(backend, keys)
        while (evicted := backend.usage().evicted_pages) < 1500:
            assert self.write(backend, keys) == 10
            assert backend.usage().evicted_pages == evicted, "it was gone, others had to make room"
            self.write(backend, chain(f"other {number}", 20))
            number += 1

    def test_a_run_larger_than_the_store_is_stored_in_part(self, backend_factory: OpenBackend) -> None:
        backend, keys = backend_factory(), chain("long", 1200)
        count = self.write(backend, keys)
        assert 0 < count < 1200
        assert backend.contains_prefix(keys) == count
        assert self.read(backend, keys) == count

    # ---- lifetime -----------------------------------------------------------------------------

    def test_a_closed_backend_refuses_work(self, backend_factory: OpenBackend) -> None:
        backend, keys = backend_factory(), chain("a", 1)
        backend.close()
        backend.close()
        for call in (
            lambda: backend.contains_prefix(keys),
            lambda: self.read(backend, keys),
            lambda: self.write(backend, keys),
            lambda: backend.delete(keys),
            backend.clear,
            backend.usage,
        ):
            raises(StoreUnavailableError, call)

    def test_a_persistent_store_keeps_its_pages(self, backend_factory: OpenBackend) -> None:
        backend, keys = backend_factory(), chain("a", 30)
        self.write(backend, keys)
        backend.close()
        backend = backend_factory()
        assert self.read(backend, keys) == (30 if self.persistent else 0)

    def test_readers_beside_a_writer_never_see_wrong_bytes(self, backend_factory: OpenBackend) -> None:
        """The writer evicts all the time, so that the room of pages being read is used for others."""
        backend, chains = backend_factory(), [chain(f"busy {number}", 20) for number in range(100)]
        failures: list[BaseException] = []
        done = threading.Event()

        def read_all() -> None:
            try:
                while not done.is_set():
                    for keys in chains:
                        self.read(backend, keys)
            except BaseException as error:
                failures.append(error)

        readers = [threading.Thread(target=read_all) for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            for _ in range(3):
                for keys in chains:
                    assert self.write(backend, keys) == 20
        finally:
            done.set()
            for reader in readers:
                reader.join()
        assert not failures, failures
        assert backend.usage().evicted_pages > 0
