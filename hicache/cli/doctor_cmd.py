"""`hicache doctor`: what this machine can do for hicache, what is missing, and how to get it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from hicache.observability.doctor.finding import Finding

_SIGNS = {
    "ok": ("✓ ok", "green"),
    "note": ("· note", ""),
    "missing": ("– missing", "yellow"),
    "broken": ("✗ broken", "red"),
}

Folder = Annotated[
    Path | None,
    typer.Option("--path", metavar="DIR", help="Check this folder for the disk tier; a page is written for a moment."),
]


def doctor(
    path: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Say what this machine can do for hicache and what is missing, with the mend. Changes nothing.

    Exits with 1 if something that is installed does not work; what is only missing is no failure.
    """
    from hicache.observability.doctor.diagnosis import diagnose, is_broken, verdict

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without ✓ shall show the rest
    with Console(stderr=True).status("looking ..."):
        findings = diagnose(path)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        console = Console(highlight=False)
        console.print(_table(findings), Text(verdict(findings)), sep="\n")
    raise typer.Exit(1 if is_broken(findings) else 0)


def _table(findings: Sequence[Finding]) -> Table:
    """One row for each check, its mend below what was found."""
    table = Table("area", "check", "state", "found", box=None, pad_edge=False, header_style="bold")
    for column in table.columns[:3]:
        column.no_wrap = True
    area = ""
    for finding in findings:
        if area and finding.area != area:
            table.add_row()
        sign, style = _SIGNS[finding.status]
        found = Text(finding.value + (f"\n→ {finding.mend}" if finding.mend else ""))
        table.add_row(finding.area if finding.area != area else "", finding.name, Text(sign, style), found)
        area = finding.area
    table.add_row()
    return table
