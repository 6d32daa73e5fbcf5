"""What `replay` needs: a trace by name, and a replay through a cache that is closed whatever happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hicache.cli.progress import interruptible
from hicache.errors import ConfigError, IntegrityError
from hicache.sim.generator import ChatWorkload, generate
from hicache.sim.result import ReplayResult
from hicache.sim.traces import in_order, read_trace
from hicache.sim.workload import TraceRequest

if TYPE_CHECKING:
    from hicache.cache import HiCache
    from hicache.config import CacheConfig
    from hicache.sim.options import ReplayOptions, SimOptions
    from hicache.sim.simulate import SimResult
    from hicache.stats import Counters

CHATS = "chats"
"""Name of the built-in generator where a trace file is expected."""


def load_trace(source: str, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a trace file by time of arrival, or of the generator for "chats" and
    "chats:seed=3,turns=20". Says on stderr if the file was in another order.

    Raises TraceError with the line that cannot be used, ConfigError for an option of the generator.
    """
    name, _, options = source.partition(":")
    if name == CHATS:
        return list(islice(generate(parse_workload(options)), limit))
    requests, late = in_order(list(read_trace(Path(source), limit)))
    if late:
        typer.echo(f"{source}: not in order of time ({late:,} lines are earlier than the one before): sorted", err=True)
    return requests


def parse_workload(text: str) -> ChatWorkload:
    """The generator's parameters from "seed=3,conversations=50"; no text, the defaults."""
    values: dict[str, int | float] = {}
    for item in filter(None, text.split(",")):
        name, value = _parse_option(item)
        if name in values:
            raise ConfigError(f"{CHATS}: {name} is given twice")
        values[name] = value
    return ChatWorkload(**values)  # type: ignore[arg-type] # each value has the type of its field


def _parse_option(item: str) -> tuple[str, int | float]:
    kinds: dict[str, type[int] | type[float]] = {
        field.name: int if isinstance(field.default, int) else float for field in fields(ChatWorkload)
    }
    name, _, value = (part.strip() for part in item.partition("="))
    if name not in kinds:
        raise ConfigError(f"{CHATS}: unknown option {name!r}; the options are {', '.join(kinds)}")
    try:
        return name, kinds[name](value)
    except ValueError:
        what = "a whole number" if kinds[name] is int else "a number"
        raise ConfigError(f"{CHATS}: {name}={value}: write {what}, such as {name}=1") from None


@dataclass(frozen=True)
class Outcome:
    """What a replay measured, and how long it took to build the cache (with a store: to open it)."""

    result: ReplayResult
    open_seconds: float


def replay(config: CacheConfig, trace: Sequence[TraceRequest], options: ReplayOptions, console: Console) -> Outcome:
    """Build the cache, replay the trace, close the cache. Progress goes to `console` if it is a terminal.

    Raises ConfigError if the cache cannot be built, IntegrityError if it loses count of a token or a page,
    KeyboardInterrupt on Ctrl-C; the cache is closed in any case.
    """
    from hicache.build import build_cache

    start = time.perf_counter()
    cache = build_cache(config)
    open_seconds = time.perf_counter() - start
    try:
        result = _run(cache, trace, options, console)
    finally:
        with _status(console, "closing: what only memory holds goes to storage ..."):
            cache.close()
    return Outcome(result, open_seconds)


def simulate(
    config: CacheConfig,
    trace: Sequence[TraceRequest],
    options: SimOptions,
    console: Console,
    observe: Callable[[HiCache], object] = lambda cache: None,
) -> SimResult:
    """Replay the trace without bytes, by the costs of the configuration. Progress goes to `console`; `observe` gets the
    cache before the replay begins.

    Raises ConfigError for costs or a backend that cannot be modelled, KeyboardInterrupt on Ctrl-C.
    """
    from hicache.config.cost_model import costs_of
    from hicache.sim.simulate import simulate as run_simulation

    costs = costs_of(config)
    with _progress_bar(console, None, len(trace)) as progress:
        return run_simulation(config, trace, costs, options, progress, observe)


def check_pages(result: ReplayResult) -> None:
    """Raises IntegrityError if a hit page held wrong bytes."""
    if result.wrong_pages:
        raise IntegrityError(f"{result.wrong_pages:,} of {result.checked_pages:,} hit pages held wrong bytes")


def _run(cache: HiCache, trace: Sequence[TraceRequest], options: ReplayOptions, console: Console) -> ReplayResult:
    from hicache.build import build_requests
    from hicache.host_pool.pool import POISON_BYTE
    from hicache.requests import Request
    from hicache.sim.driver import Replay
    from hicache.sim.ports import ReplayTarget
    from hicache.streams import create_stream

    pool, allocator = cache.tiers.device_pool, cache.tiers.device_allocator
    requests = build_requests(cache, options.max_running)
    compute = create_stream(pool.device, "compute")
    context = allocator.num_pages * cache.page_size
    target = ReplayTarget(cache, requests, Request, allocator, pool, compute, context)
    try:
        with _progress_bar(console, cache.tiers.counters, len(trace)) as show, _interruptible(show) as progress:
            return Replay.with_bytes(target, POISON_BYTE, options, progress).run(trace)
    finally:
        compute.close()


@contextmanager
def _interruptible(progress: Callable[[int, int], None]) -> Iterator[Callable[[int, int], None]]:
    """Ctrl-C takes effect when a request has finished, so that the cache is in order; a second one at once."""
    with interruptible() as check:

        def step(requests: int, prompt_tokens: int) -> None:
            check()
            progress(requests, prompt_tokens)

        yield step


@contextmanager
def _progress_bar(console: Console, counters: Counters | None, total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar with requests, tokens per second and the hit rate of `counters`; nothing where there is no terminal."""
    columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    start = time.perf_counter()
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def show(requests: int, prompt_tokens: int) -> None:
            text = f"{prompt_tokens / (time.perf_counter() - start):,.0f} tokens/s"
            if counters is not None:
                hits = sum(counters.hit_tokens.values())
                text += f", {hits / max(hits + counters.computed_tokens, 1):.0%} hits"
            bar.update(task, completed=requests, description=text)

        yield show


def _status(console: Console, text: str) -> AbstractContextManager[object]:
    return console.status(text) if console.is_terminal else nullcontext()
