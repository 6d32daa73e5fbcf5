"""Which prefixes can be used, given what is stored of a pool that goes along with the KV pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer


def restorable_prefixes(stored: Sequence[bool], transfer: PoolTransfer) -> set[int]:
    """Lengths in pages, 1 .. len(stored), of the prefixes for which this pool has what its policy asks for.

    ALL_PAGES: every page of the prefix. TRAILING_PAGES: its last ones, as many as the transfer has keys, as of states
    that stand for all before them. Other policies: none, since what is not understood must not be used.
    """
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return {length for length, fewest in enumerate(accumulate(stored, min), 1) if fewest}
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        window = max(1, len(transfer.keys or ()))
        return {length for length in range(1, len(stored) + 1) if all(stored[max(0, length - window) : length])}
    return set()
