"""`hicache demo`: chats served without cache, through tiers far too small for them, and again after a restart."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hicache.cli.progress import interruptible
from hicache.config.units import format_bytes
from hicache.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    from hicache.serving.demo import DemoOptions, DemoResult, Pass, Timing, Turn
    from hicache.serving.loaded import LoadedModel

EMBEDDED = "random"
"""The model without `--model`: made up from a seed, and nothing to install."""

SOURCES = {"recompute": "recompute", "device": "device hit", "host": "host hit", "storage": "disk hit"}
MODES = {
    "exact": "Exact mode: a token gives the same bits however it is computed.",
    "fast": "Fast mode: the last bits of logits may differ, tokens must not.",
}


def demo(
    model: Annotated[
        str, typer.Option("--model", metavar="SPEC", help="As for serve; with smollm2 a chat that makes sense.")
    ] = EMBEDDED,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    device: Annotated[str, typer.Option(metavar="NAME", help="Where to compute: auto, cpu, cuda or cuda:N.")] = "auto",
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the store in DIR, a new folder.", show_default=False)
    ] = None,
) -> None:
    """Serve chats without cache, through tiers far too small for them, and after a restart. Takes half a minute.

    Exits with 1 if an answer differs or a tier served nothing.
    """
    from hicache.serving.demo import options_for, run_demo
    from hicache.serving.weights import load_model

    console = Console(quiet=as_json, highlight=False)
    options = replace(options_for(model), device=device)
    with _folder(keep) as folder:
        loaded = load_model(model)
        console.print(_introduction(loaded, options), "", sep="\n")
        with _progress_bar() as progress:
            result = run_demo(loaded, options, folder, progress)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    if model.partition(":")[0] != EMBEDDED:
        _print_chats(result, console)
    console.print(_timing_table(result), "", _token_table(result), "", sep="\n")
    if result.failures:
        raise IntegrityError("; ".join(result.failures))
    console.print(f"[bold green]{_conclusion(result, options)}[/]")


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="hicache-demo-") as folder:
            yield Path(folder)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ConfigError(f"--keep {keep}: exists and is not an empty folder; name a new one")
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--keep {keep}: cannot be made: {error.strerror}; name a folder that can be") from None
    yield keep


@contextmanager
def _progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar of turns on a terminal, nothing elsewhere. Ctrl-C takes effect after a turn."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<15}"), BarColumn(), MofNCompleteColumn(), TextColumn("turns"))
    terminal = console.is_terminal
    with (
        Progress(*columns, TimeElapsedColumn(), console=console, disable=not terminal, transient=True) as bar,
        interruptible() as check,
    ):
        task = bar.add_task("no cache", total=None)

        def show(name: str, done: int, total: int) -> None:
            check()
            bar.update(task, description=name, completed=done, total=total)

        yield show


# ---- what is printed ----------------------------------------------------------------------------


def _introduction(loaded: LoadedModel, options: DemoOptions) -> str:
    geometry, chats = loaded.geometry, options.script.questions
    size = format_bytes(geometry.layout(options.page_size).token_bytes)
    return (
        f"{len(chats)} chats of {len(chats[0])} turns, served three times: without cache, through tiers\n"
        "far too small for them, and again after a restart from disk.\n"
        f"Model {escape(loaded.name)}: {geometry.layers} layers, {geometry.dtype}, {size} of KV a token.\n"
        f"{MODES[options.mode]}\n"
        f"Tiers in tokens: device {options.device_tokens:,}, host {options.host_tokens:,}, "
        f"disk {options.disk_tokens:,}. One request at a time."
    )


def _print_chats(result: DemoResult, console: Console) -> None:
    """Every chat as its user saw it in the second pass, with what each turn took."""
    for number in sorted({turn.conversation for turn in result.warm.turns}):
        console.rule(f"chat {number + 1}", align="left")
        for turn, plain in zip(result.warm.turns, result.plain.turns):
            if turn.conversation == number:
                console.print(_turn_grid(turn, plain), "")


def _turn_grid(turn: Turn, plain: Turn) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_row("[bold cyan]user[/]", escape(turn.question))
    grid.add_row("[bold magenta]assistant[/]", escape(turn.answer.strip()))
    grid.add_row("", f"[dim]{_turn_line(turn, plain)}[/]")
    return grid


def _turn_line(turn: Turn, plain: Turn) -> str:
    cached = turn.metrics.cached_tokens
    tiers = ", ".join(f"{SOURCES[tier].split()[0]} {count:,}" for tier, count in cached.items() if count)
    return (
        f"{sum(cached.values()):,} of {turn.metrics.prompt_tokens:,} tokens cached{f' ({tiers})' if tiers else ''}\n"
        f"first token after {_ms(turn.ttft)}, {_ms(plain.ttft)} without cache"
    )


def _timing_table(result: DemoResult) -> Table:
    table = _table("time to first token", "turns", "prompt", "TTFT", "without cache", "ratio")
    for served in (result.plain, result.warm, result.restart):
        table.add_row(f"[bold]{served.name}[/]")
        for timing in result.timings(served):
            table.add_row(*_timing_row(timing, served is result.plain))
    table.caption = "medians; by the slowest place that the prompt came from"
    return table


def _timing_row(timing: Timing, plain: bool) -> list[str]:
    row = [f"  {SOURCES[timing.source]}", f"{timing.turns:,}", f"{timing.prompt:,} tokens", _ms(timing.ttft)]
    return row if plain else [*row, _ms(timing.plain), f"{timing.ratio:.1f}×"]


def _token_table(result: DemoResult) -> Table:
    table = _table("tokens", "prompts", "device", "host", "disk", "reused", "computed", "time")
    for served in (result.plain, result.warm, result.restart):
        table.add_row(*_token_row(served))
    table.caption = f"the restart opened the store in {_ms(result.restart.open_seconds)}"
    return table


def _token_row(served: Pass) -> list[str]:
    sums = served.sums()
    reused = [sums[tier] for tier in ("device", "host", "storage")]
    counts = [f"{count:,}" for count in (sums["prompt"], *reused)]
    share = f"{sum(reused) / sums['prompt']:.0%}"
    return [served.name, *counts, share, f"{sums['computed']:,}", f"{served.seconds:.1f} s"]


def _conclusion(result: DemoResult, options: DemoOptions) -> str:
    tokens = result.plain.sums()["output"]
    answers = f"All {len(result.plain.turns)} answers, {tokens:,} tokens, are the same all three times"
    bits = ",\nand so is every logit, bit for bit" if options.mode == "exact" else ""
    return f"{answers}{bits}.\nDevice, host and disk each served hits, and every page is accounted for."


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", caption_justify="left")
    table.add_column(title, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"
