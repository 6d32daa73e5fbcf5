"""What a replay measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hicache.errors import IntegrityError
from hicache.sim.running import Running
from hicache.sim.waiting import Skipped
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
    def of(cls, running: Running, first_token: float, now: float) -> RequestTiming:
        admission = running.admission
        return cls(
            running.trace.rid,
            running.arrived,
            running.admitted,
            first_token,
            now,
            running.trace.prompt_len,
            admission.device_len,
            admission.host_len,
            admission.storage_len,
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

    Hits and computed tokens are those of each request's last admission and sum to `prompt_tokens`; what a
    retracted request had computed before is in `recomputed_tokens`. Requests that were `skipped` are in none of these.
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

    def finished(self, running: Running) -> None:
        decoded = len(running.sequence) - running.trace.prompt_len
        self.requests += 1
        self.prompt_tokens += running.trace.prompt_len
        self.output_tokens += running.trace.output_len
        self.computed_tokens += running.computed - decoded
        self.hit_tokens["device"] += running.admission.device_len
        self.hit_tokens["host"] += running.admission.host_len
        self.hit_tokens["storage"] += running.admission.storage_len

    def retracted(self, running: Running) -> None:
        self.retractions += 1
        self.recomputed_tokens += running.computed
