"""A bar for work on a store: bytes, pages per second, time left. And Ctrl-C, which waits for the end of a step."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def page_bar(what: str, total_bytes: int) -> Iterator[Callable[[int, int], None]]:
    """What to call with the pages and the bytes done so far. It shows a bar on a terminal, nothing elsewhere, and
    raises KeyboardInterrupt after Ctrl-C."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TextColumn("{task.description}"))
    start = time.perf_counter()
    with (
        Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar,
        interruptible() as check,
    ):
        task = bar.add_task("", total=total_bytes)

        def show(pages: int, nbytes: int) -> None:
            check()
            speed = pages / max(time.perf_counter() - start, 1e-9)
            bar.update(task, completed=nbytes, description=f"{speed:,.0f} pages/s")

        yield show


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """What to call between two steps: it raises KeyboardInterrupt after Ctrl-C. A second one takes effect at once."""
    asked = False

    def on_signal(signal_number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
