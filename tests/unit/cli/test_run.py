from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from hicache import __version__, cli
from hicache.errors import CapacityError, ConfigError, IntegrityError, TraceError


@pytest.fixture
def failing() -> Iterator[list[BaseException]]:
    """A command `fail` that raises what the test puts into the list."""
    to_raise: list[BaseException] = []

    def fail() -> None:
        raise to_raise[0]

    cli.app.command("fail")(fail)
    yield to_raise
    cli.app.registered_commands.pop()


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("t.yaml:3: size: no unit"), 2, "error: t.yaml:3: size: no unit\n"),
        (TraceError("trace:7: two\nlines"), 2, "error: trace:7: two lines\n"),
        (CapacityError("9 GiB asked for"), 2, "error: 9 GiB asked for\n"),
        (IntegrityError("a wrong page"), 1, "error: IntegrityError: a wrong page\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    failing.append(error)
    assert cli.run(["fail"]) == code
    assert capsys.readouterr() == ("", line)


def test_bugs_are_not_hidden(failing: list[BaseException]) -> None:
    failing.append(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.run(["fail"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["confg"], "error: No such command 'confg'. Did you mean 'config'?\n"),
        (["config", "check"], "error: Missing argument 'FILE'.\n"),
        (["config", "show", "t.yaml", "--sett", "x"], "error: No such option: --sett"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 2
    out, err = capsys.readouterr()
    assert "Usage: hicache" in out + err
    assert "error:" not in out + err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"hicache {__version__}\n"


def test_a_real_process_exits_with_the_code_and_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hicache", "config", "check", "no-such.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: no-such.yaml: cannot be read: No such file or directory\n"
