"""What a start with other limits would take from a store, in numbers: it is refused unless it is asked for."""

from __future__ import annotations

from typing import NamedTuple

from hicache.errors import ConfigError
from hicache.storage_backends.budget import MIB, BudgetPlan
from hicache.storage_backends.lmdb_index import IndexView
from hicache.storage_backends.lmdb_schema import Space


class Loss(NamedTuple):
    """Pages that a store has and takes `live_bytes` bytes for, and about how many of them fit the new limit."""

    pages: int
    live_bytes: int
    kept: int

    def __str__(self) -> str:
        return (
            f"{self.pages:,} pages ({self.live_bytes / MIB:.1f} MiB), and about {self.kept:,} of them would stay, "
            f"{self.pages - self.kept:,} be evicted"
        )


def loss_by_budget(view: IndexView, plan: BudgetPlan, used_bytes: int) -> Loss | None:
    """What a store whose index takes `used_bytes` would lose to the budget of `plan`; None if nothing.

    A budget that is not lower takes nothing: that an index has grown is no reason to keep an engine from starting.
    """
    state = view.state()
    if plan.budget_bytes >= state.budget_bytes:
        return None
    try:
        room = plan.split(used_bytes).data_bytes
    except ConfigError:
        room = plan.split().data_bytes  # the index is written anew then
    return _loss(sum(space.pages for space in view.spaces().values()), state.live_bytes, room)


def loss_by_quota(space: Space, quota_bytes: int) -> Loss | None:
    """What a namespace would lose to another quota (0: none); None if nothing."""
    if not quota_bytes or 0 < space.quota <= quota_bytes:
        return None
    return _loss(space.pages, space.live_bytes, quota_bytes)


def _loss(pages: int, live_bytes: int, room: int) -> Loss | None:
    return Loss(pages, live_bytes, pages * room // live_bytes) if live_bytes > room else None


def refuse_budget(path: object, loss: Loss, budget_bytes: int) -> ConfigError:
    """The error of a start that would evict pages."""
    return ConfigError(
        f"the store in {path} holds {loss} with a size of {budget_bytes / MIB:.1f} MiB: nothing was changed. "
        f"Give it its size back, or shrink it: 'hicache store shrink {path} SIZE', or 'shrink: true' in its tier"
    )


def refuse_quota(loss: Loss, quota_bytes: int) -> ConfigError:
    """The error of a namespace that would be cut to a new quota."""
    return ConfigError(
        f"the store holds, of this model, {loss} with a quota of {quota_bytes / MIB:.1f} MiB: nothing was changed. "
        "Give it its quota back, or set 'shrink: true' in the storage tier"
    )
