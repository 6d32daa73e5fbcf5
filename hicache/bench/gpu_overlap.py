"""Does compute go on while KV loads back? A prefill whose prefix comes from the host layer by layer.

Three cases: loading takes as long as computing, longer, and less long. Each is measured three times over: the load
alone, the prefill alone with its prefix on the device, and both together. Together they should take hardly longer
than the longer one. Before each of these the prefix on the device is overwritten; the logits have to be those of the
prefill alone, so a layer that is read too early shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from hicache.bench.gpu_model import draw_tokens
from hicache.bench.progress import Progress
from hicache.build import build_cache
from hicache.device_pool import resolve_device
from hicache.errors import IntegrityError
from hicache.serving.blocks import Chunk
from hicache.serving.loaded import LoadedModel
from hicache.serving.model import Transformer, WaitLayer, no_wait
from hicache.serving.setup import serving_config
from hicache.streams import record_compute
from hicache.transfer.tickets import LoadTicket

TARGET_RATIO = 1.1
_CHUNK = 4096
"""Tokens of the prefix computed at a time; it is not measured."""


@dataclass(frozen=True)
class Sizes:
    """Tokens: the longest prefix, whole pages after division by 4, and the suffixes to choose from, ascending."""

    prefix: int = 32_768
    suffixes: tuple[int, ...] = (64, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192)
    page_size: int = 64
    repeats: int = 9


QUICK = Sizes(prefix=256, suffixes=(16, 32, 64), page_size=16, repeats=2)


def run(loaded: LoadedModel, device: str, sizes: Sizes, progress: Progress = lambda what: None) -> dict[str, Any]:
    """{page_size, target, cases: [{case, prefix_tokens, suffix_tokens, load_bytes, load_gb_s, load_ms, compute_ms,
    together_ms, ratio, met}]}; `ratio` is that of together to the longer of the two. Medians.

    Raises IntegrityError if the logits over KV that loads are not those over KV that was there.
    """
    overlap = _Overlap(loaded, resolve_device(device), sizes)
    try:
        cases = overlap.cases(progress)
    finally:
        overlap.close()
    return {"page_size": sizes.page_size, "target": TARGET_RATIO, "cases": cases}


class _Overlap:
    """Pools and copies of a cache, used without it: the prefix lies on random pages of both."""

    def __init__(self, loaded: LoadedModel, device: str, sizes: Sizes) -> None:
        self._sizes, self._device = sizes, device
        tiers: list[dict[str, object]] = [
            {"tier": "device", "device": device, "size": f"{sizes.prefix + sizes.suffixes[-1]} tokens"},
            {"tier": "host", "size": f"{sizes.prefix} tokens"},
        ]
        self._cache = build_cache(serving_config(loaded, tiers, sizes.page_size, "fast"))
        assert self._cache.tiers.host is not None
        self._pool, self._copies = self._cache.tiers.device_pool, self._cache.tiers.host.copies
        self._model = Transformer(loaded.geometry, loaded.to(device).tensors, "fast")
        self._tokens = torch.tensor(draw_tokens(sizes.prefix + sizes.suffixes[-1], loaded.geometry))
        pages, order = sizes.prefix // sizes.page_size, np.random.default_rng(0)
        self._device_pages, self._host_pages = (order.permutation(pages).astype(np.int32) for _ in range(2))
        self._slots = torch.arange(len(self._tokens))
        scattered = torch.from_numpy(self._device_pages.astype(np.int64))[:, None] * sizes.page_size
        self._slots[: sizes.prefix] = (scattered + torch.arange(sizes.page_size)).flatten()

    def close(self) -> None:
        self._cache.close()

    def cases(self, progress: Progress) -> list[dict[str, Any]]:
        sizes = self._sizes
        progress("prefix")
        self._prefill()
        half = sizes.prefix // 2
        progress("finding a suffix that takes as long as its load")
        aim = self._times(lambda: self._load(half).synchronize())
        even = min(sizes.suffixes, key=lambda suffix: abs(self._times(lambda: self._compute(half, suffix)) - aim))
        chosen = {
            "load = compute": (half, even),
            "load > compute": (sizes.prefix, sizes.suffixes[0]),
            "load < compute": (sizes.prefix // 4, sizes.suffixes[-1]),
        }
        return [self._case(name, *lengths, progress) for name, lengths in chosen.items()]

    def _case(self, name: str, prefix: int, suffix: int, progress: Progress) -> dict[str, Any]:
        progress(name)
        expected = self._compute(prefix, suffix)
        load = self._times(lambda: self._load(prefix).synchronize())
        compute = self._times(lambda: self._compute(prefix, suffix))
        found: list[torch.Tensor] = []
        together = self._times(lambda: found.append(self._together(prefix, suffix)), lambda: self._poison(prefix))
        if not all(torch.equal(logits, expected) for logits in found):
            raise IntegrityError(f"{name}: KV was read before it was loaded, the logits differ")
        nbytes = prefix // self._sizes.page_size * self._pool.layout.page_bytes
        ratio = together / max(load, compute)
        shape = {"case": name, "prefix_tokens": prefix, "suffix_tokens": suffix, "load_bytes": nbytes}
        times = {"load_ms": load * 1e3, "compute_ms": compute * 1e3, "together_ms": together * 1e3}
        return {**shape, "load_gb_s": nbytes / load / 1e9, **times, "ratio": ratio, "met": ratio <= TARGET_RATIO}

    # ---- work -------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Compute the prefix on the device, and bring it to the host."""
        for start in range(0, self._sizes.prefix, _CHUNK):
            self._forward(start, min(start + _CHUNK, self._sizes.prefix), self._slots)
        self._copies.backup(self._device_pages, self._host_pages, record_compute(self._device)).synchronize()

    def _load(self, prefix: int) -> LoadTicket:
        pages = prefix // self._sizes.page_size
        return self._copies.load_back(self._host_pages[:pages], self._device_pages[:pages])

    def _compute(self, prefix: int, suffix: int, wait: WaitLayer = no_wait) -> torch.Tensor:
        """Logits after the first `prefix` tokens and `suffix` more."""
        slots = torch.cat([self._slots[:prefix], self._slots[self._sizes.prefix :][:suffix]])
        return self._forward(prefix, prefix + suffix, slots, wait)

    def _together(self, prefix: int, suffix: int) -> torch.Tensor:
        ticket = self._load(prefix)
        return self._compute(prefix, suffix, lambda layer: ticket.layer_done(layer).gate())

    def _forward(self, start: int, stop: int, slots: torch.Tensor, wait: WaitLayer = no_wait) -> torch.Tensor:
        return self._model.forward([Chunk(self._tokens[start:stop], slots[:stop])], self._pool, wait).cpu()

    def _poison(self, prefix: int) -> None:
        """Overwrite the prefix on the device, and wait until that is done: loads would not."""
        self._pool.poison(self._device_pages[: prefix // self._sizes.page_size])
        done = record_compute(self._device)
        if done is not None:
            done.synchronize()

    def _times(self, work: Callable[[], object], before: Callable[[], None] = lambda: None) -> float:
        """Median seconds of `work`, after two times to warm up."""
        return median(self._seconds(work, before)[2:])

    def _seconds(self, work: Callable[[], object], before: Callable[[], None]) -> Sequence[float]:
        taken = []
        for _ in range(self._sizes.repeats + 2):
            before()
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
        return taken
