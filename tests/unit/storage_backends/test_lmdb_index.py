"""The index against a plain dictionary of pages: what it holds, who goes when room is wanted, and its counters."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hicache.errors import StoreCorruptError
from hicache.storage_backends.base import PageRun
from hicache.storage_backends.lmdb_env import IndexEnvironment
from hicache.storage_backends.lmdb_eviction import Eviction, evict, expire
from hicache.storage_backends.lmdb_index import POLICIES, IndexWriter
from hicache.storage_backends.lmdb_order import PROBATION, PROTECTED
from hicache.storage_backends.lmdb_schema import Encoded, IndexState, PageRecord, Space
from hicache.testing.audit import audit_index
from hicache.testing.storage import chain

NO_PAGE = memoryview(b"")
NEVER = float("inf")


@dataclass
class Page:
    space: int
    parent: bytes | None
    length: int
    location: int
    stamp: int
    segment: int = PROBATION


@dataclass
class Model:
    """What the index should hold: nothing is counted or kept in order, everything is looked for among all pages."""

    policies: dict[int, str]
    pages: dict[bytes, Page] = field(default_factory=dict)
    clock: int = 0
    locations: int = 0

    def stamp(self) -> int:
        self.clock += 1
        return self.clock

    def leaves(self, space: int) -> list[bytes]:
        """In the order in which they would go."""
        parents = {page.parent for page in self.pages.values()}
        keys = [key for key, page in self.pages.items() if page.space == space and key not in parents]
        return sorted(keys, key=lambda key: (self.pages[key].segment, self.pages[key].stamp))

    def add(self, space: int, key: bytes, parent: bytes | None, length: int) -> None:
        self.pages[key] = Page(space, parent, length, self.locations, self.stamp())
        self.locations += 1

    def use(self, key: bytes) -> None:
        page = self.pages[key]
        if self.policies[page.space] == "fifo":
            return
        page.stamp = self.stamp()
        if self.policies[page.space] == "slru":
            page.segment = PROTECTED
        leaves = self.leaves(page.space)
        protected = [self.pages[leaf] for leaf in leaves if self.pages[leaf].segment == PROTECTED]
        if key in leaves and len(protected) > 0.8 * len(leaves):
            protected[0].segment, protected[0].stamp = PROBATION, self.stamp()

    def evict(self, spaces: list[int], count: int, keep: set[bytes]) -> list[int]:
        """Of the pages that are next in their namespaces, the one that was not used for longest goes first."""
        gone: list[int] = []
        while len(gone) < count:
            heads = [next((key for key in self.leaves(space) if key not in keep), None) for space in spaces]
            victims = [key for key in heads if key is not None]
            if not victims:
                break
            victim = min(victims, key=lambda key: self.pages[key].stamp)
            gone.append(self.pages[victim].location)
            self.take(victim)
        return gone

    def take(self, key: bytes) -> None:
        """A page goes. Whoever used it used its parent: that takes over its rank."""
        page = self.pages.pop(key)
        above = self.pages.get(page.parent) if page.parent is not None else None
        if above is not None and self.policies[page.space] != "fifo" and page.stamp > above.stamp:
            above.stamp, above.segment = page.stamp, max(page.segment, above.segment)

    def remove(self, key: bytes) -> list[int]:
        doomed = [key]
        for each in doomed:
            doomed += [child for child, page in self.pages.items() if page.parent == each]
        gone = [self.pages[each].location for each in doomed]
        below = [self.pages.pop(each) for each in doomed[1:]]
        if below and (newest := max(below, key=lambda page: page.stamp)).stamp > self.pages[key].stamp:
            self.pages[key].stamp, self.pages[key].segment = newest.stamp, newest.segment
        self.take(key)
        return gone


class Driver:
    """Does the same to an index and to the model."""

    def __init__(self, index: IndexWriter, model: Model, rng: random.Random) -> None:
        self.index = index
        self.model = model
        self.rng = rng

    def insert(self, space: int, keys: list[bytes], parent: bytes | None) -> None:
        pages, counts = self.index.plan([PageRun(keys, [NO_PAGE] * len(keys), parent)], Space(), 1000)
        assert counts == [len(keys)]
        forms = [Encoded(self.rng.choice([100, 5000, 9000]), 0, NO_PAGE, 7) for _ in pages]
        first = self.model.locations
        self.index.insert(space, pages, forms, range(first, first + len(pages)))
        for page, form in zip(pages, forms):
            self.model.add(space, page.key, page.parent, form.length)

    def step(self, name: str) -> None:
        stored = list(self.model.pages)
        actions = [self.insert_some, self.insert_some, self.use, self.use, self.use, self.evict, self.remove]
        self.rng.choice(actions if stored else [self.insert_some])(name, stored)
        assert self.index.current.clock > self.model.clock or self.model.clock == 0

    def insert_some(self, name: str, stored: list[bytes]) -> None:
        parent = self.rng.choice([None, *stored])
        space = self.model.pages[parent].space if parent is not None else self.rng.choice([*self.model.policies])
        self.insert(space, chain(name, self.rng.randint(1, 6)), parent)

    def use(self, name: str, stored: list[bytes]) -> None:
        key = self.rng.choice(stored)
        self.index.touch(key)
        self.model.use(key)

    def evict(self, name: str, stored: list[bytes]) -> None:
        count, keep = self.rng.randint(1, 5), set(self.rng.sample(stored, min(3, len(stored))))
        spaces = self.rng.choice([[*self.model.policies], [self.rng.choice([*self.model.policies])]])
        evicted = evict(self.index, Eviction(NEVER, count, keep), spaces)
        assert locations(evicted) == self.model.evict(spaces, count, keep)

    def remove(self, name: str, stored: list[bytes]) -> None:
        key = self.rng.choice(stored)
        assert sorted(locations(self.index.remove(key))) == sorted(self.model.remove(key))
        assert self.index.remove(key) == []

    def check(self) -> None:
        self.index.save()
        audit_index(self.index)
        assert sum(space.pages for space in self.index.spaces().values()) == len(self.model.pages)
        for key, page in self.model.pages.items():
            record = self.index.record(key)
            assert record is not None
            assert record[:4] == (page.space, record.segment, page.length, page.location)
            assert record.parent == page.parent
        for space in self.model.policies:
            assert [entry.key for entry in self.index.order.entries(space)] == self.model.leaves(space)


def locations(records: list[PageRecord]) -> list[int]:
    return [record.location for record in records]


@pytest.fixture
def env(tmp_path: Path) -> Iterator[IndexEnvironment]:
    (tmp_path / "index").mkdir()
    env = IndexEnvironment(tmp_path / "index", 16 << 20, "none")
    env.open_databases({})
    yield env
    env.close()


def begin_spaces(env: IndexEnvironment, *policies: str) -> Model:
    """Namespaces 1, 2, ... with these policies."""
    with env.writer(0) as index:
        for number, policy in enumerate(policies, 1):
            index.name_space(number, {"model": f"{number}"})
            index.space(number).policy = POLICIES.index(policy)
    return Model(dict(enumerate(policies, 1)))


@pytest.mark.parametrize("policies", [("lru",), ("slru",), ("fifo",), ("lru", "lru"), ("slru", "fifo", "lru")])
@pytest.mark.parametrize("seed", range(3))
def test_it_evicts_and_removes_as_the_model_does(env: IndexEnvironment, policies: tuple[str, ...], seed: int) -> None:
    rng, model = random.Random(seed), begin_spaces(env, *policies)
    for number in range(120):
        with env.writer(0) as index:
            driver = Driver(index, model, rng)
            driver.step(f"{number}")
            driver.check()
    with env.writer(0) as index:
        spaces = [*model.policies]
        expected = model.evict(spaces, 10_000, set())
        assert locations(evict(index, Eviction(NEVER, 10_000), spaces)) == expected
        assert index.current.live_bytes == 0
        assert sum(space.evicted for space in index.spaces().values()) >= len(expected)


def test_a_transaction_that_fails_leaves_nothing(env: IndexEnvironment) -> None:
    model = begin_spaces(env, "lru")
    with env.writer(0) as index:
        Driver(index, model, random.Random(0)).insert(1, chain("a", 3), None)
    with pytest.raises(ZeroDivisionError), env.writer(0) as index:
        Driver(index, Model({1: "lru"}), random.Random(0)).insert(1, chain("b", 3), None)
        evict(index, Eviction(NEVER, 2), [1])
        raise ZeroDivisionError
    with env.writer(0) as index:
        Driver(index, model, random.Random(0)).check()


def test_eviction_stops_when_enough_is_free(env: IndexEnvironment) -> None:
    model = begin_spaces(env, "lru")
    with env.writer(0) as index:
        Driver(index, model, random.Random(0)).insert(1, chain("a", 10), None)
        freed = evict(index, Eviction(index.current.live_bytes / 2, 100), [1])
        assert 0 < len(freed) < 10
        assert sum(record.cost for record in freed[:-1]) < sum(record.cost for record in freed)
        assert evict(index, Eviction(0, 100), [1]) == []


def test_stamps_ascend_whatever_the_clock_does(env: IndexEnvironment) -> None:
    begin_spaces(env, "lru")
    stamps: list[int] = []
    for now in (1_000, 5_000, 3_000, 0, 5_001, 4_000):
        with env.writer(now) as index:
            stamps += index.take_stamps(3)
    assert stamps == sorted(set(stamps))
    assert stamps[3] == 5_000, "the wall clock counts where it has moved on"


def test_pages_expire_oldest_first_and_as_many_as_asked(env: IndexEnvironment) -> None:
    begin_spaces(env, "lru")
    for now, name in ((1_000, "a"), (2_000, "b"), (3_000, "c")):
        with env.writer(now) as index:
            Driver(index, Model({1: "lru"}), random.Random(0)).insert(1, chain(name, 3), None)
    with env.writer(4_000) as index:
        assert index.oldest(1) == 1_002, "that of the one leaf of the oldest chain"
        assert len(expire(index, 1, 3_000, most=4)) == 4
        assert [index.leading(chain(name, 3)) for name in "abc"] == [0, 2, 3]
        assert len(expire(index, 1, 3_000, most=100)) == 2
        assert [index.leading(chain(name, 3)) for name in "abc"] == [0, 0, 3]
        assert (index.space(1).expired, index.space(1).evicted) == (6, 0)


def test_nothing_of_a_run_that_is_late_or_has_no_parent_is_planned(env: IndexEnvironment) -> None:
    begin_spaces(env, "lru")
    with env.writer(0) as index:
        keys = chain("a", 4)
        runs = [
            PageRun(keys[:2], [NO_PAGE] * 2, None, generation=3),
            PageRun(keys[2:], [NO_PAGE] * 2, keys[1]),
            PageRun(chain("b", 1), [NO_PAGE], None, generation=4),
        ]
        pages, counts = index.plan(runs, Space(generation=4), most=10)
        assert ([page.key for page in pages], counts) == (chain("b", 1), [0, 0, 1])
        assert index.plan(runs, Space(generation=4, clearing=True), most=10) == ([], [0, 0, 0])


def test_all_goes_at_once(env: IndexEnvironment) -> None:
    begin_spaces(env, "lru", "slru")
    with env.writer(0) as index:
        for space, name in ((1, "a"), (2, "b")):
            Driver(index, Model({1: "lru", 2: "slru"}), random.Random(0)).insert(space, chain(name, 5), None)
        index.touch(chain("b", 5)[4])
        index.drop_all()
        Driver(index, Model({1: "lru", 2: "slru"}), random.Random(0)).check()
        assert index.current == IndexState(clock=index.current.clock)


def test_every_flipped_bit_of_a_page_record_is_found(env: IndexEnvironment) -> None:
    key, parent = chain("a", 2)
    packed = PageRecord(1, PROTECTED, 4096, 1 << 40, 5, 6, parent).pack(key)
    for bit in range(8 * len(packed)):
        raw = bytearray(packed)
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreCorruptError):
            PageRecord.unpack(key, bytes(raw))
    with pytest.raises(StoreCorruptError):
        PageRecord.unpack(parent, packed)
