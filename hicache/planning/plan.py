"""From a trace, a model and limits to curves, sizes and a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hicache.config import CacheConfig
from hicache.config.cost_model import costs_of
from hicache.costs import Costs
from hicache.errors import ConfigError
from hicache.planning.curves import Curve, Explorer, Point, Sizes, TierCurves, curve_sizes, simulated_sizes
from hicache.planning.hits import ONE_PASS, Hits, Tick
from hicache.planning.model_config import PlanModel
from hicache.planning.pages import PageTrace
from hicache.planning.suggestion import SUGGESTED_PAGE, checked, config_values, round_size
from hicache.planning.times import TimeModel
from hicache.sim.simulate import SimResult
from hicache.types import Tier

ENOUGH = 0.95
"""A size is suggested if it saves this share of the time to first token that the limit of the tier would save."""

WORTH = 0.01
"""A tier is suggested if it saves at least this share of the mean time to first token."""

STORE_POLICY = "lru"
"""The store has its own orders, see the section `tiers` of a configuration."""

Simulate = Callable[[CacheConfig], SimResult]


@dataclass(frozen=True)
class PlanInput:
    """`limits` in bytes of one rank, 0 for a tier that is not wanted. `policies` begin with lru. `costs` is the section
    of a configuration; `store` the folder that is suggested for the disk tier; at most `max_running` requests run
    at a time."""

    pages: PageTrace
    model: PlanModel
    limits: Mapping[Tier, int]
    policies: Sequence[str] = (ONE_PASS,)
    tp: int = 1
    costs: Mapping[str, Any] = field(default_factory=dict)
    store: str = "hicache-store"
    max_running: int = 64

    @property
    def page_size(self) -> int:
        """Of the suggestion, in tokens: a power of two."""
        return 1 << (min(self.pages.page_size, SUGGESTED_PAGE).bit_length() - 1)


@dataclass(frozen=True)
class Floor:
    """`running` requests run at a time, the longest takes `longest` tokens with its answer. Bytes of a device tier
    that the longest fits into alone, and with the others beside it at their mean length."""

    running: int
    longest: int
    longest_bytes: int
    running_bytes: int


@dataclass(frozen=True)
class Plan:
    """Curves of each tier with the tiers above at their suggested sizes, what is suggested, and what it comes to.

    `predicted` is without waiting for other requests; `simulated` is a replay of the whole trace through the
    suggestion on a virtual clock, None if none was asked for. `floor` is what the device tier has to be for the
    requests that run, whatever it hits.
    """

    given: PlanInput
    explorer: Explorer
    costs: Costs
    tiers: Sequence[TierCurves]
    sizes: Sizes
    policy: str
    floor: Floor
    values: Mapping[str, Any]
    nothing: Point
    predicted: Point
    simulated: SimResult | None = None

    @property
    def token_bytes(self) -> int:
        return self.explorer.times.token_bytes

    def replayed(self, simulate: Simulate) -> Plan:
        """The plan with a replay of the trace through what it suggests."""
        return replace(self, simulated=simulate(checked(self.values, "the suggested tiers.yaml")))


def make_plan(given: PlanInput, bound: bool = True, tick: Tick = lambda what: None) -> Plan:
    """See Plan; with `bound` MIN, too.

    Raises ConfigError if no page fits a limit, or a value cannot be in a configuration.
    """
    start = _config(given, Sizes(given.limits[Tier.DEVICE]), ONE_PASS)
    layout, costs = start.layout(), costs_of(start)
    page_bytes = layout.token_bytes * given.pages.page_size
    if given.limits[Tier.DEVICE] < page_bytes:
        raise ConfigError(f"budget: device: a page of the trace takes {page_bytes:,} bytes: give it more")
    explorer = Explorer(Hits(given.pages, tick), TimeModel(costs, layout.token_bytes, layout.num_layers))
    floor = _floor(explorer, given)
    sizes = _choose(explorer, given.limits, floor)
    tiers = [_tier_curves(explorer, given, tier, sizes, bound) for tier in Tier if given.limits[tier]]
    policy = _best_policy(explorer, given.policies, sizes)
    values = _values(given, sizes, policy)
    checked(values, "the suggested tiers.yaml")
    return Plan(
        given=given,
        explorer=explorer,
        costs=costs,
        tiers=tiers,
        sizes=sizes,
        policy=policy,
        floor=floor,
        values=values,
        nothing=explorer.point(ONE_PASS, Sizes(0), 0),
        predicted=explorer.point(policy, sizes, 0),
    )


def _config(given: PlanInput, sizes: Sizes, policy: str) -> CacheConfig:
    return checked(_values(given, sizes, policy), "the plan")


def _values(given: PlanInput, sizes: Sizes, policy: str) -> dict[str, Any]:
    policies = {Tier.DEVICE: policy, Tier.HOST: policy, Tier.STORAGE: STORE_POLICY}
    extra = {"costs": given.costs, "path": given.store}
    return config_values(given.model, given.tp, given.page_size, sizes, policies, extra)


# ---- sizes ----------------------------------------------------------------------------------


def _floor(explorer: Explorer, given: PlanInput) -> Floor:
    """How many requests run at a time follows from Little's law, L = λW (J. D. C. Little, Operations Research 9(3),
    1961): W is the modelled time of a request that hits nothing, as if prefills did not wait for each other. Their
    prefills cannot take more than all of the time there is: then requests queue up, and as many run as may.
    """
    pages, times = given.pages, explorer.times
    span = max(float(pages.arrivals[-1]), 1e-9)
    prefill = float(times.prefill(np.zeros_like(pages.prompt_tokens), pages.prompt_tokens).sum())
    load = prefill / span
    running = given.max_running if load >= 1 else min(max(1, math.ceil(load / (1 - load))), given.max_running)
    longest, mean = int(pages.request_tokens.max()), float(pages.request_tokens.mean())
    page = explorer.page_bytes // times.token_bytes  # each request has a last page that is not full
    tokens = longest + page + int((running - 1) * (mean + page))
    return Floor(running, longest, (longest + page) * times.token_bytes, tokens * times.token_bytes)


def _choose(explorer: Explorer, limits: Mapping[Tier, int], floor: Floor) -> Sizes:
    """Tier by tier from above, by lru: the least size that saves nearly what the limit saves, and of the device tier
    not less than its floor."""
    sizes = Sizes(0)
    for tier in Tier:
        if limits[tier]:
            sizes = sizes.replaced(tier, _least_size(explorer, tier, sizes, limits[tier]))
            if tier is Tier.DEVICE:
                least = round_size(min(floor.running_bytes, limits[tier]), limits[tier])
                sizes = Sizes(max(sizes.device, least))
    if sizes.storage and not _is_worth(explorer, sizes.replaced(Tier.STORAGE, 0), sizes):
        sizes = sizes.replaced(Tier.STORAGE, 0)
    if sizes.host and not sizes.storage and not _is_worth(explorer, Sizes(sizes.device), sizes):
        sizes = Sizes(sizes.device)
    return sizes


def _least_size(explorer: Explorer, tier: Tier, above: Sizes, limit: int) -> int:
    def saved(size: int) -> float:
        return before - explorer.point(ONE_PASS, above.replaced(tier, size), 0).ttft_mean

    before = explorer.point(ONE_PASS, above, 0).ttft_mean
    enough = ENOUGH * saved(limit)
    if enough <= 0:  # nothing shows how large it should be
        return limit if tier is Tier.DEVICE else max(curve_sizes(limit)[0], explorer.page_bytes)
    least = next(size for size in [*curve_sizes(limit), limit] if saved(size) >= enough or size == limit)
    return round_size(least, limit)


def _is_worth(explorer: Explorer, without: Sizes, sizes: Sizes) -> bool:
    before = explorer.point(ONE_PASS, without, 0).ttft_mean
    return explorer.point(ONE_PASS, sizes, 0).ttft_mean <= (1 - WORTH) * before


def _best_policy(explorer: Explorer, policies: Sequence[str], sizes: Sizes) -> str:
    """lru, unless another one is worth the change."""
    ttft = {name: explorer.point(name, sizes, 0).ttft_mean for name in policies}
    best = min(policies, key=lambda name: ttft[name])
    return best if ttft[best] < (1 - WORTH) * ttft[ONE_PASS] else ONE_PASS


def _tier_curves(explorer: Explorer, given: PlanInput, tier: Tier, sizes: Sizes, bound: bool) -> TierCurves:
    above = Sizes(*[size if index < tier else 0 for index, size in enumerate((sizes.device, sizes.host, 0))])
    limit = given.limits[tier]
    curves: dict[str, Curve] = {name: explorer.curve(name, tier, above, limit) for name in given.policies}
    best: list[tuple[int, float]] = []
    if bound:
        best = [
            (size, explorer.hits.bound(explorer.capacity(above.replaced(tier, size))))
            for size in simulated_sizes(limit)
        ]
    return TierCurves(tier, limit, explorer.point(ONE_PASS, above, 0), curves, best)
