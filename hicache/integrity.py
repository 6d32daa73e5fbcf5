"""Invariants over tree and pools together: every page of every pool has exactly one owner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hicache.errors import IntegrityError
from hicache.pages import PageAllocator
from hicache.stats import TierUse
from hicache.tiers import Tiers
from hicache.tree.check import check_tree
from hicache.tree.ledger import Ledger, Share
from hicache.types import PageIndices, Tier


def device_use(tiers: Tiers) -> TierUse:
    allocator = tiers.device_allocator
    shares = _shares(tiers.tree.ledger, Tier.DEVICE)
    return TierUse(allocator.num_pages, allocator.free_pages, *shares, request_owned=tiers.request_pages)


def host_use(tiers: Tiers) -> TierUse | None:
    if tiers.host is None:
        return None
    allocator = tiers.host.pool.allocator
    evictable, protected, in_flight = _shares(tiers.tree.ledger, Tier.HOST)
    return TierUse(allocator.num_pages, allocator.free_pages, evictable, protected, in_flight + tiers.staged_host_pages)


def _shares(ledger: Ledger, tier: Tier) -> tuple[int, int, int]:
    return (
        ledger.pages(tier, Share.EVICTABLE),
        ledger.pages(tier, Share.PROTECTED),
        ledger.pages(tier, Share.IN_FLIGHT),
    )


def check_cache(tiers: Tiers, request_pages: Sequence[PageIndices] | None = None) -> None:
    """Raise IntegrityError if an invariant of the tree or of a pool does not hold.

    `request_pages` are the device pages that requests own, where the caller knows them all.
    """
    check_tree(tiers.tree)
    _check_sum("device", device_use(tiers))
    nodes = list(tiers.tree.nodes())
    owned = [node.device_pages for node in nodes if node.device_pages is not None] + list(request_pages or ())
    _check_owners("device", tiers.device_allocator.free_list(), owned, tiers.device_allocator.num_pages)
    if request_pages is not None and (known := sum(map(len, request_pages))) != tiers.request_pages:
        raise IntegrityError(f"requests own {known} device pages, {tiers.request_pages} were handed out")
    use = host_use(tiers)
    if use is not None and tiers.host is not None:
        _check_sum("host", use)
        allocator: PageAllocator = tiers.host.pool.allocator
        mirrored = [node.host_pages for node in nodes if node.host_pages is not None]
        _check_owners("host", allocator.free_list(), mirrored, allocator.num_pages)


def _check_sum(tier: str, use: TierUse) -> None:
    if use.unaccounted:
        sign = "leaked" if use.unaccounted > 0 else "counted twice"
        raise IntegrityError(f"{abs(use.unaccounted)} {tier} pages {sign}: {use}")


def _check_owners(tier: str, free: PageIndices, owned: Sequence[PageIndices], num_pages: int) -> None:
    holders = np.bincount(np.concatenate([free, *owned]), minlength=num_pages)
    if holders.max(initial=0) > 1:
        raise IntegrityError(f"{tier} pages with two owners: {np.flatnonzero(holders > 1)[:8].tolist()}")
