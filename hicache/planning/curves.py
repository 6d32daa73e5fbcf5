"""Curves of one tier: hit rate and time to first token against its size, what lies above it being fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.planning.hits import ONE_PASS, Hits
from hicache.planning.knee import knee
from hicache.planning.pages import Ints
from hicache.planning.times import TimeModel, TokenSplit
from hicache.types import Tier

POINTS = 48
"""Sizes of a curve that takes one pass."""

SIMULATED = 4
"""Sizes of a curve that is simulated size by size: the limit, a half of it, a quarter, an eighth."""

_SMALLEST = 64
"""A curve begins at this fraction of its limit."""


@dataclass(frozen=True)
class Point:
    """`size` in bytes of the tier, hit rate of it and all tiers above together, seconds to the first token."""

    size: int
    hit_rate: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float


@dataclass(frozen=True)
class Curve:
    policy: str
    points: Sequence[Point]

    @property
    def knee(self) -> Point | None:
        """Where more size begins to bring less; None if it does not up to the limit."""
        best = knee([point.size for point in self.points], [point.hit_rate for point in self.points])
        return None if best is None else self.points[best]


@dataclass(frozen=True)
class TierCurves:
    """`without`: the tiers above alone. `bound`: MIN, hit rates only."""

    tier: Tier
    limit: int
    without: Point
    curves: Mapping[str, Curve]
    bound: Sequence[tuple[int, float]]

    def sizes(self) -> Sequence[int]:
        """Bytes that all policies were measured at."""
        return simulated_sizes(self.limit)


@dataclass(frozen=True)
class Sizes:
    """Bytes of each tier, 0 for none."""

    device: int
    host: int = 0
    storage: int = 0

    def of(self, tier: Tier) -> int:
        return (self.device, self.host, self.storage)[tier]

    def replaced(self, tier: Tier, size: int) -> Sizes:
        values = [self.device, self.host, self.storage]
        values[tier] = size
        return Sizes(*values)


def curve_sizes(limit: int) -> list[int]:
    """Sizes of a curve that takes one pass, those of the others among them."""
    spread = np.geomspace(max(limit // _SMALLEST, 1), limit, POINTS).astype(np.int64).tolist()
    return sorted({*spread, *simulated_sizes(limit)})


def simulated_sizes(limit: int) -> list[int]:
    return [max(limit >> shift, 1) for shift in reversed(range(SIMULATED))]


class Explorer:
    """What any sizes of the tiers come to, by any policy.

    Host memory holds what has left the device, so both together are one cache of the sum of their sizes. Disk keeps
    copies of what passed through the host: it adds what it has room for beyond those.
    """

    def __init__(self, hits: Hits, times: TimeModel) -> None:
        self.hits = hits
        self.times = times
        self.page_bytes = times.token_bytes * hits.pages.page_size

    def capacity(self, sizes: Sizes) -> int:
        """Different pages that all tiers together have."""
        memory = sizes.device // self.page_bytes + sizes.host // self.page_bytes
        return max(memory, sizes.storage // self.page_bytes)

    def too_long(self, device: int) -> npt.NDArray[np.bool_]:
        """Which requests a device tier of `device` bytes cannot run: they hit nothing."""
        return self.hits.pages.request_tokens > device // self.times.token_bytes

    def split(self, policy: str, sizes: Sizes) -> TokenSplit:
        device = self._tokens(policy, Sizes(sizes.device))
        memory = np.maximum(device, self._tokens(policy, Sizes(sizes.device, sizes.host)))
        everything = np.maximum(memory, self._tokens(policy, sizes))
        runs = ~self.too_long(sizes.device)
        return TokenSplit(device * runs, (memory - device) * runs, (everything - memory) * runs)

    def _tokens(self, policy: str, sizes: Sizes) -> Ints:
        return self.hits.of(policy, self.capacity(sizes)) * self.hits.pages.page_size

    def point(self, policy: str, sizes: Sizes, size: int) -> Point:
        split = self.split(policy, sizes)
        ttft = self.times.first_token(self.hits.pages.prompt_tokens, split)
        rate = int(split.hits.sum()) / max(self.hits.pages.total_tokens, 1)
        return Point(size, rate, float(ttft.mean()), float(np.median(ttft)), float(np.percentile(ttft, 99)))

    def curve(self, policy: str, tier: Tier, above: Sizes, limit: int) -> Curve:
        sizes = curve_sizes(limit) if policy == ONE_PASS else simulated_sizes(limit)
        return Curve(policy, [self.point(policy, above.replaced(tier, size), size) for size in sizes])
