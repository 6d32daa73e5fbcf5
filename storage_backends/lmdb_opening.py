"""From a path to an open store: one per folder and process, however many use it."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast, get_args

import lmdb

from hicache.errors import ConfigError, StoreCorruptError, StoreIdentityError, StoreUnavailableError
from hicache.layout import round_up
from hicache.storage_backends.budget import BudgetPlan, ValuesMode
from hicache.storage_backends.filesystem import room_problem
from hicache.storage_backends.lmdb_aside import bring_back, stores_aside
from hicache.storage_backends.lmdb_damage import mark_damaged, used_data_bytes
from hicache.storage_backends.lmdb_env import DATA_FILE, Durability, IndexEnvironment, storage_errors
from hicache.storage_backends.lmdb_index import IndexView
from hicache.storage_backends.lmdb_loss import Loss, loss_by_budget, refuse_budget
from hicache.storage_backends.lmdb_open import StoreFolder
from hicache.storage_backends.lmdb_rewrite import rewrite_index
from hicache.storage_backends.lmdb_schema import BLOCK_BYTES, MAX_DATABASES, STORE_FORMAT, read_label
from hicache.storage_backends.lmdb_store import Store

DEFAULT_COST = 1 << 20
"""Bytes that a page is taken to have where a tool opens a store without pages."""

SHRINKING_BYTES = 64 << 20
"""Room in the map of a store that is over its budget for the transactions that shrink it."""

_META = b"meta"
_STORE = b"store"

log = logging.getLogger(__name__)

_stores: dict[tuple[int, int], Store] = {}
"""Open in this process, by the device and inode of their folders: a forked child begins with none."""

_lock = threading.Lock()


def _forget_the_parents_stores() -> None:
    """A forked child cannot use them. It may open their folders itself, but not while LMDB has them on its list."""
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    for store in _stores.values():
        store.abandon()
    _stores.clear()


os.register_at_fork(after_in_child=_forget_the_parents_stores)


def open_store(
    path: Path,
    plan: BudgetPlan,
    durability: Durability = "batch",
    clock: Callable[[], float] = time.time,
    shrink: bool = False,
) -> Store:
    """Open the store in the folder `path`, which is created. Each call needs a `close_store`.

    Whoever opens it first decides its budget; one that is too low for its pages needs `shrink`, which evicts them.
    Raises ConfigError for a path or a budget that cannot be used,
    StoreIdentityError if there is something else, StoreUnavailableError if it cannot be opened now. A
    store that cannot be trusted is set aside as PATH.aside-N and a new one begun.
    """
    # Refuse a budget before anything is created.
    if problem := room_problem(path, plan.budget_bytes, plan.file_bytes):
        raise ConfigError(f"storage path {path}: {problem}")
    store = _opened(path, lambda folder: _open_files(folder, plan, durability, clock, shrink))
    try:
        check_values(store.folder.path, store.values_mode, plan.values)
        budget_bytes = store.view(lambda view: view.state()).budget_bytes
    except BaseException:
        close_store(store)
        raise
    if budget_bytes != plan.budget_bytes:
        log.warning(
            "%s has a budget of %d bytes, set by whoever opened it first; %d are ignored",
            store.name, budget_bytes, plan.budget_bytes,
        )  # fmt: skip
    return store


def open_existing(path: Path) -> Store:
    """Open a store as it is, for tools: with its own budget, and with nothing set aside.

    Raises ConfigError if there is none, StoreCorruptError if it is damaged.
    """
    require_store(path)
    return _opened(path, _open_as_is)


def require_store(path: Path) -> None:
    """Raises ConfigError if there is no store in the folder `path`, which is not created."""
    if not (path / DATA_FILE).exists():
        raise ConfigError(f"{path} holds no store: give the folder that a storage tier's 'path' names")


def close_store(store: Store) -> None:
    """Give back what `open_store` returned; its last user closes the files."""
    if store.foreign:
        return
    with _lock:
        store.users -= 1
        if store.users <= 0:
            for key in [key for key, each in _stores.items() if each is store]:  # its folder may have been moved
                del _stores[key]
            store.close()


def _opened(path: Path, open_files: Callable[[StoreFolder], Store]) -> Store:
    folder = StoreFolder(path)
    with _lock:
        known = _stores.get(folder.key)
        if known is not None:
            folder.release()
            known.users += 1
            return known
        try:
            store = open_files(folder)
        except BaseException:
            folder.release()
            raise
        _stores[folder.key] = store
        store.users = 1
        return store


def _open_files(
    folder: StoreFolder, plan: BudgetPlan, durability: Durability, clock: Callable[[], float], shrink: bool
) -> Store:
    while not (alone := folder.try_alone()):
        folder.share()
        if not folder.replaced:
            break
    if not alone:
        return _join(folder, plan, durability, clock)
    try:
        store = begin_store(folder, plan, durability, clock, shrink)
    except StoreCorruptError as error:
        if error.reason != "format":
            mark_damaged(folder.path, str(error))  # it is not to be brought back
        folder.set_aside(str(error))
        if error.reason == "format":
            _bring_back(folder, plan.values)
        store = begin_store(folder, plan, durability, clock, shrink)
    folder.share()
    return store


def _bring_back(folder: StoreFolder, values: ValuesMode) -> None:
    """After another version the store of this one's format is found again, the newest if there are several."""
    for aside in reversed(stores_aside(folder.path)):
        if aside.reason is None and _is_readable(aside.path, values):
            try:
                bring_back(folder.path, aside)
            except OSError as error:
                log.warning("store %s: %s cannot be brought back: %s", folder.path, aside.path, error)
            return


