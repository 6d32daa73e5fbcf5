"""How long the cache holds up the scheduler's thread in a step, while pages go up and down.

Requests come in turns whose prefixes do not fit on the device together: each one loads its own back and writes new
pages through. No model computes; in its place the thread sleeps, as one that waits for logits does.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, cycle
from statistics import median
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hicache.bench.progress import Progress
from hicache.build import build_cache, build_requests
from hicache.cache import HiCache
from hicache.config import config_from_mapping
from hicache.device_pool import resolve_device
from hicache.errors import CapacityError, IntegrityError
from hicache.requests import Request
from hicache.stats import DEVICE_HOST, HOST_DEVICE
from hicache.streams import record_compute
from hicache.types import Tier, TokenIds

_VOCAB = 32_000

T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """`prompt` tokens are each conversation's own, a turn adds `fresh` ones in chunks of `chunk`. The device holds the
    prompts of `on_device` conversations. `pause` is in seconds."""

    layers: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    page_size: int = 64
    prompt: int = 8192
    fresh: int = 512
    chunk: int = 128
    conversations: int = 5
    on_device: int = 3
    steps: int = 400
    pause: float = 0.005
    repeats: int = 9


QUICK = Sizes(layers=2, kv_heads=1, head_dim=16, page_size=16, prompt=128, fresh=64, chunk=32, steps=40, pause=0.001)


def run(device: str, sizes: Sizes, progress: Progress = lambda what: None) -> dict[str, Any]:
    """{layers, plane_bytes, prompt_tokens, steps, loads, loaded_bytes, written_bytes, calls: {name: {p50_us, p99_us,
    max_us, calls}}, load_back: {pages, p50_us, max_us}}.

    `calls` has each call of the cache and, as `step`, all of a step. `load_back` is `init_load_back` of a whole
    prompt. Raises IntegrityError if nothing loaded or was written.
    """
    steps = _Steps(resolve_device(device), sizes)
    try:
        progress("prompts")
        steps.fill()
        progress("steps")
        measured = steps.measure()
        progress("init_load_back")
        return {**measured, "load_back": steps.load_back()}
    finally:
        steps.close()


class _Steps:
    def __init__(self, device: str, sizes: Sizes) -> None:
        self._device, self._sizes = device, sizes
        model = {"name": "bench", "layers": sizes.layers, "kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim}
        turn = sizes.prompt + sizes.fresh
        tiers = [
            {"tier": "device", "device": device, "size": f"{sizes.on_device * turn} tokens"},
            {"tier": "host", "size": f"{(sizes.conversations + 3) * turn} tokens"},
        ]
        self._cache: HiCache = build_cache(
            config_from_mapping({"model": model, "page_size": sizes.page_size, "tiers": tiers})
        )
        self._requests = build_requests(self._cache)
        self._random = np.random.default_rng(0)
        self._prompts = [self._draw(sizes.prompt) for _ in range(sizes.conversations)]
        self._turns, self._numbers = cycle(self._prompts), count()
        self._seconds: dict[str, list[float]] = {}
        self._loads = 0

    def close(self) -> None:
        self._cache.close()

    def _draw(self, length: int) -> npt.NDArray[np.int32]:
        return self._random.integers(0, _VOCAB, length, dtype=np.int32)

    # ---- steps ------------------------------------------------------------------------------

    def fill(self) -> None:
        """Every prompt once, so that it is on the host."""
        for prompt in self._prompts:
            self._write(prompt)

    def _write(self, prompt: TokenIds) -> None:
        request = Request(f"{next(self._numbers)}", prompt)
        if self._requests.admit(request) is None or not self._requests.extend(request, len(prompt)):
            raise CapacityError("the device has no room for a prompt")
        self._requests.commit(request, len(prompt))
        self._requests.cache_finished_req(request)
        self._cache.end_step(record_compute(self._device))
        self._drain()

    def measure(self) -> dict[str, Any]:
        sizes, moved = self._sizes, self._cache.stats().moved_bytes
        request: Request | None = None
        gc.collect()
        gc.freeze()
        for _ in range(sizes.steps):
            request = self._step(request)
            time.sleep(sizes.pause)
        gc.unfreeze()
        if request is not None:
            self._requests.abort(request)
        self._drain()
        now = self._cache.stats().moved_bytes
        loaded, written = (now.get(key, 0) - moved.get(key, 0) for key in (HOST_DEVICE, DEVICE_HOST))
        if not (loaded and written and self._loads):
            raise IntegrityError(f"nothing to measure: {loaded} bytes were loaded, {written} written")
        shape = {"layers": sizes.layers, "plane_bytes": self._cache.layout.plane_bytes, "prompt_tokens": sizes.prompt}
        moves = {"steps": sizes.steps, "loads": self._loads, "loaded_bytes": loaded, "written_bytes": written}
        return {**shape, **moves, "calls": {name: _percentiles(taken) for name, taken in self._seconds.items()}}

    def _step(self, request: Request | None) -> Request | None:
        """One step of a request, which is admitted first if it is new; what goes on in the next one."""
        started = {name: len(taken) for name, taken in self._seconds.items()}
        self._time("poll", self._cache.poll)
        if request is None:
            request = self._admit()
        if request is not None:
            request = self._advance(request)
        event = record_compute(self._device)
        self._time("end_step", lambda: self._cache.end_step(event))
        step = sum(sum(taken[started.get(name, 0) :]) for name, taken in self._seconds.items())
        self._seconds.setdefault("step", []).append(step)
        return request

    def _admit(self) -> Request | None:
        """The next conversation's turn; None if there is no room yet, and another one's turn comes next."""
        tokens = np.concatenate([next(self._turns), self._draw(self._sizes.fresh)])
        request = Request(f"{next(self._numbers)}", tokens)
        admission = self._time("admit: match, init_load_back", lambda: self._requests.admit(request))
        if admission is None:
            return None
        self._loads += bool(admission.loads)
        return request

    def _advance(self, request: Request) -> Request | None:
        stop = min(request.kv_committed_len + self._sizes.chunk, len(request.tokens))
        if not self._time("extend: evict, alloc", lambda: self._requests.extend(request, stop)):
            return request
        self._requests.commit(request, stop)
        if stop < len(request.tokens):
            self._time("insert: share a chunk", lambda: self._requests.cache_unfinished_req(request))
            return request
        self._time("insert: finish", lambda: self._requests.cache_finished_req(request))
        return None

    def _time(self, name: str, call: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = call()
        self._seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    # ---- one load ---------------------------------------------------------------------------

    def load_back(self) -> dict[str, Any]:
        """`init_load_back` of a prompt that is on the host only."""
        self._forget(*Tier)
        self._write(self._prompts[0])
        taken, key = [], Request("load", self._prompts[0]).key()
        for _ in range(self._sizes.repeats):
            self._forget(Tier.DEVICE)
            match = self._cache.match_prefix(key)
            start = time.perf_counter()
            load = self._cache.init_load_back(match)
            taken.append(time.perf_counter() - start)
            if load is None or load.tokens != self._sizes.prompt:
                raise IntegrityError(f"{load.tokens if load else 0} tokens load of {self._sizes.prompt}")
            self._cache.unlock(load.receipt)
            self._drain()
        pages = self._sizes.prompt // self._sizes.page_size
        return {"pages": pages, "p50_us": round(median(taken) * 1e6, 1), "max_us": round(max(taken) * 1e6, 1)}

    def _forget(self, *tiers: Tier) -> None:
        report = self._cache.flush(tiers, timeout=60.0)
        if not report.flushed:
            raise IntegrityError(f"the cache was not flushed: {report.reason}")

    def _drain(self) -> None:
        if not self._cache.drain(60.0):
            raise CapacityError("copies are still in flight after a minute")


def _percentiles(seconds: list[float]) -> dict[str, Any]:
    p50, p99, most = (round(float(value) * 1e6, 1) for value in np.percentile(seconds, (50, 99, 100)))
    return {"p50_us": p50, "p99_us": p99, "max_us": most, "calls": len(seconds)}
