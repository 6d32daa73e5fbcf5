from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.config.units import BYTE_UNITS, format_bytes, format_duration, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("8GiB", 8 * 2**30, "bytes"),
        ("8 GB", 8 * 10**9, "bytes"),
        ("1.5TiB", 3 * 2**39, "bytes"),
        ("0.5 KiB", 512, "bytes"),
        (" 12B ", 12, "bytes"),
        ("200000 tokens", 200_000, "tokens"),
        ("64pages", 64, "pages"),
    ],
)
def test_sizes(text: str, amount: int, unit: str) -> None:
    size = parse_size(text)
    assert (size.amount, size.unit, size.text) == (amount, unit, text.strip())


@given(st.integers(0, 10**6), st.sampled_from(sorted(BYTE_UNITS)))
def test_whole_numbers_of_every_unit_are_exact(number: int, unit: str) -> None:
    assert parse_size(f"{number}{unit}").amount == number * BYTE_UNITS[unit]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (8, "8: a size needs a unit: B, KB"),
        ("8", "8: a size needs a unit"),
        (1.5, "1.5: a size needs a unit"),
        ("8G", "did you mean GB or GiB?"),
        ("8gb", "did you mean GB?"),
        ("8gib", "did you mean GiB?"),
        ("8 token", "did you mean tokens?"),
        ("8 furlongs", "use one of B, KB"),
        ("-8GiB", "is not a number and a unit"),
        ("8GiB or so", "is not a number and a unit"),
        ("٨GiB", "is not a number and a unit"),
        (True, "is not a number and a unit"),
        (None, "is not a number and a unit"),
        ("1.5 pages", "is not a whole number"),
        ("0.3B", "is not a whole number"),
    ],
)
def test_bad_sizes_say_how_to_mend_them(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_size(value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("200ms", 0.2), ("2s", 2.0), ("1.5 min", 90.0), ("10us", 1e-5), ("2h", 7200.0), ("7d", 604800.0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("value", "message"),
    [(200, "needs a unit: us, ms, s, min"), ("200 msec", "did you mean ms?"), ("0s", "must be more than 0")],
)
def test_bad_durations_say_how_to_mend_them(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_duration(value)


def test_pages_are_rounded_down() -> None:
    assert parse_size("1023B").pages(page_bytes=256, page_size=16) == 3
    assert parse_size("31 tokens").pages(page_bytes=256, page_size=16) == 1
    assert parse_size("31 pages").pages(page_bytes=256, page_size=16) == 31


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (9437184, "9.00 MiB"), (2**50, "1024.00 TiB")]
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize("text", ["200ms", "2s", "90s", "2h", "7d", "10us", "36h", "1500ms", "39.7us", "0.25us"])
def test_durations_are_written_as_they_can_be_read(text: str) -> None:
    assert format_duration(parse_duration(text)) == text
