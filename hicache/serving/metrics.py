"""What a request and a run took: times in seconds, tokens by where they came from."""

from __future__ import annotations

import math
import resource
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hicache.stats import fresh_hits
from hicache.types import Tier

_STEP = math.log(1.02)
"""Neighbouring buckets of a distribution differ by 2 %."""


@dataclass(frozen=True)
class RequestMetrics:
    """One request from its arrival to its end; times in seconds, None where that point was not reached.

    `ttft` is from arrival to the first token, `tpot` the mean time per token after it. `queued` is from arrival to
    the first admission. `cached_tokens` by tier were taken from the cache and computed by somebody else;
    `computed_tokens` went through the model for this request, `recomputed_tokens` of them not for the first time,
    after a retraction. Of a finished request

        cached + computed - recomputed = prompt + output - 1:    nobody needs the KV of the last token.
    """

    rid: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: Mapping[str, int]
    computed_tokens: int
    recomputed_tokens: int
    retractions: int
    failed_loads: int
    queued: float | None
    ttft: float | None
    tpot: float | None
    latency: float


class RequestTimer:
    """Collects a request's metrics while it lives. `high` is how far its KV has ever been, in tokens."""

    def __init__(self, arrival: float) -> None:
        self.cached: Counter[str] = Counter({tier.name.lower(): 0 for tier in Tier})
        self.computed = 0
        self.recomputed = 0
        self.retractions = 0
        self.failed_loads = 0
        self._arrival = arrival
        self._admitted: float | None = None
        self._first: float | None = None
        self._last = arrival
        self._high = 0

    def admitted(self, now: float) -> None:
        """A place was found; only the first time counts."""
        self._admitted = now if self._admitted is None else self._admitted

    def served(self, device: int, host: int, storage: int) -> None:
        """The hits of an admission are there. What the request had itself before is none."""
        total = device + host + storage
        self.cached.update(fresh_hits(device, host, storage, self._high, total))
        self._high = max(self._high, total)

    def ran(self, start: int, stop: int) -> None:
        """The model has computed tokens start .. stop-1."""
        self.computed += stop - start
        self.recomputed += max(min(stop, self._high) - start, 0)
        self._high = max(self._high, stop)

    def token(self, now: float) -> None:
        """A token came out."""
        self._first = now if self._first is None else self._first
        self._last = now

    def result(self, rid: str, prompt: int, output: int, now: float) -> RequestMetrics:
        """The metrics of a request that ends now."""
        first, admitted = self._first, self._admitted
        return RequestMetrics(
            rid=rid,
            prompt_tokens=prompt,
            output_tokens=output,
            cached_tokens=dict(self.cached),
            computed_tokens=self.computed,
            recomputed_tokens=self.recomputed,
            retractions=self.retractions,
            failed_loads=self.failed_loads,
            queued=None if admitted is None else admitted - self._arrival,
            ttft=None if first is None else first - self._arrival,
            tpot=None if first is None or output < 2 else (self._last - first) / (output - 1),
            latency=now - self._arrival,
        )


class Distribution:
    """Positive values in buckets of 2 %, so that hours of them take no more room than minutes."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()

    def add(self, value: float | None) -> None:
        """Count a value; None is no value."""
        if value is not None:
            self._buckets[round(math.log(max(value, 1e-9)) / _STEP)] += 1

    def percentile(self, percent: float) -> float | None:
        """The least value that `percent` % do not exceed, within 1 %; None without values."""
        wanted, seen = math.ceil(self._buckets.total() * percent / 100), 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return math.exp(bucket * _STEP)
        return None

    def to_json(self) -> dict[str, float | None]:
        return {name: _rounded(self.percentile(percent)) for name, percent in (("p50", 50), ("p99", 99))}


@dataclass
class RunMetrics:
    """Sums over the requests of a run. `block_use` is the share of device pages that requests hold or share.

    `reused_tokens` came from the cache, by tier; `hit_rate` is their share of the prompts of all that have ended,
    aborted ones too.
    """

    started: float
    num_pages: int
    steps: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # requests by finish reason
    prompt_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    retractions: int = 0
    failed_loads: int = 0
    reused_tokens: Counter[str] = field(default_factory=Counter)
    peak_pages: int = 0
    peak_running: int = 0
    ttft: Distribution = field(default_factory=Distribution)
    tpot: Distribution = field(default_factory=Distribution)
    latency: Distribution = field(default_factory=Distribution)
    _page_steps: int = 0

    def step(self, used_pages: int, running: int) -> None:
        """A step was computed while requests held or shared `used_pages` device pages."""
        self.steps += 1
        self._page_steps += used_pages
        self.peak_pages = max(self.peak_pages, used_pages)
        self.peak_running = max(self.peak_running, running)

    def ended(self, request: RequestMetrics, reason: str) -> None:
        """A request has come to its end."""
        self.finished[reason] += 1
        self.prompt_tokens += request.prompt_tokens
        self.output_tokens += request.output_tokens
        self.computed_tokens += request.computed_tokens
        self.recomputed_tokens += request.recomputed_tokens
        self.retractions += request.retractions
        self.failed_loads += request.failed_loads
        self.reused_tokens.update(request.cached_tokens)
        for name in ("ttft", "tpot", "latency"):
            getattr(self, name).add(getattr(request, name))

    @property
    def hit_rate(self) -> float:
        return self.reused_tokens.total() / max(self.prompt_tokens, 1)

    def to_json(self, now: float) -> dict[str, Any]:
        """Plain values: tokens, pages, bytes, seconds; rates are per second since `started`."""
        seconds = max(now - self.started, 1e-9)
        pages = max(self.num_pages, 1)
        return {
            "seconds": round(seconds, 3),
            "requests": dict(self.finished),
            "steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "output_tokens_per_s": round(self.output_tokens / seconds, 3),
            "tokens_per_s": round((self.prompt_tokens + self.output_tokens) / seconds, 3),
            "ttft_s": self.ttft.to_json(),
            "tpot_s": self.tpot.to_json(),
            "latency_s": self.latency.to_json(),
            "reused_tokens": {**{tier.name.lower(): 0 for tier in Tier}, **self.reused_tokens},
            "hit_rate": round(self.hit_rate, 4),
            "computed_tokens": self.computed_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "retractions": self.retractions,
            "failed_loads": self.failed_loads,
            "peak_running": self.peak_running,
            "block_use": {
                "peak": round(self.peak_pages / pages, 4),
                "mean": round(self._page_steps / max(self.steps, 1) / pages, 4),
            },
            "peak_memory_bytes": peak_memory_bytes(),
        }


def peak_memory_bytes() -> int:
    """The most memory that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
