"""`hicache demo`: long chats through three tiers far too small for them, every byte checked, and a restart."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hicache.cli.wiring import Outcome, check_pages
from hicache.cli.wiring import replay as run_replay
from hicache.config import CacheConfig, config_from_mapping
from hicache.errors import ConfigError, IntegrityError
from hicache.sim.driver import ReplayOptions
from hicache.sim.generator import ChatWorkload, generate
from hicache.sim.report import format_bytes, to_json, to_table
from hicache.sim.result import ReplayResult
from hicache.sim.workload import TraceRequest

WORKLOAD = ChatWorkload(conversations=128, tool_tokens=2048, context_tokens=8192, start_gap_ms=500.0, think_ms=20_000.0)
RESTART_REQUESTS = 60
"""The last requests of the workload, replayed after the restart: what was used last is kept longest."""

DEVICE_TOKENS, HOST_TOKENS, STORAGE_TOKENS = 24_576, 40_960, 262_144
PAGE_SIZE = 16


@dataclass(frozen=True)
class Demo:
    """Both replays, and what each has to show for the demo to succeed."""

    first: Outcome
    restart: Outcome

    @property
    def failures(self) -> list[str]:
        """Tiers that served nothing; empty if all did."""
        idle = [f"{tier} served no hits" for tier, tokens in self.first.result.hit_tokens.items() if not tokens]
        if not self.restart.result.hit_tokens["storage"]:
            idle.append("storage served no hits after the restart")
        return idle

    def to_json(self) -> dict[str, Any]:
        return {
            "replay": to_json(self.first.result),
            "restart": {"open_seconds": round(self.restart.open_seconds, 3), **to_json(self.restart.result)},
            "failures": self.failures,
        }


def demo(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the store in DIR, a new folder.", show_default=False)
    ] = None,
) -> None:
    """Watch long chats go through device, host and disk tiers far too small for them. Takes half a minute."""
    console = Console(quiet=as_json)
    progress = Console(stderr=True)
    trace = generate(WORKLOAD)
    with _folder(keep) as folder:
        config = _config(folder / "store")
        console.print(_introduction(config, trace), "", sep="\n", highlight=False)
        options = ReplayOptions(verify=True)
        first = run_replay(config, trace, options, progress)
        console.print(to_table(first.result, verified=True), "")
        result = Demo(first, run_replay(config, trace[-RESTART_REQUESTS:], options, progress))
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    console.print(_restart_line(result.restart), highlight=False)
    _conclude(result, console)


def _conclude(result: Demo, console: Console) -> None:
    check_pages(result.first.result)
    check_pages(result.restart.result)
    if result.failures:
        raise IntegrityError("; ".join(result.failures))
    console.print("[bold green]Device, host and disk each served hits, and every byte was right.[/]", highlight=False)


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


def _config(store: Path) -> CacheConfig:
    """A made-up model of 2 layers, 512 bytes a token, as the workload is what counts here."""
    prefetch = {"policy": "wait_complete", "deadline": "2s"}
    tiers: list[dict[str, object]] = [
        {"tier": "device", "device": "cpu", "size": f"{DEVICE_TOKENS} tokens"},
        {"tier": "host", "size": f"{HOST_TOKENS} tokens", "eviction": "slru"},
        {"tier": "storage", "path": str(store), "size": f"{STORAGE_TOKENS} tokens", "prefetch": prefetch},
    ]
    model = {"name": "example/demo", "layers": 2, "kv_heads": 2, "head_dim": 32, "dtype": "float16"}
    return config_from_mapping({"model": model, "page_size": PAGE_SIZE, "poison": True, "tiers": tiers}, source="demo")


def _introduction(config: CacheConfig, trace: list[TraceRequest]) -> str:
    tokens = sum(request.prompt_len for request in trace)
    return (
        f"{len(trace):,} requests of {WORKLOAD.conversations} long chats and agents ask for {tokens:,} prompt tokens.\n"
        f"Their KV goes through a device of {DEVICE_TOKENS:,} tokens, a host of {HOST_TOKENS:,} and a disk of "
        f"{STORAGE_TOKENS:,} ({format_bytes(config.layout().token_bytes)} each).\n"
        "Every byte of every hit is checked, and freed pages are poisoned. Then the cache restarts on the same disk."
    )


def _restart_line(restart: Outcome) -> str:
    result: ReplayResult = restart.result
    return (
        f"Restarted with nothing in memory: opened in {restart.open_seconds:.2f} s, then {result.requests} requests "
        f"read {result.hit_tokens['storage']:,} tokens from disk and hit {result.hit_rate:.0%} of what they asked for, "
        f"wrong pages = {result.wrong_pages}."
    )
