"""`hicache bench serving`: what a hit saves until the first token, and what the cache costs where nothing hits.

Time to first token (TTFT) of a prefix with a short new suffix: computed without cache, and with the prefix on the
device, on the host and on disk. Beside each ratio the one that its bytes and flops allow, from rates measured in
the same run, between the same repeats:

    compute of all tokens / (compute of the suffix + bytes from disk / disk rate + bytes to the device / copy rate)

Compute is the bare model without an engine, the copy rate one memcpy, the disk rate an O_DIRECT read of a plain file.
The tier reads with O_DIRECT too, where the file system has it. Loads and compute may overlap, so a ratio above the
allowed one is possible.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from hicache.bench.progress import Progress
from hicache.bench.storage_media import Job, measure_raw, random_pages, scratch_folder
from hicache.errors import IntegrityError
from hicache.serving.blocks import Chunk
from hicache.serving.engine import Engine
from hicache.serving.loaded import LoadedModel
from hicache.serving.model import Transformer
from hicache.serving.outputs import GenerationRequest
from hicache.serving.scheduler import SchedulerOptions
from hicache.serving.setup import build_engine, plain_engine, serving_config
from hicache.serving.weights import load_model
from hicache.types import Tier

MODEL = "random:layers=8,heads=8,kv_heads=4,head_dim=64,hidden=512,ffn=1408"
PREFIX, SUFFIX = 2000, 32
PAGE_SIZE = 16
SOURCES = {"device": (), "host": (Tier.DEVICE,), "storage": (Tier.DEVICE, Tier.HOST)}
"""Where the prefix is, and the tiers that forget it before."""

_BATCH = 16
_VARIANTS = {"device": 1, "device and host": 2, "device, host and disk": 3}
"""Caches whose throughput is compared with none, with the number of their tiers."""


@dataclass(frozen=True)
class Sizes:
    """Tokens, and how often things are measured. `requests` of `prompt` and `answer` tokens are one run of the
    throughput."""

    prefix: int = PREFIX
    suffix: int = SUFFIX
    repeats: int = 7
    requests: int = 8
    prompt: int = 256
    answer: int = 32
    runs: int = 11


QUICK = Sizes(prefix=256, repeats=2, requests=2, prompt=64, answer=8, runs=2)


def run(
    path: Path,
    model: str = MODEL,
    sizes: Sizes | None = None,
    threads: int | None = None,
    progress: Progress = lambda what: None,
) -> dict[str, Any]:
    """Measure with a store in a new folder inside `path`, which is removed at the end. `threads` compute; without it
    half of the cores do, so that copies find another one.

    Returns {model, threads, token_bytes, ttft: see `_Ttft.to_json`, throughput: see `_throughput`}. Raises
    IntegrityError if a prefix does not come from where it was meant to.
    """
    sizes = sizes or Sizes()
    loaded = load_model(model)
    with compute_threads(threads) as used, scratch_folder(path) as folder:
        ttft = _Ttft(loaded, folder, sizes)
        try:
            measured = ttft.run(progress)
        finally:
            ttft.close()
        throughput = _throughput(loaded, folder, sizes, progress)
    token_bytes = loaded.geometry.layout(PAGE_SIZE).token_bytes
    return {"model": model, "threads": used, "token_bytes": token_bytes, "ttft": measured, "throughput": throughput}


@contextmanager
def compute_threads(wanted: int | None) -> Iterator[int]:
    """So many threads compute meanwhile; None: half of the cores, so that copies find another one."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or max(before // 2, 1))
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


# ---- time to first token ------------------------------------------------------------------------