def _is_readable(path: Path, values: ValuesMode) -> bool:
    """Is a store that nobody has open of the format that this version reads?"""
    try:
        if not used_data_bytes(path):
            return False
        with lmdb.open(str(path), readonly=True, lock=False, max_dbs=MAX_DATABASES) as env, env.begin() as txn:
            return check_label(env, txn, path, values) is not None
    except (StoreCorruptError, StoreIdentityError, lmdb.Error, OSError):
        return False


def begin_store(
    folder: StoreFolder, plan: BudgetPlan, durability: Durability, clock: Callable[[], float], shrink: bool
) -> Store:
    """Open a store that nobody else has open, look it over and take it up; begin it if there is none.

    Raises ConfigError, with nothing changed, if pages would have to go for the budget and `shrink` is False.
    """
    with storage_errors(f"store {folder.path}"):
        folder.check()
        if not shrink and used_data_bytes(folder.path) and (loss := _loss(folder, plan)):
            raise refuse_budget(folder.path, loss, plan.budget_bytes)
        if not _fits(plan, used_data_bytes(folder.path)):
            _make_fit(folder, plan)
        map_bytes = plan.split(used_data_bytes(folder.path)).map_bytes
        env = IndexEnvironment(folder.path, map_bytes, durability)
        try:
            label_of(env, folder.path, plan.values)
            env.open_databases({_STORE: json.dumps(_label(plan.values)).encode()})
            store = Store(folder, env, plan, durability, clock)
            folder.begin_session(durability)
            store.take_up(plan.split(env.used_bytes))
        except BaseException:
            env.close()
            raise
    return store


def _loss(folder: StoreFolder, plan: BudgetPlan) -> Loss | None:
    """What would have to go for the budget from a store that nobody has open."""
    try:
        store = with_own_budget(folder, "batch")
    except ConfigError:
        return None  # it was not begun
    try:
        return store.view(lambda view: loss_by_budget(view, plan, store.env.used_bytes))
    finally:
        store.values.close()
        store.env.close()


def _fits(plan: BudgetPlan, used_bytes: int) -> bool:
    """Can an index that takes so much stay as it is?"""
    try:
        return used_bytes <= plan.split(used_bytes).map_bytes
    except ConfigError:
        return False


def _make_fit(folder: StoreFolder, plan: BudgetPlan) -> None:
    """The budget was lowered, and the index is larger than its share now: evict, then write it anew."""
    path = folder.path
    env = IndexEnvironment(path, used_data_bytes(path) + SHRINKING_BYTES, "batch")
    try:
        if label_of(env, path, plan.values) is None:
            return
        env.open_databases({})
        store = Store(folder, env, plan, "batch", time.time)
        store.take_up(plan.split())
    finally:
        env.close()
    log.info("store %s: writing its index anew, which has outgrown the budget", path)
    rewrite_index(path)


