"""What is in a store and what it takes, for `hicache store stat`: read in one snapshot, beside engines that use it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hicache.hashing import Field
from hicache.storage_backends.lmdb_index import POLICIES, IndexView
from hicache.storage_backends.lmdb_open import SESSION_FILE, slab_name
from hicache.storage_backends.lmdb_order import PROBATION, PROTECTED
from hicache.storage_backends.lmdb_schema import STORE_FORMAT
from hicache.storage_backends.lmdb_slots import ExtentSet
from hicache.storage_backends.lmdb_store import Store


@dataclass(frozen=True)
class SpaceReport:
    """One namespace. `label`: its identity. `chains`: pages without children, `protected` of them in slru's protected
    segment. `quota_bytes` and `ttl_s` are None where there is none. Ages: seconds since the oldest and the newest use
    of a page without children, None if there is no page."""

    number: int
    label: dict[str, Field]
    pages: int
    chains: int
    protected: int
    live_bytes: int
    evicted: int
    expired: int
    quota_bytes: int | None
    policy: str
    ttl_s: float | None
    generation: int
    clearing: bool
    oldest_age_s: float | None
    newest_age_s: float | None


@dataclass(frozen=True)
class SlabReport:
    """Slots of one size. `backed` have blocks on disk, `used` of them hold pages; the others are free, in
    `free_extents` runs. `end`: slots up to the last that is backed; those between that are not are holes."""

    slot_bytes: int
    backed: int
    used: int
    free_extents: int
    holes: int
    end: int
    disk_bytes: int


@dataclass(frozen=True)
class StoreReport:
    """Sizes in bytes. `live`: slots or values that hold pages; `free`: slots with blocks and no page; `map`: what the
    index may grow to, `index` of it in use, inline values not counted; `disk`: as the file system counts.

    `lag`: transactions that the oldest reader is behind. `session`: open, clean or unclean; `durability` as of the
    session, None where it is clean. `open_elsewhere`: another process, or another part of this one, has it open.
    """

    path: str
    format: int
    values: str
    budget_bytes: int
    data_bytes: int
    live_bytes: int
    free_bytes: int
    map_bytes: int
    index_bytes: int
    disk_bytes: int
    index_disk_bytes: int
    readers: int
    lag: int
    setbacks: int
    session: str
    durability: str | None
    open_elsewhere: bool
    spaces: list[SpaceReport]
    slabs: list[SlabReport]


def describe(store: Store) -> StoreReport:
    """What is in the store. Raises StoreCorruptError if a record of it is damaged, StoreUnavailableError."""
    return store.view(lambda view: _describe(store, view))


def _describe(store: Store, view: IndexView) -> StoreReport:
    state, env, path = view.state(), store.env, store.folder.path
    session, durability = _session(path, open_elsewhere=not store.found_alone)
    slabs = [_slab(view, path, slot_bytes) for slot_bytes in view.slabs()]
    return StoreReport(
        path=str(path),
        format=STORE_FORMAT,
        values=store.values_mode,
        budget_bytes=state.budget_bytes,
        data_bytes=state.data_bytes,
        live_bytes=state.live_bytes,
        free_bytes=sum(slab.slot_bytes * (slab.backed - slab.used) for slab in slabs),
        map_bytes=state.map_bytes,
        index_bytes=_index_bytes(store, view),
        disk_bytes=store.used_bytes,
        index_disk_bytes=env.data_bytes,
        readers=max(0, env.readers() - 1),  # without this one
        lag=env.lag(),
        setbacks=state.setbacks,
        session=session,
        durability=durability,
        open_elsewhere=not store.found_alone,
        spaces=[_space(view, number, label, store.now_us) for number, label in view.labels().items()],
        slabs=slabs,
    )


def _space(view: IndexView, number: int, label: dict[str, Field], now_us: int) -> SpaceReport:
    space, oldest = view.space(number), view.oldest(number)
    last = [entry.stamp for part in (PROBATION, PROTECTED) if (entry := view.order.last(number, part)) is not None]
    return SpaceReport(
        number=number,
        label=label,
        pages=space.pages,
        chains=space.leaves,
        protected=space.protected,
        live_bytes=space.live_bytes,
        evicted=space.evicted,
        expired=space.expired,
        quota_bytes=space.quota or None,
        policy=POLICIES[space.policy],
        ttl_s=space.ttl_us / 1e6 or None,
        generation=space.generation,
        clearing=space.clearing,
        oldest_age_s=_age(oldest, now_us),
        newest_age_s=_age(max(last, default=None), now_us),
    )


def _age(stamp: int | None, now_us: int) -> float | None:
    return None if stamp is None else max(0, now_us - stamp) / 1e6


def _slab(view: IndexView, path: Path, slot_bytes: int) -> SlabReport:
    slab = view.slab(slot_bytes)
    holes = list(ExtentSet(view.txn, view.databases.holes, slot_bytes))
    file = path / slab_name(slot_bytes)
    return SlabReport(
        slot_bytes=slot_bytes,
        backed=slab.backed,
        used=slab.used,
        free_extents=sum(1 for _ in ExtentSet(view.txn, view.databases.free, slot_bytes)),
        holes=sum(map(len, holes[:-1])),
        end=holes[-1].start if holes else 0,
        disk_bytes=file.stat().st_blocks * 512 if file.exists() else 0,
    )


def _index_bytes(store: Store, view: IndexView) -> int:
    """Bytes of the map that hold records, those of inline values not counted."""
    stats = [store.env.env.stat()]
    stats += [view.txn.stat(getattr(view.databases, name)) for name in view.databases._fields if name != "values"]
    pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
    return int(pages * stats[0]["psize"])


def _session(path: Path, open_elsewhere: bool) -> tuple[str, str | None]:
    try:
        noted = json.loads((path / SESSION_FILE).read_text())
        clean, durability = bool(noted["clean"]), noted.get("durability")
    except (OSError, ValueError, KeyError, TypeError):
        return "open" if open_elsewhere else "unclean", None
    if clean:
        return "clean", None
    return "open" if open_elsewhere else "unclean", str(durability)
