"""Time to first token through the engine: all computed, and the prefix on the device, on the host, on disk.

The same prompt each time, in fast mode, its chunks cut where a hit ends. So the last chunk has the same shape however
the KV before it came there, and the answers have to be the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from hicache.bench.gpu_model import draw_tokens
from hicache.bench.progress import Progress
from hicache.errors import CapacityError, IntegrityError
from hicache.serving.engine import Engine, Surroundings
from hicache.serving.loaded import LoadedModel
from hicache.serving.outputs import GenerationRequest
from hicache.serving.scheduler import SchedulerOptions
from hicache.serving.setup import build_engine, plain_engine, serving_config
from hicache.types import Tier

TARGET_RATIO = 1.1
SOURCES = {"device": (), "host": (Tier.DEVICE,), "storage": (Tier.DEVICE, Tier.HOST)}
"""Where the prefix is, and the tiers that forget it before."""


@dataclass(frozen=True)
class Sizes:
    """Tokens. The prefix is a multiple of `chunk`, that one of `page_size`; the suffix is a page at most."""

    prefix: int = 16_384
    suffix: int = 64
    answer: int = 8
    chunk: int = 4096
    page_size: int = 64
    repeats: int = 7


QUICK = Sizes(prefix=256, suffix=16, answer=3, chunk=64, page_size=16, repeats=2)


def run(
    loaded: LoadedModel, device: str, folder: Path, sizes: Sizes, progress: Progress = lambda what: None
) -> dict[str, Any]:
    """{prefix_tokens, suffix_tokens, bytes, load_ms, load_target, logits_equal, rows: [{source, ttft_ms, speedup}]}.

    Medians. `load_ms` is the load of the prefix alone; the row of the host has `load_ratio` too, to the longer of
    that and the hit on the device. `logits_equal`: not only the tokens, the bits of the first logits are the same.
    Raises IntegrityError if an answer differs or a prefix does not come from where it was meant to.
    """
    ttft = _Ttft(loaded, device, folder, sizes)
    try:
        return ttft.run(progress)
    finally:
        ttft.close()


class _Ttft:
    def __init__(self, loaded: LoadedModel, device: str, folder: Path, sizes: Sizes) -> None:
        self._sizes = sizes
        self._prompt = draw_tokens(sizes.prefix + sizes.suffix, loaded.geometry)
        self._rows: list[torch.Tensor] = []
        self._seconds: dict[str, list[float]] = {}
        self._answers: set[tuple[int, ...]] = set()
        self._first: list[torch.Tensor] = []
        around = Surroundings(on_logits=lambda rid, position, row: self._rows.append(row.clone()))
        room = 2 * (len(self._prompt) + sizes.answer + sizes.page_size)
        options = SchedulerOptions(step_tokens=sizes.chunk, chunk_tokens=sizes.chunk, reuse=False)
        self._plain = plain_engine(loaded, room, options, "fast", around, device)
        tiers: list[dict[str, object]] = [
            {"tier": "device", "device": device, "size": f"{room} tokens"},
            {"tier": "host", "size": f"{room} tokens"},
            {
                "tier": "storage",
                "path": str(folder / "store"),
                "size": f"{room} tokens",
                "queue": f"{room} tokens",
                "prefetch": {"policy": "wait_complete", "deadline": "60s"},
            },
        ]
        config = serving_config(loaded, tiers, sizes.page_size, "fast")
        options = SchedulerOptions(step_tokens=sizes.chunk, chunk_tokens=sizes.chunk)
        self._engine = build_engine(loaded, config, options, "fast", around)

    def close(self) -> None:
        self._plain.close()
        self._engine.close()

    def run(self, progress: Progress) -> dict[str, Any]:
        for repeat in range(self._sizes.repeats + 1):  # the first one warms up
            progress(f"{repeat} of {self._sizes.repeats}" if repeat else "warming up")
            if repeat == 1:
                self._seconds.clear()
            self._note("recompute", lambda: self._ask(self._plain))
            self._note("cold, with cache", self._cold)
            for source in SOURCES:
                self._note(source, lambda source=source: self._hit(source))  # type: ignore[misc]
            self._note("load", self._load)
        return self._report()

    def _note(self, name: str, measure: Callable[[], float]) -> None:
        self._seconds.setdefault(name, []).append(measure())

    # ---- requests ---------------------------------------------------------------------------

    def _ask(self, engine: Engine, source: str | None = None) -> float:
        """Seconds to the first token of the prompt."""
        self._rows.clear()
        (handle,) = engine.generate([GenerationRequest(self._prompt, self._sizes.answer, ignore_eos=True)])
        metrics = handle.metrics
        assert metrics is not None and metrics.ttft is not None
        expected = {name: self._sizes.prefix * (name == source) for name in SOURCES}
        if dict(metrics.cached_tokens) != expected:
            raise IntegrityError(f"hits should have been {expected}, they were {dict(metrics.cached_tokens)}")
        self._answers.add(tuple(handle.token_ids))
        self._first.append(self._rows[0])
        if len(self._answers) > 1:
            raise IntegrityError(f"the answer differs with a prefix from {source}: {sorted(self._answers)}")
        return metrics.ttft

    def _cold(self) -> float:
        self._forget(tuple(Tier))
        return self._ask(self._engine)

    def _hit(self, source: str) -> float:
        self._engine.settle()
        self._forget(SOURCES[source])
        return self._ask(self._engine, source)

    def _forget(self, tiers: tuple[Tier, ...]) -> None:
        self._engine.settle()
        report = self._engine.cache.flush(tiers, timeout=60.0)
        if not report.flushed:
            raise IntegrityError(f"the cache was not flushed: {report.reason}")

    def _load(self) -> float:
        """Seconds to load as many pages as the prefix has; it does not matter which."""
        self._engine.settle()
        cache, count = self._engine.cache, self._sizes.prefix // self._sizes.page_size
        pages = cache.alloc_pages(count)
        if pages is None or cache.tiers.host is None:
            raise CapacityError(f"the device has no room for {count} pages")
        start = time.perf_counter()
        cache.tiers.host.copies.load_back(np.arange(count, dtype=np.int32), pages).synchronize()
        seconds = time.perf_counter() - start
        cache.free_pages(pages)
        return seconds

    # ---- report -----------------------------------------------------------------------------

    def _report(self) -> dict[str, Any]:
        took = {name: median(seconds) for name, seconds in self._seconds.items()}
        load = took.pop("load")
        rows: list[dict[str, Any]] = [
            {"source": source, "ttft_ms": seconds * 1e3, "speedup": took["recompute"] / seconds}
            for source, seconds in took.items()
        ]
        for row in rows:
            if row["source"] == "host":
                row["load_ratio"] = took["host"] / max(load, took["device"])
                row["met"] = row["load_ratio"] <= TARGET_RATIO
        nbytes = self._sizes.prefix // self._sizes.page_size * self._engine.cache.layout.page_bytes
        shape = {"prefix_tokens": self._sizes.prefix, "suffix_tokens": self._sizes.suffix, "bytes": nbytes}
        equal = all(torch.equal(row, self._first[0]) for row in self._first)
        return {**shape, "load_ms": load * 1e3, "load_target": TARGET_RATIO, "logits_equal": equal, "rows": rows}
