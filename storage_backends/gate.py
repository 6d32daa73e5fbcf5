"""Who may be inside a backend at once, and from which process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hicache.errors import StoreUnavailableError


class CallGate:
    """Many readers beside one writer; nobody after `close`; nobody in a forked child.

    A child has copies of the parent's locks in whatever state the fork found them, so the process is
    checked before any lock is touched.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._writer = threading.Lock()
        self._changed = threading.Condition()
        self._readers = 0
        self._shut = False  # readers wait outside
        self._closed = False

    @property
    def foreign(self) -> bool:
        """True in a process forked from the one that opened the backend."""
        return os.getpid() != self._pid

    @contextmanager
    def reading(self) -> Iterator[None]:
        self._check_process()
        with self._changed:
            self._changed.wait_for(lambda: not self._shut)
            self._check_open()
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        self._check_process()
        with self._writer:
            self._check_open()
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No reader inside until the end; called by the writer, also while it is alone."""
        with self._changed:
            before, self._shut = self._shut, True
            self._changed.wait_for(lambda: not self._readers)
        try:
            yield
        finally:
            with self._changed:
                self._shut = before
                self._changed.notify_all()

    @contextmanager
    def closing(self) -> Iterator[bool]:
        """Nobody else enters from now on; those inside are not waited for, see `alone`. Yields False if there is
        nothing to close here."""
        if self.foreign:
            yield False
            return
        with self._writer:
            first, self._closed = not self._closed, True
            yield first

    def _check_process(self) -> None:
        if self.foreign:
            raise StoreUnavailableError(f"{self._name} was opened before a fork: open it in this process", "forked")

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError(f"{self._name} is closed", "closed")