class _Ttft:
    """Seconds of everything that is measured, by name, a value for each repeat."""

    def __init__(self, loaded: LoadedModel, folder: Path, sizes: Sizes) -> None:
        self._loaded, self._sizes, self._folder = loaded, sizes, folder
        self._random = random.Random(0)
        self._length = sizes.prefix + sizes.suffix
        self._pages = sizes.prefix // PAGE_SIZE
        self._layout = loaded.geometry.layout(PAGE_SIZE)
        self._transformer = Transformer(loaded.geometry, loaded.tensors, "fast")
        self._plain = plain_engine(loaded, 2 * self._length, mode="fast", device="cpu")
        self._engine = _cached_engine(loaded, folder / "ttft", 3, 4 * self._length, sizes.repeats)
        batches = max(self._pages // _BATCH, 1)
        self._job = Job(self._layout, _BATCH, batches, random_pages(self._layout, _BATCH))
        self._copy = [np.ones(self._pages * self._layout.page_bytes, np.uint8) for _ in range(2)]
        self._seconds: dict[str, list[float]] = {}

    def run(self, progress: Progress) -> dict[str, Any]:
        prefix = _draw(self._random, self._sizes.prefix, self._loaded)
        progress("warming up")
        _first_token(self._plain, prefix)
        _first_token(self._engine, prefix)
        for repeat in range(self._sizes.repeats):
            progress(f"time to first token, {repeat + 1} of {self._sizes.repeats}")
            self._rates(prefix)
            self._note("recompute", _first_token(self._plain, self._ask(prefix)))
            for source in SOURCES:
                self._note(source, self._hit(source, self._ask(prefix)))
        return self.to_json()

    def close(self) -> None:
        self._plain.close()
        self._engine.close()

    def _note(self, name: str, seconds: float) -> None:
        self._seconds.setdefault(name, []).append(seconds)

    def _ask(self, prefix: list[int]) -> list[int]:
        return prefix + _draw(self._random, self._sizes.suffix, self._loaded)

    def _hit(self, source: str, prompt: list[int]) -> float:
        engine = self._engine
        engine.settle()
        report = engine.cache.flush(SOURCES[source], timeout=60.0) if SOURCES[source] else None
        if report is not None and not report.flushed:
            raise IntegrityError(f"the tiers above {source} were not flushed: {report.reason}")
        return _first_token(engine, prompt, source, self._pages * PAGE_SIZE)

    # ---- what bytes and flops allow ---------------------------------------------------------

    def _rates(self, prefix: list[int]) -> None:
        """Compute, copy and read what a request does, without anything around it."""
        tokens = torch.tensor(self._ask(prefix))
        whole = self._pages * PAGE_SIZE
        self._note("compute", self._compute(tokens, 0))
        self._note("compute of the suffix", self._compute(tokens, whole))
        start = time.perf_counter()
        np.copyto(self._copy[0], self._copy[1])
        self._note("copy", time.perf_counter() - start)
        rate = measure_raw(self._folder / "raw", self._job)["read"].gb_per_s * 1e9
        self._note("read", self._pages * self._layout.page_stride / rate)

    def _compute(self, tokens: torch.Tensor, start: int) -> float:
        """The bare model from token `start` on, in the chunks of the scheduler. Nobody else uses the pool now."""
        pool, step = self._plain.cache.tiers.device_pool, SchedulerOptions().chunk_tokens
        slots = torch.arange(PAGE_SIZE, PAGE_SIZE + len(tokens))
        began = time.perf_counter()
        for first in range(start, len(tokens), step):
            stop = min(first + step, len(tokens))
            self._transformer.forward([Chunk(tokens[first:stop], slots[:stop])], pool)
        return time.perf_counter() - began

    # ---- report -----------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """{prefix_tokens, suffix_tokens, repeats, rates: {prefill_tokens_per_s, copy_gb_per_s, disk_gb_per_s,
        suffix_ms}, rows: [{source, bytes, ttft_ms, ratio, allowed_ratio}]}, medians over the repeats. `bytes` is what
        moves between tiers, `ratio` how many times faster than to compute all."""
        took = {name: median(seconds) for name, seconds in self._seconds.items()}
        copied, read = self._pages * self._layout.page_bytes, self._pages * self._layout.page_stride
        moved = {"device": (0, 0.0), "host": (copied, took["copy"])}
        moved["storage"] = (copied + read, took["copy"] + took["read"])
        rows = [{"source": "recompute", "bytes": 0, "ttft_ms": took["recompute"] * 1e3}]
        for source, (nbytes, seconds) in moved.items():
            allowed = took["compute"] / (took["compute of the suffix"] + seconds)
            ratio = took["recompute"] / took[source]
            row = {"source": source, "bytes": nbytes, "ttft_ms": took[source] * 1e3}
            rows.append({**row, "ratio": ratio, "allowed_ratio": allowed})
        rates = {
            "prefill_tokens_per_s": self._length / took["compute"],
            "copy_gb_per_s": copied / took["copy"] / 1e9,
            "disk_gb_per_s": read / took["read"] / 1e9,
            "suffix_ms": took["compute of the suffix"] * 1e3,
        }
        shape = {"prefix_tokens": self._sizes.prefix, "suffix_tokens": self._sizes.suffix}
        return {**shape, "repeats": self._sizes.repeats, "rates": rates, "rows": rows}


def _first_token(engine: Engine, prompt: list[int], source: str | None = None, expected: int = 0) -> float:
    """Seconds to the first token. Raises IntegrityError unless `expected` tokens came from `source`."""
    (handle,) = engine.generate([GenerationRequest(prompt, 1, ignore_eos=True)])
    assert handle.metrics is not None and handle.metrics.ttft is not None
    if source is not None and handle.metrics.cached_tokens[source] != expected:
        raise IntegrityError(f"{expected} tokens should have come from {source}: {dict(handle.metrics.cached_tokens)}")
    return handle.metrics.ttft


# ---- throughput without reuse -------------------------------------------------------------------


def _throughput(loaded: LoadedModel, folder: Path, sizes: Sizes, progress: Progress) -> dict[str, Any]:
    """{requests, prompt_tokens, answer_tokens, runs, off_tokens_per_s, rows: [{cache, ratio, lowest, highest}]}.

    Every run serves new prompts with each engine, one engine after the other, beginning with another one each time.
    A ratio is that of the speeds with and without cache in one run; the median over the runs is reported.
    """
    room = 2 * sizes.requests * (sizes.prompt + sizes.answer)
    engines = {"off": plain_engine(loaded, room, mode="fast", device="cpu")}
    try:
        for name, tiers in _VARIANTS.items():
            engines[name] = _cached_engine(loaded, folder / f"tiers-{tiers}", tiers, room, sizes.runs)
        speeds = _speeds(loaded, engines, sizes, progress)
    finally:
        for engine in engines.values():
            engine.close()
    rows = []
    for name in _VARIANTS:
        ratios = [on / off for on, off in zip(speeds[name], speeds["off"])]
        rows.append({"cache": name, "ratio": median(ratios), "lowest": min(ratios), "highest": max(ratios)})
    shape = {"requests": sizes.requests, "prompt_tokens": sizes.prompt, "answer_tokens": sizes.answer}
    return {**shape, "runs": sizes.runs, "off_tokens_per_s": median(speeds["off"]), "rows": rows}


def _speeds(
    loaded: LoadedModel, engines: dict[str, Engine], sizes: Sizes, progress: Progress
) -> dict[str, list[float]]:
    """Tokens per second of each engine in each run; the first run warms up and does not count."""
    draw, names = random.Random(1), list(engines)
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(sizes.runs + 1):
        progress(f"throughput, {number + 1} of {sizes.runs + 1}")
        prompts = [_draw(draw, sizes.prompt, loaded) for _ in range(sizes.requests)]
        first = number % len(names)
        for name in names[first:] + names[:first]:
            speed = _speed(engines[name], prompts, sizes.answer)
            if number:
                speeds[name].append(speed)
    return speeds


def _speed(engine: Engine, prompts: Sequence[list[int]], answer: int) -> float:
    """Tokens per second until the last answer has ended. Copies of its last step land outside of the clock."""
    requests = [GenerationRequest(prompt, answer, ignore_eos=True) for prompt in prompts]
    start = time.perf_counter()
    engine.generate(requests)
    seconds = time.perf_counter() - start
    engine.settle()
    return sum(len(prompt) + answer for prompt in prompts) / seconds


# ---- engines ------------------------------------------------------------------------------------


def _cached_engine(loaded: LoadedModel, store: Path, tiers: int, room: int, repeats: int) -> Engine:
    """An engine over the first `tiers` tiers, a device and a host of `room` tokens, and a disk for `repeats` times
    as many."""
    prefetch = {"policy": "wait_complete", "deadline": "10s"}
    disk = (repeats + 2) * room
    sections: list[dict[str, object]] = [
        {"tier": "device", "device": "cpu", "size": f"{room} tokens"},
        {"tier": "host", "size": f"{room} tokens"},
        {"tier": "storage", "path": str(store), "size": f"{disk} tokens", "prefetch": prefetch},
    ]
    config = serving_config(loaded, sections[:tiers], PAGE_SIZE, "fast")
    return build_engine(loaded, config, mode="fast")


def _draw(draw: random.Random, count: int, loaded: LoadedModel) -> list[int]:
    return [draw.randrange(loaded.geometry.vocab) for _ in range(count)]
