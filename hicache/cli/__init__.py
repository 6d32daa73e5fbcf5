"""The `hicache` command. A command group is a module of this package and one line under "Commands" below.

Modules of commands import what is heavy (torch above all) inside their functions, so that every command
starts as fast as it can.

Exit codes: 0 done · 1 a check failed or the cache failed · 2 bad input, or memory that is not to be had ·
130 interrupted. What went wrong is one line on stderr that begins with "error:".
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from hicache import __version__
from hicache.cli import (
    bench_cmd,
    config_cmd,
    demo_cmd,
    doctor_cmd,
    plan_cmd,
    replay_cmd,
    serve_cmd,
    store_cmd,
    stress_cmd,
    why_cmd,
)
from hicache.errors import BadInput, CapacityError, HiCacheError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="hicache",
    help="Hierarchical KV cache for LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Commands
app.command()(demo_cmd.demo)
app.command()(doctor_cmd.doctor)
app.command()(plan_cmd.plan)
app.command()(replay_cmd.replay)
app.command()(serve_cmd.serve)
app.command()(stress_cmd.stress)
app.command()(why_cmd.why)
app.add_typer(bench_cmd.app, name="bench")
app.add_typer(config_cmd.app, name="config")
app.add_typer(store_cmd.app, name="store")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hicache {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Hierarchical KV cache for LLM serving: device, host and disk tiers under one radix tree."""


def main() -> None:
    """Entry point of the `hicache` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; errors of the user become one line on stderr."""
    try:
        code = get_command(app).main(list(arguments), prog_name="hicache", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        return _fail(error.format_message(), error.exit_code)
    except (BadInput, CapacityError) as error:
        return _fail(str(error), EXIT_BAD_INPUT)
    except HiCacheError as error:
        return _fail(f"{type(error).__name__}: {error}", EXIT_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED


def _fail(message: str, code: int) -> int:
    if message:  # typer has none where it printed the help instead
        typer.echo(f"error: {' '.join(message.split())}", err=True)
    return code
