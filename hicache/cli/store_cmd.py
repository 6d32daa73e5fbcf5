"""`hicache store stat|verify|compact|shrink|aside|clear|export|import`: what an operator does with a store on disk."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

import typer

from hicache.cli.progress import interruptible, page_bar
from hicache.cli.store_access import check_is_store, holds_store, opened, plain_errors
from hicache.config.units import format_bytes, parse_duration, parse_size
from hicache.errors import ConfigError, StoreCorruptError

if TYPE_CHECKING:
    from hicache.storage_backends.budget import ValuesMode
    from hicache.storage_backends.lmdb_import import Imported, SpaceForm
    from hicache.storage_backends.lmdb_store import Removed, Store
    from hicache.storage_backends.lmdb_verify import PagesChecked

app = typer.Typer(help="Look into a store on disk, check it, and move pages.", no_args_is_help=True)

STREAM = "-"
"""Name of standard input or output where a file is expected."""

SHOWN_PROBLEMS = 20

Folder = Annotated[Path, typer.Argument(metavar="PATH", help="Folder of the store.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Namespace = Annotated[
    int | None, typer.Option(metavar="N", help="Number of a namespace, as `stat` shows it.", show_default=False)
]


@app.command()
def stat(path: Folder, as_json: AsJson = False) -> None:
    """What is in the store, what it takes on disk, and who uses it. Works beside engines, changes nothing."""
    from hicache.cli.store_tables import print_report
    from hicache.storage_backends.lmdb_stat import describe

    with opened(path) as store:
        report = describe(store)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        print_report(report)


@app.command()
def verify(
    path: Folder,
    remove: Annotated[bool, typer.Option("--remove", help="Take damaged pages out, and those below them.")] = False,
) -> None:
    """Check the index, its counters, and the checksum of every page. Works beside engines, changes nothing.

    Exits with 1 if anything is wrong and was not removed.
    """
    from hicache.storage_backends.lmdb_verify import check_records, check_structure

    with plain_errors(path):
        check_is_store(path)
        walked = check_structure(path)
    with opened(path) as store:
        typer.echo(f"structure of the index: {'whole' if walked else 'not looked at, another process has it open'}")
        problems = check_records(store)
        _print_problems(problems)
        done = _check_pages(store, remove)
        _print_checked(done)
    _conclude(path, bool(problems), done)


@app.command()
def compact(path: Folder) -> None:
    """Give back what the files take beyond what they hold. No engine may have the store open.

    Can be interrupted and repeated at any time.
    """
    from hicache.cli.store_tables import print_compacted
    from hicache.storage_backends.lmdb_compact import compact as run

    with plain_errors(path):
        check_is_store(path)
        with interruptible() as check:
            done = run(path, lambda moved, total: check())
    print_compacted(done)


@app.command()
def shrink(
    path: Folder,
    size: Annotated[str, typer.Argument(metavar="SIZE", help="Its budget from now on, such as 64GiB.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Give a store another budget, and evict the pages for which there is no room. No engine may have it open."""
    from hicache.storage_backends.lmdb_compact import shrink as run
    from hicache.storage_backends.lmdb_loss import loss_by_budget

    budget = _bytes("SIZE", size)
    with opened(path) as store:
        plan = replace(store.plan, budget_bytes=budget)
        plan.split()
        loss = store.view(lambda view: loss_by_budget(view, plan, store.env.used_bytes))
    if loss is not None:
        _ask(f"{path} holds {loss}. Go on?", yes)
    with plain_errors(path):
        done = run(path, budget)
    typer.echo(f"{done.before - done.after:,} of {done.before:,} pages were evicted, those used least recently")


