"""A replay's result for people (rich tables) and for programs (JSON)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hicache.config.units import format_bytes
from hicache.sim.result import ReplayResult

_IMPAIRED = ("off", "trying")


def to_json(result: ReplayResult) -> dict[str, Any]:
    """Plain values: tokens, pages, bytes, seconds."""
    return {
        "requests": result.requests,
        "prompt_tokens": result.prompt_tokens,
        "hit_tokens": dict(result.hit_tokens),
        "computed_tokens": result.computed_tokens,
        "demoted_pages": dict(result.demoted_pages),
        "dropped_pages": dict(result.dropped_pages),
        "wrong_pages": result.wrong_pages,
        "seconds": round(result.seconds, 3),
        "poisoned_pages": result.poisoned_pages,
        "checked_pages": result.checked_pages,
        "wrong_examples": list(result.wrong_examples),
        "moved_bytes": dict(result.moved_bytes),
        "failures": dict(result.failures),
        "storage_loads": result.storage_loads,
        "storage_stores": result.storage_stores,
        "output_tokens": result.output_tokens,
        "recomputed_tokens": result.recomputed_tokens,
        "retractions": result.retractions,
        "failed_loads": result.failed_loads,
        "skipped_requests": len(result.skipped),
        "skipped_tokens": result.skipped_tokens,
    }


def to_table(result: ReplayResult, verified: bool) -> RenderableType:
    """Everything a person wants to see of a replay; `verified` says whether hit pages were checked."""
    parts: list[RenderableType] = [tokens_table(result), pages_table(result, moved=True), _summary(result)]
    parts.append(_verdict(result) if verified else Text("hit pages were not checked (--verify checks them)", "dim"))
    parts += [Text(line, "red") for line in result.wrong_examples]
    states = {"loads from storage": result.storage_loads, "stores to storage": result.storage_stores}
    parts += [Text(f"{what}: {state} at the end", "yellow") for what, state in states.items() if state in _IMPAIRED]
    return Group(*parts, *skipped_lines(result))


def skipped_lines(result: ReplayResult) -> list[Text]:
    """The first requests that can never run, and how many more there are."""
    lines = [str(skipped) for skipped in result.skipped[:3]]
    if more := len(result.skipped) - len(lines):
        lines.append(f"and {more:,} more; the longest takes {max(one.needed for one in result.skipped):,} tokens")
    return [Text(line, "yellow") for line in lines]


def tokens_table(result: ReplayResult) -> Table:
    """Prompt tokens by where their KV came from."""
    table = plain_table("prompt tokens", "tokens", "share")
    total = max(result.prompt_tokens + result.skipped_tokens, 1)
    for tier, tokens in result.hit_tokens.items():
        table.add_row(f"hit on {tier}", f"{tokens:,}", f"{tokens / total:.1%}")
    table.add_row("computed", f"{result.computed_tokens:,}", f"{result.computed_tokens / total:.1%}")
    if skipped := result.skipped_tokens:
        table.add_row("of requests too long to run", f"{skipped:,}", f"{skipped / total:.1%}")
    table.add_section()
    table.add_row("asked for", f"{total:,}", "")
    return table


def pages_table(result: ReplayResult, moved: bool = False) -> Table:
    """Pages demoted and dropped, what failed; with `moved` the bytes, too."""
    table = plain_table("what happened", "amount")
    _add_rows(table, "pages demoted", _edges(result.demoted_pages), _count)
    _add_rows(table, "pages dropped", result.dropped_pages, _count)
    if moved:
        _add_rows(table, "bytes moved", _edges(result.moved_bytes), bytes_moved)
    if result.failures:
        _add_rows(table, "failures", result.failures, _count)
    return table


def _add_rows(table: Table, what: str, values: Mapping[str, int], show: Callable[[int], str]) -> None:
    for name, value in values.items():
        table.add_row(f"{what}: {name}", show(value))
    if not values:
        table.add_row(what, show(0))
    table.add_section()


def _edges(values: Mapping[str, int]) -> dict[str, int]:
    """device_host → "device to host"."""
    return {name.replace("_", " to "): value for name, value in values.items()}


def _summary(result: ReplayResult) -> Text:
    rate = result.prompt_tokens / max(result.seconds, 1e-9)
    text = f"{result.requests:,} requests in {result.seconds:.1f} s, {rate:,.0f} prompt tokens/s"
    extras = {
        "retracted": result.retractions,
        "failed loads": result.failed_loads,
        "skipped": len(result.skipped),
        "tokens recomputed": result.recomputed_tokens,
    }
    return Text(text + "".join(f", {count:,} {name}" for name, count in extras.items() if count))


def _verdict(result: ReplayResult) -> Text:
    text = f"wrong pages = {result.wrong_pages:,} of {result.checked_pages:,} checked"
    if result.poisoned_pages:
        text += f", {result.poisoned_pages:,} of them poisoned"
    return Text(text, "bold red" if result.wrong_pages else "bold green")


def plain_table(title: str, *columns: str) -> Table:
    """A table without lines: `title` is its first column, the others are numbers."""
    table = Table(title, box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _count(value: int) -> str:
    return f"{value:,}"


def bytes_moved(value: float) -> str:
    """Bytes to one digit: sums of many pages."""
    return format_bytes(value, digits=1)
