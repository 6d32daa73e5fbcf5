"""`hicache plan`: what tiers to buy for a trace and a model, and which eviction policy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hicache.cli.replay_cmd import Limit, MaxRunning, Trace
from hicache.cli.wiring import load_trace, simulate
from hicache.errors import ConfigError
from hicache.sim.options import ReplayOptions, SimOptions

if TYPE_CHECKING:
    from hicache.planning.hits import Tick
    from hicache.planning.plan import Plan

Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="CONFIG",
        help="A Hugging Face config.json, a folder with one, or a model that hicache knows, such as Qwen/Qwen3-8B.",
        show_default=False,
    ),
]
Budget = Annotated[
    str,
    typer.Option(
        metavar="TIER=SIZE,...",
        help="Limits of one rank, such as device=40GiB,host=256GiB,disk=2TiB (these are the defaults); disk=none.",
        show_default=False,
    ),
]
Policies = Annotated[str, typer.Option(metavar="NAME,...", help="Eviction policies to compare.")]
KvDtype = Annotated[
    str | None, typer.Option("--kv-dtype", help="Type of the KV, such as fp8, if not the model's.", show_default=False)
]
PageSize = Annotated[int, typer.Option(min=1, help="Tokens of a page, for traces that name tokens and not blocks.")]
CostsFile = Annotated[
    Path | None,
    typer.Option("--costs", metavar="FILE", help="YAML whose section costs tells what copies and prefill take here."),
]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a report with plots, one file.", show_default=False)
]
YamlFile = Annotated[
    Path | None, typer.Option("--write", metavar="FILE", help="Write the suggested tiers.yaml.", show_default=False)
]
Store = Annotated[str, typer.Option(metavar="PATH", help="Folder of the disk tier in the suggestion.")]


def plan(  # noqa: PLR0913 - one parameter per option of the command line
    trace: Trace,
    model: Model,
    budget: Budget = "",
    policies: Policies = "lru,adaptive",
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel ranks.")] = 1,
    kv_dtype: KvDtype = None,
    page_size: PageSize = 64,
    costs: CostsFile = None,
    html: HtmlFile = None,
    write: YamlFile = None,
    store: Store = "hicache-store",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    limit: Limit = None,
    max_running: MaxRunning = 64,
    bound: Annotated[bool, typer.Option("--bound/--no-bound", help="Compute MIN, the offline optimum.")] = True,
    replayed: Annotated[
        bool, typer.Option("--replay/--no-replay", help="Replay the trace through the suggestion, without bytes.")
    ] = True,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show a bar on a terminal.")] = True,
) -> None:
    """Hit rates and times to first token for TRACE against the size of every tier, by policy, and suggested tiers.

    The lru curves take one pass over the trace; of other policies a few sizes are simulated. Exits with 2 for a bad
    trace, model or budget.
    """
    from hicache.planning.budget import parse_budget
    from hicache.planning.hits import check_policies
    from hicache.planning.model_config import read_model
    from hicache.planning.pages import page_trace
    from hicache.planning.plan import PlanInput, make_plan

    names = check_policies([name.strip() for name in policies.split(",") if name.strip()])
    shape, limits, section = read_model(model, kv_dtype), parse_budget(budget), _costs(costs)
    requests = load_trace(trace, limit)
    given = PlanInput(page_trace(requests, page_size), shape, limits, names, tp, section, store, max_running)
    console = Console(stderr=True, quiet=not progress)
    with _status(console) as tick:
        found = make_plan(given, bound, tick)
    if replayed:
        options = SimOptions(ReplayOptions(max_running=max_running, window=2 * max_running))
        found = found.replayed(lambda config: simulate(config, requests, options, console))
    _write(found, html, write, trace)
    _print(found, as_json, html, write)


@contextmanager
def _status(console: Console) -> Iterator[Tick]:
    """Says what is simulated, on a terminal."""
    if not console.is_terminal:
        yield lambda what: None
        return
    with console.status("one pass for lru ...") as status:
        yield lambda what: status.update(f"simulating {what} ...")


def _costs(path: Path | None) -> Mapping[str, Any]:
    """The section `costs` of a file, or a file that is nothing else."""
    import yaml

    if path is None:
        return {}
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from None
    section = data.get("costs", data) if isinstance(data, dict) else None
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: there is no section costs; hicache bench calibrate writes one")
    return section


def _write(plan: Plan, html: Path | None, write: Path | None, trace: str) -> None:
    from hicache.planning.report import to_html
    from hicache.planning.suggestion import to_yaml
    from hicache.planning.tables import suggestion_text

    texts = {}
    if write is not None:
        texts[write] = to_yaml(plan.values, [f"hicache plan for {Path(trace).name}: {suggestion_text(plan)}"])
    if html is not None:
        texts[html] = to_html(plan, Path(trace).name)
    for path, text in texts.items():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _print(plan: Plan, as_json: bool, html: Path | None, write: Path | None) -> None:
    from hicache.planning.suggestion import to_yaml
    from hicache.planning.tables import to_json, to_table

    if as_json:
        typer.echo(json.dumps(to_json(plan), indent=2))
        return
    console = Console()
    console.print(to_table(plan))
    if write is None:
        console.print("\ntiers.yaml:", style="bold")
        typer.echo(to_yaml(plan.values, []))
    for path in filter(None, (write, html)):
        console.print(f"written: {path}")
