"""`hicache serve`: an OpenAI-compatible HTTP endpoint over the reference engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hicache.config import CacheConfig, load_config, parse_config, parse_duration
from hicache.config.models import tier_of
from hicache.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from hicache.serving.http.service import Service
    from hicache.serving.loaded import LoadedModel

DEVICE, HOST, STORAGE = "4096 tokens", "16384 tokens", "131072 tokens"
PAGE_SIZE = 16

Policy = Literal["fcfs", "lpm", "dfs_weight"]

Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="SPEC",
        help="random, random:seed=1; a Hugging Face folder; a .gguf or llama2.c .bin file; smollm2.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="YAML of the tiers; its model section is ignored.", show_default=False
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a value, such as tiers.1.size=1GiB. May be repeated."),
]
Store = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="Keep KV on disk in DIR, without --config.", show_default=False),
]


def serve(  # noqa: PLR0913 - one parameter per option of the command line
    model: Model = "random",
    config: ConfigFile = None,
    overrides: Overrides = None,
    store: Store = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name for clients.", show_default=False)
    ] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Requests that run at a time.")] = 16,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that wait; further ones get a 503.")] = 256,
    policy: Annotated[Policy, typer.Option(help="Order in which requests that wait are admitted.")] = "fcfs",
    grace: Annotated[str, typer.Option(metavar="TIME", help="Time to finish requests after a signal.")] = "10s",
    access_log: Annotated[bool, typer.Option("--access-log", help="A line per request on stdout.")] = False,
) -> None:
    """Serve a model over HTTP as OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models, /health.

    Ctrl-C or SIGTERM ends it, with everything in memory brought to the disk. Exits with 1 if the engine fails, 2 for
    bad options and a port in use.
    """
    _check_packages()
    if config is not None and store is not None:
        raise ConfigError("--store: --config names the store; set it there, or with --set tiers.2.path=DIR")

    from hicache.serving.http.server import bind
    from hicache.serving.http.service import Service, ServiceOptions
    from hicache.serving.scheduler import SchedulerOptions
    from hicache.serving.weights import load_model

    scheduler = SchedulerOptions(policy=policy, max_running=max_running)
    options = ServiceOptions(scheduler, name, max_waiting, _seconds(grace), access_log)
    with closing(bind(host, port)) as sock:
        loaded = load_model(model)
        tiers = serve_config(loaded, config, store, overrides or ())
        with Service(loaded, tiers, sock, options) as service:
            typer.echo(_greeting(service, tiers))
            service.run()
            typer.echo("closing the cache ...", err=True)
            if not service.close():
                raise TransferError("the cache was not closed in time; what only memory had is lost")


def serve_config(
    loaded: LoadedModel, path: Path | None, store: Path | None, overrides: Sequence[str] = ()
) -> CacheConfig:
    """The tiers of a file, or without one the built-in tiers; in any case for this model. Raises ConfigError."""
    from hicache.serving.setup import on_its_device

    assignments = [f"model={json.dumps(loaded.model_section())}", *overrides]
    if path is not None:
        return on_its_device(load_config(path, assignments))
    tiers: list[dict[str, object]] = [{"tier": "device", "size": DEVICE}, {"tier": "host", "size": HOST}]
    if store is not None:
        prefetch = {"policy": "wait_complete", "deadline": "2s"}
        tiers.append({"tier": "storage", "path": str(store), "size": STORAGE, "prefetch": prefetch})
    built_in = {"page_size": PAGE_SIZE, "tiers": tiers}
    return on_its_device(parse_config(json.dumps(built_in), source="built-in tiers", overrides=assignments))


def _greeting(service: Service, tiers: CacheConfig) -> str:
    """The line that says where it is, once connections are taken."""
    sizes = [f"{tier.tier} {capacity.tokens:,}" for tier in tiers.tiers if (capacity := tiers.capacity(tier_of(tier)))]
    disk = tiers.storage.path if tiers.storage is not None and tiers.storage.path is not None else None
    kept = f" in {disk}" if disk is not None else ""
    return f"serving {service.served.name} on {service.url}/v1, tokens: {', '.join(sizes)}{kept}"


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"--grace: {error}") from None


def _check_packages() -> None:
    missing = [package for package in ("starlette", "uvicorn") if find_spec(package) is None]
    if missing:
        raise ConfigError(f"hicache serve needs {' and '.join(missing)}: pip install 'hicache[serve]'")
