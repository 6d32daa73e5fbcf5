"""`hicache stress`: long chats through tiers far too small while disks and copies fail, checked against no cache."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hicache.config.units import parse_duration
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from hicache.serving.stress import StressReport

Duration = Annotated[str, typer.Option("--duration", metavar="TIME", help="How long, such as 90s or 2h.")]
Sessions = Annotated[int, typer.Option(min=1, help="At least so many times the engine begins anew on its disk.")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="SPEC", help="As for serve (default: a stand-in that checks every page).", show_default=False
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option("--path", metavar="DIR", help="Folder of the disk tier (default: a temporary one)."),
]


def stress(  # noqa: PLR0913 - one parameter per option of the command line
    duration: Duration = "60s",
    sessions: Sessions = 2,
    model: Model = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="Where KV is: auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of the conversations.")] = 0,
    concurrent: Annotated[int, typer.Option(min=1, help="Requests in the engine at a time.")] = 24,
    disk_faults: Annotated[float, typer.Option(min=0, max=1, help="Chance of a failure per call of the disk.")] = 0.05,
    copy_faults: Annotated[float, typer.Option(min=0, max=1, help="Chance of a failure per copy.")] = 0.002,
    aborts: Annotated[float, typer.Option(min=0, max=1, help="Chance of an abort per step.")] = 0.01,
    path: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Compare every answer of long chats, served while everything fails that can, with one computed without cache.

    A line on stderr for each session. Exits with 1 if an answer or a page was wrong, 2 for bad options.
    """
    from hicache.serving.conversations import ConversationOptions
    from hicache.serving.stress import StressOptions, check, run_stress
    from hicache.serving.weights import load_model

    options = StressOptions(
        seconds=_seconds(duration),
        sessions=sessions,
        concurrent=concurrent,
        aborts=aborts,
        device=device,
        disk_faults=disk_faults,
        copy_faults=copy_faults,
        talk=ConversationOptions(seed=seed),
    )
    loaded = load_model(model) if model is not None else None
    with _folder(path) as folder, Console(stderr=True).status("running ..."):
        report = run_stress(folder, options, loaded, lambda line: typer.echo(line, err=True))
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else _summary(report))
    check(report)


def _summary(report: StressReport) -> str:
    failures = sum(report.counted.values())
    return (
        f"{report.compared:,} answers of {report.conversations:,} chats compared, {report.compared_tokens:,} tokens, "
        f"in {report.seconds:.0f} s and {report.sessions} sessions, {failures:,} failures on the way: "
        f"{report.wrong_outputs} answers and {report.wrong_pages} pages wrong"
    )


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"--duration: {error}") from None


@contextmanager
def _folder(path: Path | None) -> Iterator[Path]:
    if path is not None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="hicache-stress-") as folder:
        yield Path(folder)
