"""What one check says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "note", "missing", "broken"]
"""ok: works · note: works, worth knowing · missing: an optional part is not there · broken: what is there fails."""


@dataclass(frozen=True)
class Finding:
    """`name` within `area` identifies a check; `value` and `mend` are for people. No mend: nothing to do."""

    area: str
    name: str
    value: str
    status: Status = "ok"
    mend: str = ""


def in_one_line(error: BaseException) -> str:
    """The error as one line. Of a text in a frame, as CuPy's, the last line is the one that names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" =-")]
    name = type(error).__name__
    if not lines:
        return name
    return lines[-1] if lines[-1].startswith(f"{name}: ") else f"{name}: {lines[-1]}"


def dotted(version: tuple[int, int] | None) -> str:
    """(13, 0) -> "13.0"."""
    return "unknown" if version is None else f"{version[0]}.{version[1]}"
