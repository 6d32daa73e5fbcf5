"""`hicache why`: why a request of a trace hits no more than it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hicache.cli.replay_cmd import ConfigFile, MaxRunning, Overrides, Trace
from hicache.cli.wiring import load_trace, simulate
from hicache.config import load_config
from hicache.errors import ConfigError
from hicache.sim.options import ReplayOptions, SimOptions

if TYPE_CHECKING:
    from hicache.cache import HiCache
    from hicache.explaining import Explanation
    from hicache.sim.workload import TraceRequest

LOG_SIZE = 1_000_000
"""Decisions that are kept where the configuration does not say; 400 bytes each or so."""

DEFAULTS = ReplayOptions()

RequestId = Annotated[
    str,
    typer.Option(
        "--request", metavar="RID", help="Its number in the trace, from 0; of generated chats such as 00003.0002."
    ),
]
PrefixTokens = Annotated[
    int | None,
    typer.Option("--prefix-tokens", min=1, metavar="N", help="Explain its first N tokens only.", show_default=False),
]


def why(  # noqa: PLR0913 - one parameter per option of the command line
    trace: Trace,
    config: ConfigFile,
    request: RequestId,
    prefix_tokens: PrefixTokens = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    overrides: Overrides = None,
    max_running: MaxRunning = DEFAULTS.max_running,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show a bar on a terminal.")] = True,
) -> None:
    """Replay TRACE without bytes up to a request: where its match ends on each tier when it is let in, and why.

    Exits with 2 for a bad trace or configuration, or if there is no such request.
    """
    tiers = load_config(config, [*(overrides or ()), *_log_size(config, overrides)])
    requests = load_trace(trace)
    upto = _position(requests, request, trace)
    wanted = requests[upto]
    found: list[Explanation] = []

    def observe(cache: HiCache) -> None:
        from hicache.types import PrefixKey

        tokens = wanted.tokens()[: prefix_tokens if prefix_tokens is not None else max(wanted.prompt_len - 1, 0)]
        key = PrefixKey.of(tokens, wanted.namespace)
        cache.tiers.decisions.watch(request, lambda: found.append(cache.why(key)))

    options = SimOptions(ReplayOptions(max_running=max_running))
    simulate(tiers, requests[: upto + 1], options, Console(stderr=True, quiet=not progress), observe)
    if not found:
        raise ConfigError(f"request {request!r} is longer than the device tier and never runs: give the tier more")
    if as_json:
        typer.echo(json.dumps({"request": request, **found[-1].to_json()}, indent=2))
    else:
        Console().print(to_table(found[-1], wanted), _foot(prefix_tokens is None), sep="\n")


def _log_size(config: Path, overrides: list[str] | None) -> list[str]:
    """A large log, unless the configuration has one."""
    return [] if load_config(config, overrides or ()).decision_log else [f"decision_log={LOG_SIZE}"]


def _position(requests: list[TraceRequest], rid: str, trace: str) -> int:
    at = next((at for at, request in enumerate(requests) if request.rid == rid), None)
    if at is None:
        example = f"they go from {requests[0].rid} to {requests[-1].rid}" if requests else "the trace has none"
        raise ConfigError(f"{trace}: there is no request {rid!r}, {example}")
    return at


def to_table(found: Explanation, request: TraceRequest) -> Table:
    """A row for each tier."""
    asked = f"{found.tokens:,} of its {request.prompt_len:,} prompt tokens"
    title = f"request {request.rid}: {asked}, let in at {found.now:,.3f} s"
    table = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.add_column("tier")
    table.add_column("match ends at", justify="right")
    table.add_column("share", justify="right")
    table.add_column("because")
    for tier in found.tiers:
        because = Text.assemble((tier.reason.value, "bold"), ": ", tier.text)
        share = f"{tier.tokens / max(found.tokens, 1):.1%}"
        table.add_row(tier.tier.name.lower(), f"{tier.tokens:,}", share, because)
    return table


def _foot(whole: bool) -> Text:
    last = "; the last token of a prompt is always computed" if whole else ""
    return Text(f"each tier goes on where the one above ends{last}", "dim")
