"""Times to first token from hits: what is loaded and what is computed, for a request that waits for no other.

    disk_read(storage)  then  the layers: load of layer i beside the compute of layer i - 1

as in a replay: pages come from disk before the request is let in, and layer i waits for layer i of what comes from the
host. So the host's part costs the longer of load and compute, and one layer of the shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hicache.costs import Costs, Link
from hicache.planning.pages import Floats, Ints


@dataclass(frozen=True)
class TokenSplit:
    """Prompt tokens of each request, by the tier that has them; the rest is computed."""

    device: Ints
    host: Ints
    storage: Ints

    @property
    def hits(self) -> Ints:
        return self.device + self.host + self.storage


@dataclass(frozen=True)
class TimeModel:
    """Costs of a machine for KV of `token_bytes` bytes a token in `layers` layers."""

    costs: Costs
    token_bytes: int
    layers: int

    def first_token(self, prompt: Ints, split: TokenSplit) -> Floats:
        """Seconds from the arrival of each request to its first token."""
        compute = self.prefill(split.hits, prompt)
        load = _transfer(self.costs.to_device, (split.host + split.storage) * self.token_bytes)
        fetch = _transfer(self.costs.disk_read, split.storage * self.token_bytes)
        fetch += np.where(split.storage > 0, self.costs.lookup, 0.0)
        return fetch + np.maximum(compute, load) + np.minimum(compute, load) / self.layers

    def prefill(self, start: Ints, stop: Ints) -> Floats:
        """Seconds to compute tokens start .. stop - 1 of each request, as PrefillCost has it."""
        cost = self.costs.prefill
        return np.asarray((stop - start) * (cost.per_token + cost.per_pair * (start + stop) / 2), np.float64)


def _transfer(link: Link, nbytes: Ints) -> Floats:
    return np.where(nbytes > 0, link.latency + nbytes / link.bytes_per_second, 0.0)
