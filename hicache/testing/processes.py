"""Tests in which several processes meet."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

HANGS_AFTER = 60.0
"""Seconds after which a process that says nothing is given up."""

Work: TypeAlias = "Callable[[Connection[Any, Any]], None]"


class Process:
    """A forked process that runs `work` with one end of a pipe; this is the other end."""

    def __init__(self, work: Work) -> None:
        self._pipe, theirs = Pipe()
        self._code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            self._pipe.close()
            _run(work, theirs)
        theirs.close()

    @property
    def lives(self) -> bool:
        """False once it was killed or waited for."""
        return self._code is None

    def send(self, message: object) -> None:
        self._pipe.send(message)

    def receive(self) -> Any:
        """Raises EOFError if the process has ended."""
        if not self._pipe.poll(HANGS_AFTER):
            raise AssertionError("the other process hangs")
        return self._pipe.recv()

    def ask(self, message: object) -> Any:
        self.send(message)
        return self.receive()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.join()

    def join(self) -> int:
        """Exit status, or the negative number of the signal that ended the process. Waits for the end."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._pipe.close()
        return self._code


@contextmanager
def forked(work: Work) -> Iterator[Process]:
    """A process for the length of a block: it may not fail, and is killed if the block does."""
    process = Process(work)
    try:
        yield process
    except BaseException:
        process.kill()
        raise
    assert process.join() in (0, -signal.SIGKILL), "the other process failed, its traceback was printed"


def exit_code(work: Callable[[], None]) -> int:
    """Run `work` in a process of its own; 0, or what that ended with: the negative number of a signal."""
    return Process(lambda _: work()).join()


def _run(work: Work, pipe: Connection[Any, Any]) -> None:
    code = 1
    try:
        work(pipe)
        code = 0
    except EOFError:
        code = 0  # the test is over
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