def _join(folder: StoreFolder, plan: BudgetPlan, durability: Durability, clock: Callable[[], float]) -> Store:
    """Open a store that others have open."""
    with storage_errors(f"store {folder.path}"):
        env = IndexEnvironment(folder.path, os.stat(folder.path / DATA_FILE).st_size, durability)
        try:
            label_of(env, folder.path, plan.values)
            env.join_databases()
            store = Store(folder, env, plan, durability, clock)
            if durability == "none":
                folder.begin_session(durability)  # what is not synced is shared, too
        except StoreCorruptError as error:
            env.close()
            raise StoreUnavailableError(f"{error}; end the processes that have it open", "corrupt") from error
        except BaseException:
            env.close()
            raise
    return store


def _open_as_is(folder: StoreFolder) -> Store:
    """Open a store with its own budget, whether others have it open or not."""
    alone = folder.try_alone()
    if alone:
        folder.check()
    folder.share()
    with storage_errors(f"store {folder.path}"):
        store = with_own_budget(folder, "batch")
        store.serve_tool(alone)
        return store


def with_own_budget(folder: StoreFolder, durability: Durability) -> Store:
    """A store over the files as they are, nothing of which is taken up. Raises ConfigError if it was not begun."""
    env = IndexEnvironment(folder.path, os.stat(folder.path / DATA_FILE).st_size, durability)
    try:
        values = label_of(env, folder.path, None)
        if values is None:
            raise ConfigError(f"{folder.path} holds no store yet")
        env.join_databases()
        with env.view() as view:
            state, cost = view.state(), _page_cost(view)
        if env.map_bytes < state.map_bytes:
            env.grow(state.map_bytes)  # its index was written anew by a process that ended right after
        return Store(folder, env, BudgetPlan(values, state.budget_bytes, cost), durability, time.time)
    except BaseException:
        env.close()
        raise


def _page_cost(view: IndexView) -> int:
    """Bytes that the largest pages of the store take outside the index; with inline values, the mean."""
    state, pages = view.state(), sum(space.pages for space in view.spaces().values())
    return max(view.slabs(), default=0) or round_up(state.live_bytes // max(pages, 1), BLOCK_BYTES) or DEFAULT_COST


# ---- what is it a store of ----------------------------------------------------------------------


def _label(values: ValuesMode) -> dict[str, object]:
    return {"format": STORE_FORMAT, "values": values}


def label_of(env: IndexEnvironment, path: Path, values: ValuesMode | None) -> ValuesMode | None:
    """As `check_label`."""
    with env.snapshot() as txn:
        return check_label(env.env, txn, path, values)


def check_label(
    env: lmdb.Environment, txn: lmdb.Transaction[bytes], path: Path, values: ValuesMode | None
) -> ValuesMode | None:
    """How the store keeps its values; None if there is no store yet. Writes nothing.

    Raises StoreIdentityError if it is another program's database or keeps values in another way than
    `values`, StoreCorruptError if it has another format: it is set aside.
    """
    if not txn.stat()["entries"]:
        return None
    try:
        meta = env.open_db(_META, txn=txn, create=False)
        raw, old = txn.get(_STORE, db=meta), txn.get(b"identity", db=meta)
    except lmdb.Error as error:
        raise StoreIdentityError(f"{path} holds the LMDB database of another program; use another path") from error
    found = read_label(raw, "label") if raw is not None or old is None else {"format": 1}
    if found.get("format") != STORE_FORMAT:
        raise StoreCorruptError(f"its format is {found.get('format')!r}, this version reads {STORE_FORMAT}", "format")
    mode = found.get("values")
    if mode not in get_args(ValuesMode):
        raise StoreCorruptError(f"its label says that it keeps its values in the mode {mode!r}")
    check_values(path, cast(ValuesMode, mode), values)
    return cast(ValuesMode, mode)


def check_values(path: Path, mode: ValuesMode, values: ValuesMode | None) -> None:
    """Raises StoreIdentityError unless a store that keeps its values so may be opened for `values`."""
    if values not in (None, mode):
        raise StoreIdentityError(
            f"the store in {path} was made with values: {mode}, not {values}: "
            "use that, choose another path, or remove the store"
        )
