from __future__ import annotations

import pytest

from hicache.errors import ConfigError
from hicache.planning.budget import DEFAULT_LIMITS, describe_budget, parse_budget
from hicache.types import Tier


def test_named_tiers_and_defaults() -> None:
    limits = parse_budget("device=8GiB, disk=1TB")
    assert limits == {Tier.DEVICE: 8 << 30, Tier.HOST: DEFAULT_LIMITS[Tier.HOST], Tier.STORAGE: 10**12}


def test_without_a_host_there_is_no_disk() -> None:
    limits = parse_budget("host=none")
    assert (limits[Tier.HOST], limits[Tier.STORAGE]) == (0, 0)
    assert describe_budget(limits) == "device 40.00 GiB, host none, disk none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dsk=1GiB", "did you mean 'disk'"),
        ("host=64", "a size needs a unit"),
        ("host=64 pages", "no size in bytes"),
        ("device=none", "device must have a size"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_budget(text)
