"""What a replay measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from hicache.errors import IntegrityError
from hicache.sim.running import Running
from hicache.sim.waiting import Skipped
from hicache.stats import fresh_hits
from hicache.types import Tier


@dataclass(frozen=True)
class RequestTiming:
    """One request: when it arrived, was let in for the last time, gave its first token, and finished, in seconds
    of the replay's timeline; and its prompt tokens by the tier that had them."""

    rid: str
    arrived: float
    admitted: float
    first_token: float
    finished: float
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    storage_tokens: int

    @classmethod
    def of(cls, running: Running, hits: Mapping[str, int], first_token: float, now: float) -> RequestTiming:
        return cls(
            running.trace.rid,
            running.arrived,
            running.admitted,
            first_token,
            now,
            running.trace.prompt_len,
            hits["device"],
            hits["host"],
            hits["storage"],
        )

    @property
    def ttft(self) -> float:
        """Time to first token, from the arrival on."""
        return self.first_token - self.arrived

    @property
    def queued(self) -> float:
        """Time from the arrival until the request was let in; of a retracted one, for the last time."""
        return self.admitted - self.arrived


@dataclass(frozen=True)
class ReplayResult:
    """Tokens, pages and bytes of a whole replay; `seconds` of wall clock from first request to drained.

    Hits and computed tokens sum to `prompt_tokens`. What a retracted request had itself before is no hit; what it
    computed more than once is in `recomputed_tokens`. Requests that were `skipped` are in none of these.
    `failures` counts copies and storage
    operations by kind and reason; `storage_loads` and `storage_stores` say whether storage was in service at
    the end: "on", "off" or "trying", None without it.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    hit_tokens: Mapping[str, int]
    computed_tokens: int
    recomputed_tokens: int
    retractions: int
    failed_loads: int
    skipped: tuple[Skipped, ...]
    demoted_pages: Mapping[str, int]
    dropped_pages: Mapping[str, int]
    moved_bytes: Mapping[str, int]
    failures: Mapping[str, int]
    storage_loads: str | None
    storage_stores: str | None
    checked_pages: int
    wrong_pages: int
    poisoned_pages: int
    wrong_examples: tuple[str, ...]
    seconds: float

    def __post_init__(self) -> None:
        answered = sum(self.hit_tokens.values()) + self.computed_tokens
        if answered != self.prompt_tokens:
            raise IntegrityError(
                f"hit and computed tokens sum to {answered}, {answered - self.prompt_tokens:+d} "
                f"of the {self.prompt_tokens} asked for"
            )

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that some tier served, those of skipped requests included: they are misses."""
        return sum(self.hit_tokens.values()) / max(self.prompt_tokens + self.skipped_tokens, 1)

    @property
    def skipped_tokens(self) -> int:
        """Prompt tokens of requests that can never run."""
        return sum(skipped.prompt_tokens for skipped in self.skipped)


@dataclass
class Tally:
    """Counts while a replay runs."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    retractions: int = 0
    failed_loads: int = 0
    hit_tokens: dict[str, int] = field(default_factory=lambda: {tier.name.lower(): 0 for tier in Tier})


class Accounts:
    """Counts into a tally what becomes of requests, over all of their admissions."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._open: dict[str, _Account] = {}  # of requests that were retracted and wait

    def finished(self, running: Running) -> Mapping[str, int]:
        """Returns the request's hits by tier."""
        trace, tally = running.trace, self._tally
        account = self._after(running)
        del self._open[trace.rid]
        computed = trace.prompt_len - account.hits.total()
        tally.requests += 1
        tally.prompt_tokens += trace.prompt_len
        tally.output_tokens += trace.output_len
        tally.computed_tokens += computed
        tally.recomputed_tokens += account.computed - computed - (len(running.sequence) - trace.prompt_len)
        for tier, tokens in account.hits.items():
            tally.hit_tokens[tier] += tokens
        return account.hits

    def retracted(self, running: Running) -> None:
        self._tally.retractions += 1
        self._after(running)

    def _after(self, running: Running) -> _Account:
        """The request's account, this admission included. One whose loads have failed has brought nothing."""
        account = self._open.setdefault(running.trace.rid, _Account())
        if running.hits_ready:
            found = running.admission
            hits = (found.device_len, found.host_len, found.storage_len)
            account.hits.update(fresh_hits(*hits, account.reached, running.prompt_len))
            account.reached = max(account.reached, running.done)
            account.computed += running.computed
        return account


@dataclass
class _Account:
    """Of one request: its hits by tier, the tokens computed for it, and how far its KV has ever been."""

    hits: Counter[str] = field(default_factory=Counter)
    computed: int = 0
    reached: int = 0
