"""`hicache config check` and `hicache config show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hicache.config import CacheConfig, Capacity, check_machine, load_config
from hicache.config.models import TierSection, tier_of
from hicache.config.units import format_bytes

app = typer.Typer(help="Check a configuration, or show what it comes to.", no_args_is_help=True)

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="YAML of the tiers.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a value, such as tiers.1.size=1GiB. May be repeated."),
]


@app.command()
def check(file: ConfigFile, overrides: Overrides = None) -> None:
    """Check FILE and whether this machine has the memory and the folders it asks for. Writes nothing."""
    config = load_config(file, overrides or ())
    check_machine(config)
    typer.echo(f"{file}: ok, {', '.join(_summary(config, section) for section in config.tiers)}")


@app.command()
def show(
    file: ConfigFile,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show the values in effect, defaults included, and the derived pages, tokens and bytes of every tier."""
    config = load_config(file, overrides or ())
    if as_json:
        typer.echo(json.dumps(effective(config), indent=2))
        return
    console = Console()
    console.print(_model_table(config), _tier_table(config), _option_table(config), sep="\n")


def effective(config: CacheConfig) -> dict[str, object]:
    """All values in effect as plain data, with `layout` and each tier's `derived` added. Sizes in bytes."""
    layout = config.layout()
    tiers = [{**_values(config, section), "derived": _derived(_capacity(config, section))} for section in config.tiers]
    return {
        **config.model_dump(mode="json"),
        "tiers": tiers,
        "layout": {
            "token_bytes": layout.token_bytes,
            "page_bytes": layout.page_bytes,
            "slot_bytes": config.host_format().page_stride,
            "num_kv_heads": layout.num_kv_heads,
        },
    }


def _values(config: CacheConfig, section: TierSection) -> dict[str, object]:
    """The values of a tier that are in effect."""
    codec = {"codec": config.stored_codec} if section.tier == "storage" else {}
    return {**section.model_dump(mode="json"), **codec}


def _derived(capacity: Capacity) -> dict[str, int]:
    return {"pages": capacity.num_pages, "tokens": capacity.tokens, "bytes": capacity.nbytes}


def _capacity(config: CacheConfig, section: TierSection) -> Capacity:
    return config.capacity_of(tier_of(section), section.size)


def _summary(config: CacheConfig, section: TierSection) -> str:
    capacity = _capacity(config, section)
    return f"{section.tier} {capacity.num_pages} pages ({capacity.tokens} tokens)"


def _model_table(config: CacheConfig) -> Table:
    layout = config.layout()
    table = Table(title="Model and page", title_justify="left", show_header=False)
    for name, value in config.model.model_dump(exclude_none=True).items():
        table.add_row(f"model.{name}", str(value))
    table.add_row("page_size", f"{config.page_size} tokens")
    table.add_row("poison", str(config.poison).lower())
    table.add_row("bytes per token", f"{layout.token_bytes} ({format_bytes(layout.token_bytes)})")
    table.add_row("bytes per page", f"{layout.page_bytes} ({format_bytes(layout.page_bytes)})")
    slot = config.host_format().page_stride
    table.add_row("slot size, host and disk", f"{slot} ({format_bytes(slot)})")
    return table


def _tier_table(config: CacheConfig) -> Table:
    table = Table("tier", "size", title="Tiers", title_justify="left")
    for heading in ("pages", "tokens", "bytes"):
        table.add_column(heading, justify="right")
    for section in config.tiers:
        capacity = _capacity(config, section)
        figures = (f"{figure:,}" for figure in (capacity.num_pages, capacity.tokens, capacity.nbytes))
        table.add_row(section.tier, section.size.text, *figures)
    return table


def _option_table(config: CacheConfig) -> Table:
    table = Table("tier", "options in effect", title="Options", title_justify="left")
    for section in config.tiers:
        options = {
            name: value
            for name, value in _values(config, section).items()
            if name not in ("tier", "size") and value is not None
        }
        table.add_row(section.tier, ", ".join(_options(options)))
    return table


def _options(options: dict[str, object], prefix: str = "") -> list[str]:
    lines: list[str] = []
    for name, value in options.items():
        lines += _options(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}={value}"]
    return lines
