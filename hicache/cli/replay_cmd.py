"""`hicache replay`: a trace through the tiers of a configuration, as a scheduler would drive them.

With bytes as fast as it goes; without, on a virtual clock by modelled costs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hicache.cli.wiring import check_pages, load_trace
from hicache.cli.wiring import replay as run_replay
from hicache.cli.wiring import simulate as run_simulation
from hicache.config import CacheConfig, load_config
from hicache.config.loading import load_costs
from hicache.errors import ConfigError
from hicache.sim.options import ReplayOptions, SimOptions
from hicache.sim.report import to_json, to_table
from hicache.sim.workload import TraceRequest

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
NoBytes = Annotated[
    bool,
    typer.Option(
        "--no-bytes",
        help="Keep pages without bytes, on a virtual clock: fast, with times to first token modelled by `costs`.",
    ),
]
CostsFile = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        metavar="FILE",
        help="With --no-bytes: the section `costs` of this file in place of the configuration's.",
        show_default=False,
    ),
]
Speed = Annotated[
    float | None,
    typer.Option(
        metavar="FACTOR",
        help="With --no-bytes: how many times as fast requests arrive (default: 1).",
        show_default=False,
    ),
]


def replay(  # noqa: PLR0913 - one parameter per option of the command line
    trace: Trace,
    config: ConfigFile,
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte of every hit page before use.")] = False,
    no_bytes: NoBytes = False,
    speed: Speed = None,
    costs: CostsFile = None,
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

    With --no-bytes also the modelled time to first token. Exits with 1 if a page was wrong or lost, 2 for a bad trace
    or configuration. Ctrl-C closes the cache first.
    """
    options = ReplayOptions(verify, max_running, window, chunk_tokens, step_tokens, decode_tokens)
    _check_options(no_bytes, verify, speed, costs)
    tiers = load_config(config, overrides or ())
    if costs is not None:
        tiers = tiers.model_copy(update={"costs": load_costs(costs)})
    if verify and (lossy := tiers.lossy_codec):
        mend = "use a lossless one, or leave --verify out"
        raise ConfigError(f"{tiers.where(*lossy)}: --verify would find what this codec changes in every page: {mend}")
    requests = load_trace(trace, limit)
    console = Console(stderr=True, quiet=not progress)
    if no_bytes:
        _without_bytes(tiers, requests, SimOptions(options, 1.0 if speed is None else speed), console, as_json)
        return
    result = run_replay(tiers, requests, options, console).result
    if as_json:
        typer.echo(json.dumps(to_json(result), indent=2))
    else:
        Console().print(to_table(result, verify))
    check_pages(result)


def _check_options(no_bytes: bool, verify: bool, speed: float | None, costs: Path | None) -> None:
    if no_bytes and verify:
        raise ConfigError("--verify checks bytes and --no-bytes has none: leave one of them out")
    if speed is not None and not no_bytes:
        raise ConfigError("--speed paces a virtual clock: add --no-bytes; with bytes requests come as fast as it goes")
    if costs is not None and not no_bytes:
        raise ConfigError("--costs are those of a virtual clock: add --no-bytes, or write them into the configuration")


def _without_bytes(
    config: CacheConfig, trace: list[TraceRequest], options: SimOptions, console: Console, as_json: bool
) -> None:
    from hicache.sim.sim_report import sim_json, sim_table

    result = run_simulation(config, trace, options, console)
    if as_json:
        typer.echo(json.dumps(sim_json(result), indent=2))
    else:
        Console().print(sim_table(result))
