"""How a replay schedules, and how a simulation is paced."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hicache.errors import ConfigError


@dataclass(frozen=True)
class ReplayOptions:
    """Limits of the scheduler, in requests and tokens.

    `window` waiting requests prefetch ahead. A step computes at most `step_tokens`, of one request at most
    `chunk_tokens` of its prompt or `decode_tokens` of its answer; `mixed_decode_tokens` of it, where that is given,
    while others prefill, and then one while others wait. Without any progress for `stall_seconds` the replay is given
    up.
    """

    verify: bool = False
    max_running: int = 8
    window: int = 16
    chunk_tokens: int = 2048
    step_tokens: int = 8192
    decode_tokens: int = 16
    stall_seconds: float = 60.0
    mixed_decode_tokens: int | None = None


@dataclass(frozen=True)
class SimOptions:
    """`speed` divides the arrival times of the trace: 2 is twice the load. `bytes_in` moves real bytes through real
    pools and, with a storage tier, a real store in that folder: the oracle of the simulation, small and slow."""

    replay: ReplayOptions = field(default_factory=ReplayOptions)
    speed: float = 1.0
    bytes_in: Path | None = None

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise ConfigError(f"speed is {self.speed:g}, it must be above 0")
