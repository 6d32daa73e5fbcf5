"""Sizes and durations as people write them: a number and a unit, never a bare number."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

BYTE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
COUNT_UNITS: dict[str, Literal["tokens", "pages"]] = {"tokens": "tokens", "pages": "pages"}
SECONDS = {
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}

SCALES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12, "P": 10**15}

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


@dataclass(frozen=True)
class Size:
    """An amount of memory in bytes, tokens or pages. `text` is how it was written."""

    amount: int
    unit: Literal["bytes", "tokens", "pages"]
    text: str

    def pages(self, page_bytes: int, page_size: int) -> int:
        """Whole pages of `page_bytes` bytes and `page_size` tokens that fit."""
        return self.amount // {"bytes": page_bytes, "tokens": page_size, "pages": 1}[self.unit]


def parse_size(value: object) -> Size:
    """Read "8GiB", "1.5 TB", "200000 tokens" or "64 pages". Raises ValueError with the mend."""
    number, unit, text = _split(value, f"a size needs a unit: {', '.join([*BYTE_UNITS, *COUNT_UNITS])}")
    if unit in COUNT_UNITS:
        return Size(_whole(number, text), COUNT_UNITS[unit], text)
    if unit in BYTE_UNITS:
        return Size(_whole(number * BYTE_UNITS[unit], text), "bytes", text)
    raise ValueError(f"{text!r}: unit {unit!r} is not known, {_hint(unit, [*BYTE_UNITS, *COUNT_UNITS])}")


def parse_duration(value: object) -> float:
    """Read "200ms", "2s" or "7d" as seconds. Raises ValueError with the mend."""
    number, unit, text = _split(value, f"a duration needs a unit: {', '.join(SECONDS)}")
    if unit not in SECONDS:
        raise ValueError(f"{text!r}: unit {unit!r} is not known, {_hint(unit, list(SECONDS))}")
    if not number:
        raise ValueError(f"{text!r}: a duration must be more than 0")
    return float(number * SECONDS[unit])


def parse_bandwidth(value: object) -> float:
    """Read "24GB/s" or "500 MiB/s" as bytes per second. Raises ValueError with the mend."""
    text = value if isinstance(value, str) else ""
    amount, slash, per = text.partition("/")
    if not slash or per.strip() != "s":
        raise ValueError(f"{value!r} is not a bandwidth, write bytes per second such as 24GB/s")
    size = parse_size(amount)
    if size.unit != "bytes" or not size.amount:
        raise ValueError(f"{value!r} is not a bandwidth, write bytes per second such as 24GB/s")
    return float(size.amount)


def parse_flops(value: object) -> float:
    """Read "400TFLOPS" as operations per second. Raises ValueError with the mend."""
    return _scaled(value, "FLOPS", "400TFLOPS")


def parse_count(value: object) -> float:
    """Read "6.95B" or 6950000000 as a number. Raises ValueError with the mend."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    return _scaled(value, "", "6.95B")


def _scaled(value: object, unit: str, example: str) -> float:
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    scale = SCALES.get(match[2].removesuffix(unit)) if match is not None and match[2].endswith(unit) else None
    if match is None or scale is None or not float(match[1]):
        raise ValueError(f"{value!r}: write a number above 0 with a unit, such as {example}")
    return float(match[1]) * scale


def format_rate(value: float, unit: str) -> str:
    """`value` for people, and for whoever reads it back, in decimal units: 2.4e10, "B/s" -> "24GB/s"."""
    prefix = next((name for name in ("P", "T", "G", "M", "K") if value >= SCALES[name]), "")
    return f"{value / SCALES[prefix]:.6g}{prefix}{unit}"


def _split(value: object, unit_is_missing: str) -> tuple[Fraction, str, str]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(f"{value}: {unit_is_missing}")
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a number and a unit, such as 8GiB, 200000 tokens or 200ms")
    number, unit = match.groups()
    if not unit:
        raise ValueError(f"{number}: {unit_is_missing}")
    return Fraction(number), unit, match.group().strip()


def _whole(amount: Fraction, text: str) -> int:
    if amount.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of bytes, tokens or pages")
    return amount.numerator


def _hint(unit: str, known: list[str]) -> str:
    """Units that `unit` may stand for (8G, 8gb, 8gib, 8token), or all of them."""
    word = unit.lower()
    near = [name for name in known if name.lower() == word or name.lower().rstrip("bs").rstrip("i") == word]
    near = near or closest(word, known)
    return f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(known)}"


def closest(word: str, known: Iterable[str]) -> list[str]:
    """The known word most like `word`, if any is like it at all."""
    return difflib.get_close_matches(word, list(known), n=1)


def format_bytes(count: float, digits: int = 2) -> str:
    """`count` bytes for people, in binary units: 9437184 -> "9.00 MiB"."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count:.0f} B" if unit == "B" else f"{value:.{digits}f} {unit}"


def format_duration(seconds: float) -> str:
    """`seconds` for people and for `parse_duration`, in the largest unit that leaves no fraction: 90 -> "90s"."""
    exact = Fraction(seconds).limit_denominator(10**9)
    units = sorted(SECONDS, key=lambda unit: SECONDS[unit], reverse=True)
    unit = next((unit for unit in units if (exact / SECONDS[unit]).denominator == 1), "us")
    return f"{float(exact / SECONDS[unit]):.12g}{unit}"
