"""`hicache replay`: a trace through the tiers of a configuration, as a scheduler would drive them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hicache.cli.wiring import check_pages, load_trace
from hicache.cli.wiring import replay as run_replay
from hicache.config import load_config
from hicache.sim.driver import ReplayOptions
from hicache.sim.report import to_json, to_table

DEFAULTS = ReplayOptions()

Trace = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help="A trie CSV, Mooncake or Bailian JSONL file, plain or gzipped; or generated chats: "
        "'chats', 'chats:seed=3,conversations=50'.",
        show_default=False,
    ),
]
ConfigFile = Annotated[Path, typer.Option("--config", metavar="FILE", help="YAML of the tiers.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a value, such as tiers.1.size=1GiB. May be repeated."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Replay the first requests only.", show_default=False)]
MaxRunning = Annotated[int, typer.Option(min=1, help="Requests that run at a time.")]
Window = Annotated[int, typer.Option(min=1, help="Waiting requests that prefetch from storage.")]
StepTokens = Annotated[int, typer.Option(min=1, help="Tokens computed in a step, all requests together.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Prompt tokens of one request in a step.")]
DecodeTokens = Annotated[int, typer.Option(min=1, help="Answer tokens of one request in a step.")]


def replay(  # noqa: PLR0913 - one parameter per option of the command line
    trace: Trace,
    config: ConfigFile,
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte of every hit page before use.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    overrides: Overrides = None,
    limit: Limit = None,
    max_running: MaxRunning = DEFAULTS.max_running,
    window: Window = DEFAULTS.window,
    step_tokens: StepTokens = DEFAULTS.step_tokens,
    chunk_tokens: ChunkTokens = DEFAULTS.chunk_tokens,
    decode_tokens: DecodeTokens = DEFAULTS.decode_tokens,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show a bar on a terminal.")] = True,
) -> None:
    """Replay TRACE through the cache: hits per tier, demotions, drops, bytes moved, and wrong pages if there are any.

    Exits with 1 if a page was wrong or lost, 2 for a bad trace or configuration. Ctrl-C closes the cache first.
    """
    options = ReplayOptions(verify, max_running, window, chunk_tokens, step_tokens, decode_tokens)
    tiers = load_config(config, overrides or ())
    requests = load_trace(trace, limit)
    result = run_replay(tiers, requests, options, Console(stderr=True, quiet=not progress)).result
    if as_json:
        typer.echo(json.dumps(to_json(result), indent=2))
    else:
        Console().print(to_table(result, verify))
    check_pages(result)
