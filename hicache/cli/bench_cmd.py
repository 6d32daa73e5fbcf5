"""`hicache bench tree|copy|storage|stall|serving`: measure on this machine, with the figures aimed at beside.

`hicache bench calibrate`: measure what copies and prefill take here, for configurations.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table

from hicache.config.units import format_bytes
from hicache.errors import ConfigError

app = typer.Typer(help="Measure parts of the cache on this machine.", no_args_is_help=True)

COPY_TARGET, COPY_TARGET_BYTES = 0.8, 64 << 10
STORAGE_TARGET, STORAGE_CPU_TARGET = 0.8, 0.3
THROUGHPUT_TARGET = 0.98

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Quick = Annotated[bool, typer.Option("--quick", help="A short run to see that it works; its figures mean little.")]
ModelSpec = Annotated[
    str | None,
    typer.Option("--model", metavar="SPEC", help="As for serve (default: a made-up one).", show_default=False),
]
Folder = Annotated[
    Path | None,
    typer.Option("--path", metavar="DIR", help="Folder on the disk to measure (default: for temporary files)."),
]


@app.command()
def tree(
    as_json: AsJson = False,
    quick: Quick = False,
    long: Annotated[bool, typer.Option("--long", help="Evict from a tree of a million leaves, too.")] = False,
) -> None:
    """Radix tree: match, insert, evict, memory and bookkeeping at pages of 1, 16 and 64 tokens."""
    from hicache.bench.tree import run

    _report(_watched(lambda progress: run(quick, long, progress)), as_json, _tree_table)


@app.command()
def copy(as_json: AsJson = False, quick: Quick = False) -> None:
    """Copies between device and host pages on the CPU, as a ratio to memcpy of the same bytes."""
    from hicache.bench.copy import run

    _report(_watched(lambda progress: run(quick)), as_json, _copy_table)


@app.command()
def storage(
    as_json: AsJson = False,
    quick: Quick = False,
    folder: Folder = None,
    long: Annotated[
        bool,
        typer.Option("--long", help="Write 5 times a set of pages larger than memory, too, at a constant budget."),
    ] = False,
) -> None:
    """The disk tier beside a raw O_DIRECT file, and its codecs. Writes and removes 7 GiB, 1 at a time.

    --long writes 10 times the memory of the machine, which takes minutes, and needs twice that memory on the disk.
    """
    from hicache.bench.storage import run

    total = (64 << 20) if quick else (1 << 30)
    place = folder if folder is not None else Path(tempfile.gettempdir())

    def work(progress: Callable[[str], None]) -> dict[str, Any]:
        measured = run(place, total_bytes=total, progress=progress)
        return {**measured, "long": _storage_long(place, quick, progress)} if long else measured

    _report(_watched(work), as_json, _storage_tables)


def _storage_long(place: Path, quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    from hicache.bench.storage_long import run_long, set_size

    size, note = ((256 << 20), "a short run") if quick else set_size(place)
    return {**run_long(place, size, progress=progress), "note": note}


@app.command()
def stall(
    as_json: AsJson = False,
    quick: Quick = False,
    folder: Folder = None,
    backend: Annotated[str, typer.Option(metavar="NAME", help="Storage backend.")] = "lmdb",
) -> None:
    """p99 of match_prefix on the scheduler thread while storage writes at full speed, to that with idle storage."""
    from hicache.bench.stall import run

    _report(_watched(lambda progress: run(folder, backend, quick, progress)), as_json, _stall_table)


@app.command()
def serving(
    as_json: AsJson = False,
    quick: Quick = False,
    folder: Folder = None,
    model: ModelSpec = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, help="Threads that compute (default: half the cores).", show_default=False),
    ] = None,
) -> None:
    """Time to first token of a prefix of 2,000 tokens: recomputed, and from device, host and disk.

    Beside, what bytes and flops allow. And the throughput with the cache on but without reuse, to that without cache.
    """
    from hicache.bench.serving import MODEL, QUICK, Sizes, run

    place = folder if folder is not None else Path(tempfile.gettempdir())
    sizes = QUICK if quick else Sizes()
    _report(_watched(lambda progress: run(place, model or MODEL, sizes, threads, progress)), as_json, _serving_tables)


@app.command()
def calibrate(
    as_json: AsJson = False,
    quick: Quick = False,
    folder: Folder = None,
    model: ModelSpec = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the section to a file.", show_default=False),
    ] = None,
) -> None:
    """Copies, disk and prefill of this machine as the section `costs` of a configuration.

    `hicache replay --no-bytes --costs FILE` reads what --out wrote.
    """
    import yaml

    from hicache.bench.calibrate import MODEL, QUICK, Sizes, run

    place = folder if folder is not None else Path(tempfile.gettempdir())
    sizes = QUICK if quick else Sizes()
    measured = _watched(lambda progress: run(place, model or MODEL, sizes, device, progress))
    text = yaml.safe_dump({"costs": measured["costs"]}, sort_keys=False)
    if out is not None:
        try:
            out.write_text(text)
        except OSError as error:
            raise ConfigError(f"{out}: cannot be written: {error.strerror}") from None
    typer.echo(json.dumps(measured, indent=2) if as_json else text.rstrip())


def _watched(work: Callable[[Callable[[str], None]], dict[str, Any]]) -> dict[str, Any]:
    """Run `work`, showing what it is at on a terminal."""
    with Console(stderr=True).status("measuring ...") as status:
        return work(lambda what: status.update(f"measuring {what} ..."))


def _report(measured: dict[str, Any], as_json: bool, table: Callable[[dict[str, Any]], RenderableType]) -> None:
    from hicache.bench.tree import machine

    report = {"machine": machine(), **measured}
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    where = report["machine"]
    console = Console()
    console.print(table(measured))
    console.print(f"{where['cpu']}, {where['cores']} cores, Python {where['python']}", highlight=False)


def _tree_table(measured: dict[str, Any]) -> Table:
    table = _table("radix tree", "page", "measured", "aimed at", "met")
    for figure in measured["figures"]:
        unit = "µs" if figure["unit"] == "us" else figure["unit"]
        target = f"≤ {figure['target']:,.0f} {unit}"
        table.add_row(
            figure["name"], str(figure["page_size"]), f"{figure['value']:,} {unit}", target, _met(figure["met"])
        )
    return table


def _copy_table(measured: dict[str, Any]) -> Table:
    table = _table("plane", "pages", "memcpy", "gather", "scatter", "aimed at", "met")
    for row in measured["results"]:
        aimed = row["plane_bytes"] * measured["planes"] >= COPY_TARGET_BYTES
        table.add_row(
            format_bytes(row["plane_bytes"]),
            row["pages"],
            f"{row['memcpy_gb_s']:.1f} GB/s",
            f"{row['gather']:.2f}",
            f"{row['scatter']:.2f}",
            f"≥ {COPY_TARGET}" if aimed else "",
            _met(min(row["gather"], row["scatter"]) >= COPY_TARGET) if aimed else "",
        )
    return table


def _storage_tables(measured: dict[str, Any]) -> RenderableType:
    parts: list[RenderableType] = [_storage_table(measured), "", _codec_table(measured["codecs"])]
    return Group(*parts, "", _long_table(measured["long"])) if "long" in measured else Group(*parts)


def _codec_table(codecs: dict[str, Any]) -> Table:
    table = _table("codec", "write", "read", "CPU s/GiB", "bytes", "on disk", "rms error", "largest")
    notes = []
    for name, figures in codecs.items():
        if "note" in figures:
            notes.append(f"{name}: {figures['note']}")
            continue
        error = figures["error"]
        table.add_row(
            name,
            *(f"{figures[way]['gb_per_s']:.2f} GB/s" for way in ("write", "read")),
            " / ".join(f"{figures[way]['cpu_s_per_gib']:.2f}" for way in ("write", "read")),
            *(f"{figures[ratio]:.3f}" for ratio in ("ratio", "slot_ratio")),
            *(("exact", "") if error is None else (f"{error['relative_rms']:.4f}", f"{error['max_abs']:.3g}")),
        )
    table.caption = "\n".join(["pages of 2 MiB like those of a model; speed in bytes of pages", *notes])
    return table


def _long_table(long: dict[str, Any]) -> Table:
    table = _table("at the budget", "way", "speed", "of raw", "CPU s/GiB", "met")
    for name in ("raw", "slab"):
        for way in ("write", "read"):
            figure, ratio = long[name][way], long["ratio_to_raw"][way]
            met = ratio >= STORAGE_TARGET and figure["cpu_s_per_gib"] <= STORAGE_CPU_TARGET
            aimed = (f"{ratio:.2f}", f"{figure['cpu_s_per_gib']:.2f}", _met(met))
            plain = ("", f"{figure['cpu_s_per_gib']:.2f}", "")
            table.add_row(name, way, f"{figure['gb_per_s']:.2f} GB/s", *(aimed if name == "slab" else plain))
    table.caption = "\n".join(filter(None, (long["note"], *_long_lines(long))))
    return table


def _long_lines(long: dict[str, Any]) -> Iterator[str]:
    yield f"{long['turnovers']} times {format_bytes(long['set_bytes'])}, {long['evicted_pages']:,} pages evicted"
    allocated, budget = long["allocated_bytes"], long["budget_bytes"]
    yield f"{format_bytes(allocated)} on disk at most, budget {format_bytes(budget)}: {_met(allocated <= budget)}"
    yield f"{long['read_pages']:,} pages read cold, {long['wrong_pages']} wrong, {long['missing_pages']} missing"


def _storage_table(measured: dict[str, Any]) -> Table:
    table = _table(f"pages of {format_bytes(measured['page_bytes'])}", "way", "speed", "of raw", "CPU s/GiB", "met")
    for name, ways in measured["media"].items():
        for way, figure in ways.items():
            ratio = measured["ratio_to_raw"].get(name, {}).get(way)
            met = ratio is not None and ratio >= STORAGE_TARGET and figure["cpu_s_per_gib"] <= STORAGE_CPU_TARGET
            table.add_row(
                name,
                way,
                f"{figure['gb_per_s']:.2f} GB/s",
                "" if ratio is None else f"{ratio:.2f}",
                f"{figure['cpu_s_per_gib']:.2f}",
                "" if ratio is None else _met(met),
            )
    table.caption = f"aimed at: ≥ {STORAGE_TARGET} of raw, ≤ {STORAGE_CPU_TARGET} CPU s/GiB"
    return table


def _stall_table(measured: dict[str, Any]) -> Table:
    table = _table("match_prefix while storage is", "p50", "p99", "max", "matches")
    for name in ("idle", "writing"):
        figures = measured[name]
        times = (f"{figures[key]:,} µs" for key in ("p50_us", "p99_us", "max_us"))
        table.add_row(name, *times, f"{figures['matches']:,}")
    table.caption = (
        f"{measured['backend']} wrote {measured['written_gb_per_s']:.2f} GB/s; "
        f"p99 {measured['ratio']:.2f} times that of idle, aimed at ≤ {measured['target']:g}: {_met(measured['met'])}"
    )
    return table


def _serving_tables(measured: dict[str, Any]) -> RenderableType:
    return Group(_ttft_table(measured), "", _throughput_table(measured["throughput"]))


def _ttft_table(measured: dict[str, Any]) -> Table:
    ttft = measured["ttft"]
    rates = ttft["rates"]
    table = _table("prefix from", "moved", "TTFT", "ratio", "allowed", "ratio / allowed")
    for row in ttft["rows"]:
        moved, took = format_bytes(row["bytes"]) if row["bytes"] else "", f"{row['ttft_ms']:,.1f} ms"
        if "ratio" not in row:
            table.add_row("recompute", moved, took, "", "", "")
            continue
        ratio, allowed = row["ratio"], row["allowed_ratio"]
        name = "disk" if row["source"] == "storage" else row["source"]
        table.add_row(name, moved, took, f"{ratio:.1f}", f"{allowed:.1f}", f"{ratio / allowed:.2f}")
    table.caption = (
        f"{ttft['prefix_tokens']:,} tokens of {format_bytes(measured['token_bytes'])}, "
        f"then {ttft['suffix_tokens']} new ones; medians of {ttft['repeats']}\n"
        f"prefill {rates['prefill_tokens_per_s']:,.0f} tokens/s, suffix {rates['suffix_ms']:.1f} ms, "
        f"threads: {measured['threads']}\n"
        f"copy {rates['copy_gb_per_s']:.1f} GB/s, disk {rates['disk_gb_per_s']:.2f} GB/s\n"
        f"{measured['model']}"
    )
    return table


def _throughput_table(throughput: dict[str, Any]) -> Table:
    table = _table("cache, no reuse", "throughput, of no cache", "lowest", "highest", "aimed at", "met")
    for row in throughput["rows"]:
        ratios = (f"{row[name]:.3f}" for name in ("ratio", "lowest", "highest"))
        table.add_row(row["cache"], *ratios, f"≥ {THROUGHPUT_TARGET}", _met(row["ratio"] >= THROUGHPUT_TARGET))
    table.caption = (
        f"{throughput['requests']} requests of {throughput['prompt_tokens']} and {throughput['answer_tokens']} tokens "
        f"a run; medians of {throughput['runs']}\n{throughput['off_tokens_per_s']:,.0f} tokens/s without cache"
    )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title, box=None, pad_edge=False, header_style="bold", caption_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _met(met: bool) -> str:
    return "[green]yes[/]" if met else "[red]no[/]"
