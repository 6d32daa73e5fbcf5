"""A simulation's result for people (rich tables) and for programs (JSON)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hicache.sim.report import bytes_moved, pages_table, plain_table, skipped_lines, to_json, tokens_table
from hicache.sim.simulate import SimResult

_OF_BYTES = ("checked_pages", "wrong_pages", "poisoned_pages", "wrong_examples")
_MS = 1000


def sim_json(result: SimResult) -> dict[str, Any]:
    """Plain values: as `to_json` without what takes bytes, and times in seconds of the virtual clock.

    `seconds` is how long the simulation ran, `virtual_seconds` how long the requests would have taken.
    """
    replay = {name: value for name, value in to_json(result.replay).items() if name not in _OF_BYTES}
    total = max(result.replay.prompt_tokens + result.replay.skipped_tokens, 1)
    return {
        **replay,
        "hit_rate": {tier: tokens / total for tier, tokens in result.replay.hit_tokens.items()},
        "ttft": asdict(result.ttft),
        "queued": asdict(result.queued),
        "virtual_seconds": result.virtual_seconds,
        "busy_seconds": dict(result.busy),
        "tokens_per_second": round(result.tokens_per_second),
        "prefetches": dict(result.stats.prefetches),
        "load_choices": dict(result.stats.load_choices),
        "declined_tokens": dict(result.stats.declined_tokens),
        "saved_seconds": result.stats.saved_seconds,
    }


def sim_table(result: SimResult) -> RenderableType:
    """Everything a person wants to see of a simulation."""
    parts: list[RenderableType] = [tokens_table(result.replay), _times_table(result), _edges_table(result)]
    parts.append(pages_table(result.replay))
    if result.stats.load_choices:
        parts.append(_choices_table(result))
    parts.append(_summary(result))
    return Group(*parts, *skipped_lines(result.replay))


def _times_table(result: SimResult) -> Table:
    table = plain_table("modelled", "mean", "p50", "p99")
    for name, times in (("time to first token", result.ttft), ("of that in the queue", result.queued)):
        table.add_row(name, *(_time(seconds) for seconds in (times.mean, times.p50, times.p99)))
    return table


def _edges_table(result: SimResult) -> Table:
    table = plain_table("worked", "bytes", "busy")
    total = max(result.virtual_seconds, 1e-9)
    for name, seconds in result.busy.items():
        moved = result.replay.moved_bytes.get(name, 0)
        what = name.replace("_", " to ")
        table.add_row(what, "" if name == "compute" else bytes_moved(moved), f"{seconds / total:.1%}")
    return table


def _choices_table(result: SimResult) -> Table:
    """Of the policy auto."""
    table = plain_table("load or recompute", "amount")
    for name, count in result.stats.load_choices.items():
        table.add_row(name.replace("_", ": "), f"{count:,}")
    for tier, tokens in result.stats.declined_tokens.items():
        table.add_row(f"tokens of {tier} computed anew", f"{tokens:,}")
    table.add_row("saved against loading all", _time(result.stats.saved_seconds))
    return table


def _summary(result: SimResult) -> Text:
    replay = result.replay
    text = (
        f"{replay.requests:,} requests over {result.virtual_seconds:,.0f} s of the virtual clock, simulated in "
        f"{replay.seconds:.1f} s, {result.tokens_per_second:,.0f} prompt tokens/s"
    )
    extras = {"retracted": replay.retractions, "skipped": len(replay.skipped)}
    return Text(text + "".join(f", {count:,} {name}" for name, count in extras.items() if count))


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * _MS:,.1f} ms"
    return f"{seconds:,.2f} s"
