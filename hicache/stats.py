"""What the cache counts, tier by tier, and the snapshot it hands out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from hicache.types import DropReason

DEVICE_HOST = "device_host"
HOST_DEVICE = "host_device"
HOST_STORAGE = "host_storage"
STORAGE_HOST = "storage_host"


@dataclass(frozen=True)
class TierUse:
    """Pages of one tier by what they are to it. They sum to `total`."""

    total: int
    free: int
    evictable: int
    protected: int
    in_flight: int
    request_owned: int = 0

    @property
    def unaccounted(self) -> int:
        """0 when every page is accounted for; positive: pages leaked, negative: pages counted twice."""
        return self.total - self.free - self.evictable - self.protected - self.in_flight - self.request_owned


@dataclass(frozen=True)
class CacheStats:
    """A snapshot. Edges are named upper_lower for copies down, lower_upper for copies up.

    `failures` are named after what failed: "copy", or "load" or "store" and the reason ("store_disk_full").
    `storage_pages` and `storage_bytes` are None while the store does not answer.
    """

    hit_tokens: Mapping[str, int]
    computed_tokens: int
    demoted_pages: Mapping[str, int]
    dropped_pages: Mapping[str, int]
    moved_bytes: Mapping[str, int]
    reclaimed_mirrors: int
    prefetches: Mapping[str, int]
    failures: Mapping[str, int]
    device: TierUse
    host: TierUse | None
    storage_pages: int | None
    storage_bytes: int | None
    storage_loads: str | None  # "on", "off" or "trying", None without a storage tier
    storage_stores: str | None
    forgotten_pages: int
    load_choices: Mapping[str, int] = field(default_factory=dict)  # by load_choice.LoadCounts, as the next two
    declined_tokens: Mapping[str, int] = field(default_factory=dict)
    saved_seconds: float = 0.0


def fresh_hits(device: int, host: int, storage: int, reached: int, prompt: int) -> dict[str, int]:
    """Tokens by tier of an admission's hits that count as hits: those of the prompt that the request did not have
    itself before, `reached` tokens. They are the last of what was found, so the lowest tier has them.

        prompt    [ had before | fresh | computed ]
    """
    fresh, found = max(min(device + host + storage, prompt) - min(reached, prompt), 0), dict[str, int]()
    for tier, tokens in (("storage", storage), ("host", host), ("device", device)):
        found[tier] = min(tokens, fresh)
        fresh -= found[tier]
    return found


@dataclass
class Counters:
    """The live counters; only the scheduler thread writes them."""

    hit_tokens: Counter[str] = field(default_factory=lambda: Counter(device=0, host=0, storage=0))
    computed_tokens: int = 0
    demoted_pages: Counter[str] = field(default_factory=lambda: Counter({DEVICE_HOST: 0, HOST_STORAGE: 0}))
    dropped_pages: Counter[str] = field(default_factory=Counter)
    moved_bytes: Counter[str] = field(default_factory=Counter)
    reclaimed_mirrors: int = 0  # host copies given up while the device still has the page
    prefetches: Counter[str] = field(default_factory=Counter)  # by how they ended
    failures: Counter[str] = field(default_factory=Counter)  # copies and storage operations that failed, by kind
    forgotten_pages: int = 0  # believed to be on storage when the store was cleared by others, or started clean

    def dropped(self, reason: DropReason, pages: int) -> None:
        if pages:
            self.dropped_pages[reason.value] += pages
