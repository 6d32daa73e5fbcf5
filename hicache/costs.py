"""What moving KV and computing it takes, in seconds: the model behind a replay on a virtual clock and behind
the choice to load or to recompute.

    copy of n bytes           latency + n / bandwidth
    prefill of tokens a .. b  per_token * (b - a)  +  per_pair * (b^2 - a^2) / 2

A decoder spends 2 flops a parameter and token outside of attention, and in attention 4 flops for each layer, query
head, element of a head and pair of a token with one before it (scores and values, a multiplication and an addition
each): Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1. Position b attends to b tokens,
hence the half square.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Link:
    """One direction of a path between two tiers. Transfers follow each other; `latency` (seconds) is that of each."""

    bytes_per_second: float = math.inf
    latency: float = 0.0

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bytes_per_second


@dataclass(frozen=True)
class PrefillCost:
    """Seconds to compute KV. `per_pair` is the part of attention, per pair of tokens."""

    per_token: float
    per_pair: float = 0.0

    @classmethod
    def from_flops(cls, flops_per_second: float, parameters: float, attention_width: float) -> PrefillCost:
        """Of a decoder: `parameters` used for a token (of a mixture of experts the active ones), `attention_width` =
        layers * query heads * head_dim. `flops_per_second` is what the device reaches, not what its sheet says."""
        return cls(2 * parameters / flops_per_second, 4 * attention_width / flops_per_second)

    def seconds(self, start: int, stop: int) -> float:
        """To compute tokens start .. stop-1 when those before are there."""
        return (stop - start) * (self.per_token + self.per_pair * (start + stop) / 2)


@dataclass(frozen=True)
class Costs:
    """All costs of one machine and model. `lookup`: one question to the storage index; `decode_step`: one token of
    all running answers."""

    prefill: PrefillCost
    to_device: Link = Link()
    to_host: Link = Link()
    disk_read: Link = Link()
    disk_write: Link = Link()
    lookup: float = 0.0
    decode_step: float = 0.0

    def instant_copies(self) -> Costs:
        """The same compute, with copies that take no time."""
        free = Link()
        return replace(self, to_device=free, to_host=free, disk_read=free, disk_write=free, lookup=0.0)
