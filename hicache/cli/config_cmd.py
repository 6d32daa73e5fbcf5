"""`hicache config check` and `hicache config show`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from hicache.config import CacheConfig, Capacity, check_machine, load_config
from hicache.config.models import TierSection, tier_of
from hicache.config.units import format_bytes
from hicache.errors import ConfigError
from hicache.types import Tier

if TYPE_CHECKING:
    from hicache.storage_backends.budget import BudgetPlan
    from hicache.storage_backends.lmdb_index import IndexView
    from hicache.storage_backends.lmdb_loss import Loss
    from hicache.storage_backends.lmdb_store import Store

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
    notes = list(_store_notes(config))
    typer.echo(f"{file}: ok, {', '.join(_summary(config, section) for section in config.tiers)}")
    for note in notes:
        typer.echo(f"note: {note}")


def _store_notes(config: CacheConfig) -> Iterator[str]:
    """What a start would meet in the store's folder. Raises ConfigError, StoreIdentityError or StoreCorruptError if it
    would be refused, or set the store aside."""
    from hicache.cli.store_access import holds_store, opened, plain_errors
    from hicache.storage_backends.filesystem import check_local, free_bytes, is_cleaned
    from hicache.storage_backends.lmdb_opening import check_values

    storage, plan, index = config.storage, config.store_plan(), config.index_of(Tier.STORAGE)
    if storage is None or storage.folder is None or plan is None or index is None:
        return
    path, used = storage.folder, 0
    check_local(path)
    with plain_errors(path):
        there = path.is_dir() and holds_store(path)
    if there:
        with opened(path) as store:
            check_values(path, store.values_mode, storage.values)
            used = store.used_bytes
            yield from _content_notes(config, store, plan, config.where("tiers", index, "size"))
    if (free := free_bytes(path)) + used < plan.budget_bytes:
        yield (
            f"the file system of {path} has {format_bytes(free)} free, and the store may take "
            f"{format_bytes(plan.budget_bytes - used)} more: stores stop when the disk is full"
        )
    if is_cleaned(path):
        yield f"{path} lies where many systems remove what has not been used for days: exempt it, or use another folder"


def _content_notes(config: CacheConfig, store: Store, plan: BudgetPlan, where: str) -> Iterator[str]:
    from hicache.storage_backends.lmdb_loss import loss_by_budget, refuse_budget

    def look(view: IndexView) -> tuple[Loss | None, int, int]:
        pages = sum(space.pages for space in view.spaces().values())
        return loss_by_budget(view, plan, store.env.used_bytes), view.state().budget_bytes, pages

    loss, budget_bytes, pages = store.view(look)
    path, size = store.folder.path, format_bytes(plan.budget_bytes)
    alone = store.found_alone
    if loss is None or not alone:
        yield f"the store in {path} holds {pages:,} pages and has a size of {format_bytes(budget_bytes)}"
    if not alone and budget_bytes != plan.budget_bytes:
        yield f"another process has the store open: its size stays, and {size} is ignored as long as that runs"
    if loss is not None and config.storage is not None and not config.storage.shrink:
        raise ConfigError(f"{where}: {refuse_budget(path, loss, plan.budget_bytes)}")
    if loss is not None:
        yield f"shrink: true: the store in {path} holds {loss} with a size of {size}"


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
