"""One store: an LMDB index with pages in slabs beside it, within a hard budget, shared by namespaces and processes.

All changes are transactions of LMDB, which lets one process write at a time; readers never wait for a
writer. Within the process a gate keeps writers apart and readers out while the map is exchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

from hicache.errors import StorageError, StoreCorruptError
from hicache.hashing import Field
from hicache.storage_backends.base import PageRun
from hicache.storage_backends.budget import MAX_CHUNK_PAGES, Budget, BudgetPlan, ValuesMode, inline_cost
from hicache.storage_backends.checksums import page_checksum
from hicache.storage_backends.lmdb_env import Durability, IndexEnvironment, storage_errors
from hicache.storage_backends.lmdb_eviction import Eviction, evict, expire
from hicache.storage_backends.lmdb_index import IndexView, IndexWriter
from hicache.storage_backends.lmdb_open import StoreFolder
from hicache.storage_backends.lmdb_schema import Encoded, NewPage, PageRecord, Space
from hicache.storage_backends.lmdb_spaces import closest, join_space
from hicache.storage_backends.lmdb_transactions import Transactions
from hicache.storage_backends.lmdb_values import Check, InlineValues, Loaded, PageValues, Place, SlabValues

Encode = Callable[[NewPage], Encoded]

log = logging.getLogger(__name__)

T = TypeVar("T")


class Removed(NamedTuple):
    """Pages that went, and the bytes that they took outside the index."""

    pages: int
    nbytes: int


@dataclass
class _Write:
    """A call of `Store.write` under way. `encoded`: the pages that the next transaction is to add."""

    number: int
    runs: Sequence[PageRun]
    encode: Encode
    touched: list[bytes]
    kept: Collection[bytes] = ()
    encoded: dict[bytes, Encoded] = field(default_factory=dict)

    @cached_property
    def keep(self) -> set[bytes]:
        """All pages of the runs, those above them and `kept`: nothing of a call makes room for the rest of it."""
        return {key for run in self.runs for key in (run.parent, *run.keys) if key is not None}.union(self.kept)


class Store:
    """The files of an open store, made by `lmdb_opening.open_store`: one for all users in the process."""

    def __init__(
        self,
        folder: StoreFolder,
        env: IndexEnvironment,
        plan: BudgetPlan,
        durability: Durability,
        clock: Callable[[], float],
    ) -> None:
        self.folder = folder
        self.name = f"store {folder.path}"
        self.values_mode: ValuesMode = plan.values
        self.durability = durability
        self.users = 0
        self.found_alone: bool | None = None
        self._env = env
        self.plan = plan
        self._index = Transactions(folder, env, plan, clock)
        self._index.on_growth = self._shrink
        self._values: PageValues = InlineValues() if plan.values == "inline" else SlabValues(folder.path)

    def serve_tool(self, alone: bool) -> None:
        """Looking leaves no trace: damage that is met is not noted, and a tool that has found the store open nowhere
        else leaves the note of the last session as it is."""
        self.found_alone = alone
        self._index.marks_damage = False

    @property
    def foreign(self) -> bool:
        """True in a process forked from the one that opened the store."""
        return self._index.gate.foreign

    @property
    def now_us(self) -> int:
        """The time as stamps count it: microseconds since 1970."""
        return self._index.now_us

    # ---- reading ------------------------------------------------------------------------------

    def view(self, action: Callable[[IndexView], T]) -> T:
        """What `action` finds in a snapshot of the index."""
        return self._index.view(action)

    def load(self, number: int, keys: Sequence[bytes], place: Place, check: Check) -> Loaded:
        """Read leading pages of a namespace to where `place` wants them, and `check` each as soon as it is there."""
        return self._index.read(
            lambda: self._values.load(self._env, lambda view: view.leading_records(number, keys), place, check)
        )

    def read(self, records: Sequence[PageRecord], places: Sequence[memoryview]) -> None:
        """Read pages by their records, which may be out of date by now; nothing is verified yet."""
        self._index.read(lambda: self._values.read(self._env, records, places))

    def leading(self, number: int, keys: Sequence[bytes]) -> int:
        """How many leading keys of a chain of a namespace are stored."""
        return self.view(lambda view: 0 if view.space(number).clearing else view.leading(keys))

    def present(self, number: int, keys: Sequence[bytes]) -> list[bool]:
        """Which keys of a namespace are stored, each looked up by itself, in one snapshot."""

        def look(view: IndexView) -> list[bool]:
            clearing = view.space(number).clearing
            return [not clearing and view.has(key) for key in keys]

        return self.view(look)

    def remove_damaged(self, key: bytes) -> int:
        """Remove a page that failed its checksum, and those below it; 0 if it had only been moved by a writer."""
        return self._index.change(lambda index: self._remove_damaged(index, key))

    @property
    def env(self) -> IndexEnvironment:
        return self._env

    @property
    def values(self) -> PageValues:
        return self._values

    @property
    def used_bytes(self) -> int:
        """Bytes on disk, as the file system counts them."""
        return self._index.read(lambda: self._env.data_bytes + self._values.allocated_bytes)

    # ---- writing ------------------------------------------------------------------------------

    def write(
        self,
        number: int,
        runs: Sequence[PageRun],
        encode: Encode,
        touched: Sequence[bytes] = (),
        kept: Collection[bytes] = (),
    ) -> list[int]:
        """Store runs of a namespace; returns how many leading pages of each are stored now. None of `kept` goes."""
        job = _Write(number, runs, encode, list(touched), kept)
        with self._index.writing():
            if self._index.look(lambda view: view.space(number).clearing):
                self._finish_clear(number)  # the process that began it may be gone
            while True:
                self._index.look(partial(self._prepare, job))
                room = self._make_room(number, sum(map(self._cost, job.encoded.values())), job.keep)
                added, counts = self._index.commit(partial(self._insert, job=job))
                # Room may be gone by then, to another process or to a map that grew: it is made again.
                if counts == [len(run.keys) for run in runs] or not job.encoded or not (added or room):
                    return counts

    def change(self, action: Callable[[IndexWriter], T]) -> T:
        """Commit what `action` does. It may be called more than once: what it did before has not happened then."""
        return self._index.change(action)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that pages were used."""
        self._index.change(lambda index: _touch(index, keys))

    def touch_at_close(self, keys: Sequence[bytes]) -> None:
        """As `touch`; a store that cannot be written to any more is closed all the same."""
        try:
            self.touch(keys)
        except StorageError as error:
            log.warning("closing: %s", error)

    def delete(self, keys: Sequence[bytes]) -> int:
        return self._index.change(lambda index: self._remove(index, keys))

    def clear(self, number: int) -> Removed:
        """Remove every page of a namespace and move its generation on; returns what went.

        Once the first transaction is committed there are none, even if the process ends in the middle.
        """
        with self._index.writing():
            removed = self._index.commit(lambda index: self._begin_clear(index, number))
            self._finish_clear(number)
            return removed

    def remove_older(self, number: int, before_us: int) -> Removed:
        """Remove what was last used before that time, and give its blocks back; returns what went."""
        with self._index.writing():
            removed = self._expire(number, before_us)
            self._index.commit(self._values.release)
            return removed

    def expire(self, number: int) -> None:
        """Remove pages whose time is up."""
        before = self.view(partial(self._expiry_of, number))
        if before is not None:
            with self._index.writing():
                self._expire(number, before)

    def flip_byte(self, key: bytes) -> bool:
        """Damage a stored page, for drills; False if it is not stored."""

        def damage(index: IndexWriter) -> bool:
            record = index.record(key)
            if record is not None:
                self._values.flip_byte(index, record)
            return record is not None

        return self._index.change(damage)

    # ---- namespaces ---------------------------------------------------------------------------

    def join_space(self, label: Mapping[str, Field], rules: Space, shrink: bool = True) -> int:
        """The number of the namespace with this identity, which is begun if need be. `rules` has its policy,
        quota and TTL; its counters are ignored. Without `shrink` a quota that would take pages is a ConfigError."""
        number, begun = self._index.change(lambda index: join_space(index, label, rules, shrink))
        if begun and (hint := self.view(lambda view: closest(view, number, label))):
            log.info("%s: no pages are stored for this model yet; %s", self.name, hint)
        return number

    def labels(self) -> dict[int, dict[str, Field]]:
        """The identity of each namespace."""
        return self.view(lambda view: view.labels())

    # ---- opening and closing ------------------------------------------------------------------

    def take_up(self, budget: Budget) -> None:
        """Take up what an earlier process left, and shrink to the budget. With the store alone."""
        with self._index.writing():
            self._index.commit(lambda index: self._begin(index, budget))
            for number, space in self._index.look(lambda view: view.spaces()).items():
                if space.clearing:
                    self._finish_clear(number)
            self._shrink()

    def close(self) -> None:
        """Make everything durable and release the files. Idempotent; nothing in a forked child."""
        with self._index.gate.closing() as first:
            if first:
                self._finish()

    def abandon(self) -> None:
        """To be called in a forked child, which must not even close what it has inherited."""
        self._env.abandon()
        self.folder.abandon()

    def _finish(self) -> None:
        clean = True
        try:
            with storage_errors(self.name):
                self._values.sync()
                self._env.sync()
        except StorageError as error:
            log.warning("closing: %s", error)
            clean = False
        with self._index.gate.alone():
            self._env.close()
            self._values.close()
            if clean and not self.found_alone:
                self.folder.end_session()
            self.folder.release()

    def _begin(self, index: IndexWriter, budget: Budget) -> None:
        index.check_counts()
        state = index.current
        state.budget_bytes = self.plan.budget_bytes
        state.map_bytes, state.data_bytes, state.setbacks = self._env.map_bytes, budget.data_bytes, 0
        self._values.recover(index)
        for number, space in index.spaces().items():
            if not space.pages and not space.clearing:
                index.forget_space(number)

    # ---- within a writer ----------------------------------------------------------------------

    def _prepare(self, job: _Write, view: IndexView) -> None:
        """Encode the next pages to be written, before anybody has to wait for it."""
        space, state = view.space(job.number), view.state()
        if not job.encoded:
            present = view.plan(job.runs, space, 0)[1]
            job.touched += [run.keys[count - 1] for run, count in zip(job.runs, present) if count]
        # Pages of one model may be larger than those that the store was begun for.
        room = Budget(state.map_bytes, state.data_bytes).chunk_pages(self.plan.page_cost) * self.plan.page_cost
        encoded: dict[bytes, Encoded] = {}
        for page in view.plan(job.runs, space, MAX_CHUNK_PAGES)[0]:
            form = job.encoded.get(page.key) or job.encode(page)
            room -= self._cost(form)
            if encoded and room < 0:
                break
            encoded[page.key] = form
        job.encoded = encoded

    def _make_room(self, number: int, cost: int, keep: Collection[bytes]) -> bool:
        """Evict in a transaction of its own: a slot is written to only when no entry refers to it any more.

        False if there is not so much room, with all gone that may go.
        """
        while max(excess := self._index.look(partial(_excess, number=number, cost=cost))) > 0:
            if not self._index.commit(partial(self._evict, number=number, excess=excess, keep=keep)):
                return False
        return True

    def _insert(self, index: IndexWriter, job: _Write) -> tuple[int, list[int]]:
        """How many pages were added, and how many leading pages of each run are stored now."""
        _touch(index, job.touched)
        space = index.space(job.number)
        pages = self._fitting(index, space, index.plan(job.runs, space, len(job.encoded))[0], job.encoded)
        if pages:
            forms = [job.encoded[page.key] for page in pages]
            with self._values.storing(index, forms) as locations:
                checksums = [_checksum(page.key, form) for page, form in zip(pages, forms)]
            if self.durability == "always":
                self._values.sync()
            forms = [form._replace(checksum=checksum) for form, checksum in zip(forms, checksums)]
            index.insert(job.number, pages, forms, locations)
            # Room for the next batch of this size, so that it needs no transaction of its own to make some.
            self._evict(index, job.number, _excess(index, job.number, sum(map(self._cost, forms))), job.keep)
        return len(pages), index.plan(job.runs, space, 0)[1]

    def _fitting(
        self, index: IndexWriter, space: Space, pages: Sequence[NewPage], encoded: Mapping[bytes, Encoded]
    ) -> list[NewPage]:
        """Leading pages for which there is room now and which are encoded."""
        room = index.current.data_bytes - index.current.live_bytes
        if space.quota:
            room = min(room, space.quota - space.live_bytes)
        fitting = []
        for page in pages:
            if page.key not in encoded or (room := room - self._cost(encoded[page.key])) < 0:
                break
            fitting.append(page)
        return fitting

    def _cost(self, page: Encoded) -> int:
        return inline_cost(page.length) if self.values_mode == "inline" else page.slot_bytes

    def _evict(self, index: IndexWriter, number: int, excess: tuple[int, int], keep: Collection[bytes]) -> int:
        """Free so many bytes of all namespaces, and so many of this one; returns how many pages went."""
        over, over_quota = excess
        records: list[PageRecord] = []
        if over_quota > 0:
            records += evict(index, Eviction(over_quota, MAX_CHUNK_PAGES, keep), [number])
        over -= sum(record.cost for record in records)
        if over > 0:
            records += evict(index, Eviction(over, MAX_CHUNK_PAGES, keep), index.spaces())
        self._values.free(index, records)
        return len(records)

    def _remove(self, index: IndexWriter, keys: Sequence[bytes]) -> int:
        records = [record for key in keys for record in index.remove(key)]
        self._values.free(index, records)
        return len(records)

    def _remove_damaged(self, index: IndexWriter, key: bytes) -> int:
        record = index.record(key)
        if record is None or self._values.is_whole(index, key, record):
            return 0
        removed = self._remove(index, [key])
        log.warning("%s: page %s is damaged, removed with %d below it", self.name, key.hex(), removed - 1)
        return removed

    def _begin_clear(self, index: IndexWriter, number: int) -> Removed:
        space = index.space(number)
        removed = Removed(space.pages, space.live_bytes)
        space.generation += 1
        space.clearing = True
        if all(other == number or not each.pages for other, each in index.spaces().items()):
            index.drop_all()
            self._values.free_all(index)
        return removed

    def _finish_clear(self, number: int) -> None:
        def step(index: IndexWriter) -> int:
            space = index.space(number)
            if not space.clearing:
                return 0  # another process has finished it: what is there now was written since
            records = evict(index, Eviction(float("inf"), MAX_CHUNK_PAGES), [number])
            self._values.free(index, records)
            space.evicted -= len(records)  # these were cleared
            space.clearing = space.pages > 0
            if space.clearing and not records:
                raise StoreCorruptError(f"{space.pages} pages of namespace {number} are missing in the eviction order")
            return space.pages

        while self._index.commit(step):
            pass
        self._index.commit(self._values.release)

    def _expiry_of(self, number: int, view: IndexView) -> int | None:
        """The stamp before which pages of a namespace have expired, if there are such pages."""
        ttl = view.space(number).ttl_us
        before = self._index.now_us - ttl
        oldest = view.oldest(number) if ttl else None
        return before if oldest is not None and oldest < before else None

    def _expire(self, number: int, before: int) -> Removed:
        def step(index: IndexWriter) -> Removed:
            records = expire(index, number, before, MAX_CHUNK_PAGES)
            self._values.free(index, records)
            return Removed(len(records), sum(record.cost for record in records))

        total = Removed(0, 0)
        while (removed := self._index.commit(step)).pages:
            total = Removed(total.pages + removed.pages, total.nbytes + removed.nbytes)
        return total

    # ---- the budget ---------------------------------------------------------------------------

    def _shrink(self) -> None:
        """Hold no more than the budget allows now."""
        while (over := self._index.look(lambda view: _excess(view, None, 0)[0])) > 0:
            if not self._index.commit(partial(self._evict, number=0, excess=(over, 0), keep=())):
                break
        self._index.commit(self._values.shrink)


# ---- helpers ------------------------------------------------------------------------------------


def _checksum(key: bytes, form: Encoded) -> int:
    return form.checksum if form.checksum is not None else page_checksum(key, form.buffer[: form.length])


def _touch(index: IndexWriter, keys: Sequence[bytes]) -> None:
    for key in keys:
        index.touch(key)


def _excess(view: IndexView, number: int | None, cost: int) -> tuple[int, int]:
    """Bytes by which the store, and a namespace's quota, would be exceeded with `cost` bytes more."""
    state = view.current if isinstance(view, IndexWriter) else view.state()
    space = view.space(number) if number is not None else Space()
    over_quota = space.live_bytes + cost - space.quota if space.quota else 0
    return state.live_bytes + cost - state.data_bytes, over_quota
