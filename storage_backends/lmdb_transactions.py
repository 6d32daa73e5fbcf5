"""Transactions of one process on a store: who may be inside at once, a map that fills up or grows, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import lmdb

from hicache.errors import ConfigError, StoreCorruptError, StoreUnavailableError
from hicache.storage_backends.budget import BudgetPlan
from hicache.storage_backends.gate import CallGate
from hicache.storage_backends.lmdb_damage import mark_damaged
from hicache.storage_backends.lmdb_env import IndexEnvironment, storage_errors
from hicache.storage_backends.lmdb_index import IndexView, IndexWriter
from hicache.storage_backends.lmdb_open import StoreFolder

MAX_SETBACKS = 64
"""How often the map of a store is enlarged at the expense of its pages before the store gives up."""

STUCK_LAG = 64
"""A reader that is so many transactions behind while the map is full is called stuck."""

T = TypeVar("T")


class Transactions:
    """Snapshots and changes of an index.

    `view`, `read` and `change` are for everybody. Within `writing`, one thread of the process uses
    `look` and `commit`; writers of other processes come in between two of its commits.
    """

    def __init__(
        self, folder: StoreFolder, env: IndexEnvironment, plan: BudgetPlan, clock: Callable[[], float]
    ) -> None:
        self.name = f"store {folder.path}"
        self.env = env
        self.gate = CallGate(self.name)
        self.marks_damage = True
        self.on_growth: Callable[[], None] = lambda: None  # makes the pages fit the room that the map leaves them
        self._folder = folder
        self._plan = plan
        self._clock = clock

    @property
    def now_us(self) -> int:
        """The time as stamps count it: microseconds since 1970."""
        return int(self._clock() * 1e6)

    def view(self, action: Callable[[IndexView], T]) -> T:
        """What `action` finds in a snapshot of the index."""
        return self.read(lambda: self._look(action))

    def read(self, action: Callable[[], T]) -> T:
        """Call what reads in transactions of its own, beside other readers and one writer."""
        while True:
            try:
                with self._errors(), self.gate.reading():
                    self._folder.check_in_place()
                    return action()
            except lmdb.MapResizedError:
                with self.writing():
                    self._adopt_map()

    def change(self, action: Callable[[IndexWriter], T]) -> T:
        """Commit what `action` does; see `commit`."""
        with self.writing():
            return self.commit(action)

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self._errors(), self.gate.writing():
            self._folder.check_in_place()
            yield
            self._folder.check_in_place()  # what went to files that are gone is not acknowledged

    def look(self, action: Callable[[IndexView], T]) -> T:
        while True:
            try:
                return self._look(action)
            except lmdb.MapResizedError:
                self._adopt_map()

    def commit(self, action: Callable[[IndexWriter], T]) -> T:
        """Commit what `action` does. It is called again if the map was full: nothing of it had remained."""
        with suppress(lmdb.MapFullError):
            return self._commit(action)
        grown = False
        while True:
            try:
                with self.gate.alone():  # LMDB cannot reuse what a reader may see
                    self.env.check_readers()
                    self._commit(lambda index: None)
                    result = self._commit(action)
                break
            except lmdb.MapFullError:
                with self.gate.alone():
                    self._enlarge_map()
                grown = True
        if grown:
            self.on_growth()
        return result

    def _commit(self, action: Callable[[IndexWriter], T]) -> T:
        while True:
            try:
                with self.env.writer(self.now_us) as index:
                    return action(index)
            except lmdb.MapResizedError:
                self._adopt_map()

    def _look(self, action: Callable[[IndexView], T]) -> T:
        with self.env.view() as view:
            return action(view)

    def _adopt_map(self) -> None:
        """Another process has enlarged the map."""
        with self.gate.alone():
            self.env.adopt_map()

    def _enlarge_map(self) -> None:
        """Give the map, which is full, some of the room of the pages. With the gate alone."""
        lag = self.env.lag()
        if lag > STUCK_LAG:
            raise StoreUnavailableError(
                f"{self.name}: a reader is {lag} transactions behind, so that nothing it may see can be reused: "
                "find the process that hangs with the store open, and end it",
                "reader_stuck",
            )
        state = self.look(lambda view: view.state())
        plan = BudgetPlan(self._plan.values, state.budget_bytes, self._plan.page_cost)
        try:
            if state.setbacks >= MAX_SETBACKS:
                raise ConfigError(f"it was enlarged {state.setbacks} times")
            budget = plan.split(self.env.map_bytes * 5 // 4, state.setbacks + 1)
        except ConfigError as error:
            raise StoreUnavailableError(f"{self.name}: its map is full: {error}", "map_full") from error
        self.env.grow(budget.map_bytes)

        def note(index: IndexWriter) -> None:
            index.current.map_bytes, index.current.data_bytes = self.env.map_bytes, budget.data_bytes
            index.current.setbacks += 1

        self._commit(note)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Damage that is found has the store set aside by the next start that has it alone."""
        try:
            with storage_errors(self.name):
                yield
        except StoreCorruptError as error:
            if error.reason == "corrupt" and self.marks_damage:
                mark_damaged(self._folder.path, str(error))
            raise
