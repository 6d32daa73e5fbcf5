"""Limits of the tiers from a line such as "device=40GiB,host=256GiB,disk=2TiB"."""

from __future__ import annotations

from collections.abc import Mapping

from hicache.config.units import closest, format_bytes, parse_size
from hicache.errors import ConfigError
from hicache.types import Tier

TIER_NAMES = {"device": Tier.DEVICE, "host": Tier.HOST, "disk": Tier.STORAGE}

DEFAULT_LIMITS = {Tier.DEVICE: 40 << 30, Tier.HOST: 256 << 30, Tier.STORAGE: 2 << 40}
"""Bytes; of a budget that does not name the tier."""

NO_TIER = "none"


def tier_word(tier: Tier) -> str:
    return next(name for name, known in TIER_NAMES.items() if known is tier)


def parse_budget(text: str) -> Mapping[Tier, int]:
    """Bytes that each tier may have, 0 for one that is not wanted. Raises ConfigError with the mend."""
    limits = dict(DEFAULT_LIMITS)
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in TIER_NAMES:
            near = closest(name, TIER_NAMES)
            hint = f"did you mean {near[0]!r}?" if near else "the tiers are device, host and disk"
            raise ConfigError(f"budget: there is no tier {name!r}, {hint}")
        limits[TIER_NAMES[name]] = _bytes(name, value)
    if not limits[Tier.DEVICE]:
        raise ConfigError("budget: device must have a size, pages are computed there")
    if not limits[Tier.HOST]:
        limits[Tier.STORAGE] = 0  # copies between device and disk pass the host
    return limits


def _bytes(name: str, value: str) -> int:
    if value == NO_TIER:
        return 0
    try:
        size = parse_size(value)
    except ValueError as error:
        raise ConfigError(f"budget: {name}: {error}; or write {name}={NO_TIER}") from None
    if size.unit != "bytes":
        raise ConfigError(f"budget: {name}: {value!r} is no size in bytes, write one such as {name}=64GiB")
    return size.amount


def describe_budget(limits: Mapping[Tier, int]) -> str:
    return ", ".join(f"{tier_word(tier)} {format_bytes(limit) if limit else NO_TIER}" for tier, limit in limits.items())