@app.command()
def aside(
    path: Folder,
    remove: Annotated[
        int | None, typer.Option("--remove", metavar="N", help="Delete aside-N for good.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the stores that were set aside for the one in PATH, which keep their room on disk, or delete one."""
    from hicache.cli.store_tables import print_aside
    from hicache.storage_backends.lmdb_aside import remove_aside, stores_aside

    with plain_errors(path):
        if remove is not None:
            gone = remove_aside(path, remove)
            typer.echo(f"removed {gone.path}, {format_bytes(gone.disk_bytes)}")
            return
        found = stores_aside(path)
    if as_json:
        fields = [{"path": str(each.path), "disk_bytes": each.disk_bytes, "reason": each.reason} for each in found]
        typer.echo(json.dumps(fields, indent=2))
    else:
        print_aside(found)


@app.command()
def clear(
    path: Folder,
    namespace: Namespace = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Only pages not used for so long: 12h, 7d.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove pages: all, those of a namespace, or those that have not been used for a time. Works beside engines."""
    age = _duration(older_than)
    with opened(path) as store:
        numbers = _numbers(store, namespace)
        _confirm(store, numbers, older_than, yes)
        removed = [_clear(store, number, age) for number in numbers]
    pages, nbytes = sum(each.pages for each in removed), sum(each.nbytes for each in removed)
    typer.echo(f"removed {pages:,} pages, {format_bytes(nbytes)}")


@app.command("export")
def export_command(
    path: Folder,
    file: Annotated[str, typer.Argument(metavar="FILE", help="New file, or - for standard output.")],
    namespace: Namespace = None,
) -> None:
    """Write pages to a file for `hicache store import`. Works beside engines, changes nothing.

    Exits with 1 if pages are damaged: these are not in the file.
    """
    from hicache.storage_backends.lmdb_export import export_pages

    with opened(path) as store, _new_file(file) as output:
        numbers = _numbers(store, namespace)
        spaces = store.view(lambda view: [view.space(number) for number in numbers])
        with page_bar("export", sum(space.live_bytes for space in spaces)) as progress:
            done = export_pages(store, output, numbers, progress)
    typer.echo(f"exported {done.pages:,} pages, {format_bytes(done.nbytes)}", err=file == STREAM)
    if done.damaged:
        raise StoreCorruptError(
            f"{done.damaged:,} damaged pages and those below them are not in the file: "
            f"'hicache store verify --remove {path}' takes them out of the store"
        )


@app.command("import")
def import_command(
    path: Folder,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file of `export`, or - for standard input.")],
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes for a store that is begun, such as 64GiB.")
    ] = None,
    values: Annotated[
        Literal["slab", "inline"] | None,
        typer.Option(help="How a store that is begun keeps its pages (default: as the one they come from)."),
    ] = None,
) -> None:
    """Take the pages of a file into a store, which is begun if there is none. Works beside engines, can be repeated.

    The budget holds: if the pages do not fit, those used last stay. Exits with 1 if the file is damaged or cut off.
    """
    from hicache.storage_backends.lmdb_exchange import FrameReader
    from hicache.storage_backends.lmdb_import import import_pages, space_forms

    with _old_file(file) as source:
        try:
            reader = FrameReader(source, file)
            header = reader.header()
            forms = space_forms(header)
            with (
                _target(path, budget, values or header.values, forms) as store,
                page_bar("import", header.nbytes) as progress,
            ):
                done = import_pages(store, reader, forms, progress)
        except OSError as error:
            raise ConfigError(f"{error.filename or file}: {error.strerror or error}") from error
    _print_imported(done)
    if done.trouble or done.damaged:
        raise StoreCorruptError(done.trouble or f"{done.damaged:,} pages of {file} are damaged and were left out")


# ---- verify -------------------------------------------------------------------------------------


def _print_problems(problems: list[str] | None) -> None:
    if problems is None:
        typer.echo("records and counters: not looked at, the store is large and another process has it open")
        return
    typer.echo(f"records and counters: {f'{len(problems)} problems' if problems else 'in agreement'}")
    for problem in problems[:SHOWN_PROBLEMS]:
        typer.echo(f"  {problem}")


def _check_pages(store: Store, remove: bool) -> PagesChecked:
    from hicache.storage_backends.lmdb_verify import check_pages

    total = store.view(lambda view: view.state().live_bytes)
    with page_bar("verify", total) as progress:
        return check_pages(store, progress, remove)


def _print_checked(done: PagesChecked) -> None:
    damaged = sum(done.damaged.values())
    typer.echo(f"pages: {done.pages:,} read, {format_bytes(done.nbytes)}, {damaged:,} damaged")
    for number, count in sorted(done.damaged.items()):
        typer.echo(f"  namespace {number}: {count:,} damaged")
    if done.removed:
        typer.echo(f"removed {done.removed:,} pages: the damaged ones and those below them")


def _conclude(path: Path, problems: bool, done: PagesChecked) -> None:
    if problems:
        raise StoreCorruptError(
            f"the records of {path} do not agree: save what is whole with 'hicache store export', "
            "end the engines, remove the folder, and import it again"
        )
    damaged = sum(done.damaged.values())
    if damaged and not done.removed:
        raise StoreCorruptError(
            f"{damaged:,} pages of {path} are damaged: an engine that meets one takes it out, --remove does so now; "
            "check the disk (dmesg, smartctl)"
        )


# ---- clear --------------------------------------------------------------------------------------


def _duration(text: str | None) -> float | None:
    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"--older-than: {error}") from None


def _numbers(store: Store, namespace: int | None) -> list[int]:
    """The namespace asked for, or all."""
    known = sorted(store.view(lambda view: view.labels()))
    if namespace is None:
        return known
    if namespace not in known:
        there = f"there are {', '.join(map(str, known))}" if known else "there is none"
        raise ConfigError(f"--namespace {namespace}: not in the store, {there}")
    return [namespace]


def _confirm(store: Store, numbers: list[int], older_than: str | None, yes: bool) -> None:
    if yes:
        return
    spaces = store.view(lambda view: [view.space(number) for number in numbers])
    pages, nbytes = sum(space.pages for space in spaces), sum(space.live_bytes for space in spaces)
    of = f"those not used for {older_than} of " if older_than is not None else ""
    where = f"namespace {', '.join(map(str, numbers))} of {store.folder.path}"
    _ask(f"Remove {of}{pages:,} pages ({format_bytes(nbytes)}) in {where}?", yes)


def _ask(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("nobody can be asked here: give --yes to remove the pages")
    typer.confirm(question, abort=True)


def _clear(store: Store, number: int, age: float | None) -> Removed:
    return store.clear(number) if age is None else store.remove_older(number, int((time.time() - age) * 1e6))


# ---- export and import --------------------------------------------------------------------------


@contextmanager
def _new_file(name: str) -> Iterator[BinaryIO]:
    """A file that is there when it is complete, and durable."""
    if name == STREAM:
        if sys.stdout.isatty():
            raise ConfigError("standard output is a terminal: name a file, or pipe it to a program")
        with _file_errors("standard output"):
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        return
    target, part = Path(name), Path(f"{name}.part")
    with _file_errors(name):
        if target.exists():
            raise ConfigError(f"{name} exists: name a new file, or remove it")
        try:
            with open(part, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


@contextmanager
def _old_file(name: str) -> Iterator[BinaryIO]:
    if name == STREAM:
        yield sys.stdin.buffer
        return
    with _file_errors(name):
        file = open(name, "rb")  # noqa: SIM115 - errors of what follows are not the file's
    with file:
        yield file


@contextmanager
def _file_errors(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}") from error


@contextmanager
def _target(path: Path, budget: str | None, values: str, forms: dict[int, SpaceForm]) -> Iterator[Store]:
    """The store to import to, which is begun if there is none."""
    from hicache.storage_backends.lmdb_import import plan_for
    from hicache.storage_backends.lmdb_opening import close_store, open_store

    with plain_errors(path):
        known = path.is_dir() and holds_store(path)
    if known:
        if budget is not None:
            raise ConfigError(f"--budget {budget}: {path} holds a store, which has its own budget")
        with opened(path) as store:
            yield store
        return
    with plain_errors(path):
        store = open_store(path, plan_for(forms, _values(values), _budget(path, budget)))
        try:
            yield store
        finally:
            close_store(store)


def _values(name: str) -> ValuesMode:
    if name not in ("slab", "inline"):
        raise ConfigError(f"the file comes from a store with values: {name}, which this version does not know")
    return "slab" if name == "slab" else "inline"


def _budget(path: Path, text: str | None) -> int:
    if text is None:
        raise ConfigError(f"{path} holds no store: give --budget to begin one")
    return _bytes("--budget", text)


def _bytes(name: str, text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    if size.unit != "bytes":
        raise ConfigError(f"{name} {text}: give bytes, such as 64GiB")
    return size.amount


def _print_imported(done: Imported) -> None:
    typer.echo(f"imported {done.stored:,} pages, {done.present:,} were there already")
    if done.evicted:
        typer.echo(f"{done.evicted:,} pages were evicted for them, those used least recently")
    if done.left_out:
        typer.echo(f"{done.left_out:,} pages were left out: there is no room for them, or their parent is missing")
    if done.damaged:
        typer.echo(f"{done.damaged:,} pages of the file are damaged")
