"""A section by itself, as engines hand it over in a configuration of theirs."""

from __future__ import annotations

import pytest

from hicache.config import Prefetch
from hicache.config.loading import section_from_mapping
from hicache.errors import ConfigError


def test_it_is_checked_as_in_a_file() -> None:
    made = section_from_mapping(Prefetch, {"policy": "wait_complete", "deadline": "2s"}, source="extra config")
    assert (made.policy, made.deadline, made.min_pages) == ("wait_complete", 2.0, 1)


@pytest.mark.parametrize(
    "data, message",
    [
        ({"dedline": "2s"}, "extra config: dedline: unknown key, did you mean 'deadline'?"),
        ({"zzz": 1}, "extra config: zzz: unknown key, the keys here are deadline, min_pages, policy"),
        ({"deadline": 2}, "extra config: deadline: 2: a duration needs a unit"),
        ({"policy": "wait", "dedline": 1}, "(and 1 more)"),
    ],
)
def test_mistakes_name_the_key_and_the_mend(data: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        section_from_mapping(Prefetch, data, source="extra config")
    assert message in str(caught.value)
