"""What SGLang's metrics are told of our transfers."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from sglang.srt.observability.metrics_collector import StorageMetrics

MOST = 1024
"""Transfers kept of each kind while nobody asks."""


class TransferLog:
    """Pages and GB/s of the transfers since they were last taken. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads: deque[tuple[int, float]] = deque(maxlen=MOST)
        self._writes: deque[tuple[int, float]] = deque(maxlen=MOST)

    def read(self, pages: int, nbytes: int, seconds: float) -> None:
        self._note(self._reads, pages, nbytes, seconds)

    def wrote(self, pages: int, nbytes: int, seconds: float) -> None:
        self._note(self._writes, pages, nbytes, seconds)

    def take(self) -> Any:
        """SGLang's StorageMetrics, with what was noted; nothing is noted any more."""
        with self._lock:
            reads, writes = list(self._reads), list(self._writes)
            self._reads.clear()
            self._writes.clear()
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in reads],
            backup_pgs=[pages for pages, _ in writes],
            prefetch_bandwidth=[rate for _, rate in reads],
            backup_bandwidth=[rate for _, rate in writes],
        )

    def _note(self, log: deque[tuple[int, float]], pages: int, nbytes: int, seconds: float) -> None:
        if pages:
            with self._lock:
                log.append((pages, nbytes / max(seconds, 1e-9) / 1e9))
