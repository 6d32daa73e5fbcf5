"""`hicache bench calibrate`: the section `costs` of a configuration, measured on this machine.

Copies go through the copy engine of the product, pages through an LMDB store in slabs, prefill and decode through the
reference engine's model, on half of the cores where that is a CPU. Copies and compute are the best of several runs:
the others were disturbed. Of a prompt's first and last chunk the difference is attention's:

    seconds a token in a chunk around position p  =  per_token + per_pair * p
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hicache.bench.progress import Progress
from hicache.bench.serving import compute_threads
from hicache.bench.storage_media import Job, batch_keys, measure_store, random_pages, scratch_folder
from hicache.config.units import SECONDS, format_rate
from hicache.costs import Link, PrefillCost
from hicache.device_pool import DevicePool, resolve_device
from hicache.hashing import StoreIdentity
from hicache.host_pool.pinning import resolve_pinned
from hicache.host_pool.pool import HostPool
from hicache.layout import KVLayout
from hicache.serving.blocks import Chunk
from hicache.serving.loaded import LoadedModel
from hicache.serving.model import Transformer
from hicache.serving.weights import load_model
from hicache.storage_backends.base import PageRun
from hicache.storage_backends.lmdb_backend import LmdbBackend
from hicache.streams import record_compute
from hicache.transfer.copy_engine import CopyEngine
from hicache.transfer.tickets import CopyTicket

MODEL = "random:layers=8,heads=8,kv_heads=4,head_dim=64,hidden=512,ffn=1408"
_LEAST_LATENCY = 1e-6
_PAGES_LOOKED_UP = 64


@dataclass(frozen=True)
class Sizes:
    """Tokens of a page, of a prompt and of its chunks; bytes copied, and written to disk; how often."""

    page: int = 16
    prompt: int = 2048
    chunk: int = 256
    copied_bytes: int = 64 << 20
    stored_bytes: int = 256 << 20
    repeats: int = 5


QUICK = Sizes(prompt=256, chunk=64, copied_bytes=4 << 20, stored_bytes=8 << 20, repeats=2)


def run(
    path: Path,
    model: str = MODEL,
    sizes: Sizes | None = None,
    device: str = "cpu",
    progress: Progress = lambda what: None,
) -> dict[str, Any]:
    """Measure with a store in a new folder inside `path`, which is removed at the end.

    Returns {model, page_bytes, costs: the section as a configuration has it}. Raises ConfigError for a model or a
    device that cannot be used.
    """
    sizes = sizes or Sizes()
    device = resolve_device(device)
    loaded = load_model(model)
    layout = loaded.geometry.layout(sizes.page)
    progress("copies")
    to_host, to_device = measure_copies(layout, sizes, device)
    progress("the disk")
    with scratch_folder(path) as folder:
        disk = measure_disk(folder, layout, sizes)
    progress("prefill")
    with compute_threads(None):
        prefill, decode_step = measure_compute(loaded, sizes, device)
    pairs = {"pairs_per_second": int(_measured(1 / prefill.per_pair))} if prefill.per_pair else {}
    costs = {
        "to_device": _section(to_device),
        "to_host": _section(to_host),
        "disk_read": _section(disk.read),
        "disk_write": _section(disk.write),
        "lookup": _duration(disk.lookup),
        "decode_step": _duration(decode_step),
        "prefill": {"tokens_per_second": _measured(1 / prefill.per_token), **pairs},
    }
    return {"model": model, "page_bytes": layout.page_bytes, "costs": costs}


def measure_copies(layout: KVLayout, sizes: Sizes, device: str) -> tuple[Link, Link]:
    """Device to host, and host to device, as `CopyEngine` does it: many pages, and one for the latency."""
    count = max(2, sizes.copied_bytes // layout.page_stride)
    pool = DevicePool(layout, count, device)
    host = HostPool(layout, count, resolve_pinned("auto", device))
    engine = CopyEngine.between(pool, host)
    pages = np.arange(count, dtype=np.int32)

    def link(copy: Callable[[Any, Any], CopyTicket]) -> Link:
        def seconds(number: int) -> float:
            return best(lambda: copy(pages[:number], pages[:number]).synchronize(), sizes.repeats)

        return fitted(seconds(1), seconds(count), layout.page_bytes, count)

    try:
        return link(engine.backup), link(engine.load_back)
    finally:
        engine.close()
        host.close()


@dataclass(frozen=True)
class Disk:
    """A store's reads and writes, and the seconds of one question for a prefix."""

    read: Link
    write: Link
    lookup: float


def measure_disk(folder: Path, layout: KVLayout, sizes: Sizes) -> Disk:
    """Cold reads and durable writes of an LMDB store, in batches and page by page."""
    batch = 16
    batches = max(1, sizes.stored_bytes // (batch * layout.page_bytes))
    many = measure_store(folder / "many", Job(layout, batch, batches, random_pages(layout, batch)), "slab")
    one = measure_store(folder / "one", Job(layout, 1, min(batches, 32), random_pages(layout, 1)), "slab")
    size = layout.page_bytes

    def link(way: str) -> Link:
        rate = many[way].gb_per_s * 1e9
        return Link(rate, max(size / (one[way].gb_per_s * 1e9) - size / rate, _LEAST_LATENCY))

    return Disk(link("read"), link("write"), _lookup_seconds(folder / "lookup", layout, sizes.repeats))


def _lookup_seconds(path: Path, layout: KVLayout, repeats: int) -> float:
    budget = 2 * _PAGES_LOOKED_UP * layout.page_stride + (256 << 20)
    store = LmdbBackend(path, StoreIdentity(layout, model="bench"), budget)
    keys, pages = batch_keys(0, _PAGES_LOOKED_UP), random_pages(layout, 1) * _PAGES_LOOKED_UP
    try:
        store.write([PageRun(keys, pages, None)])
        return best(lambda: store.contains_prefix(keys), repeats)
    finally:
        store.close()


def measure_compute(loaded: LoadedModel, sizes: Sizes, device: str) -> tuple[PrefillCost, float]:
    """Prefill, and one token of one answer, by the bare model in its fast mode."""
    layout = loaded.geometry.layout(sizes.page)
    pool = DevicePool(layout, layout.pages_of(sizes.prompt + 1) + 1, device)
    model = Transformer(loaded.geometry, loaded.to(device).tensors, "fast")
    tokens = torch.randint(loaded.geometry.vocab, (sizes.prompt,), generator=torch.Generator().manual_seed(0))
    slots = torch.arange(sizes.prompt)

    def seconds(start: int, stop: int) -> float:
        def work() -> None:
            model.forward([Chunk(tokens[start:stop], slots[:stop])], pool)
            event = record_compute(device)
            if event is not None:
                event.synchronize()

        return best(work, sizes.repeats)

    for first in range(0, sizes.prompt, sizes.chunk):  # KV of all that the last chunk attends to
        seconds(first, min(first + sizes.chunk, sizes.prompt))
    head = seconds(0, sizes.chunk) / sizes.chunk
    tail = seconds(sizes.prompt - sizes.chunk, sizes.prompt) / sizes.chunk
    per_pair = max(tail - head, 0.0) / (sizes.prompt - sizes.chunk)
    per_token = max(head - per_pair * sizes.chunk / 2, head / 10)
    return PrefillCost(per_token, per_pair), seconds(sizes.prompt - 1, sizes.prompt)


def fitted(one: float, all_of_them: float, page_bytes: int, count: int) -> Link:
    """Bandwidth and latency from the seconds of one page and of `count` pages."""
    per_page = max(all_of_them - one, all_of_them / count / 2) / (count - 1)
    return Link(page_bytes / per_page, max(one - per_page, _LEAST_LATENCY))


def best(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the best of `repeats` runs after one to warm up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _section(link: Link) -> dict[str, str]:
    return {"bandwidth": format_rate(_measured(link.bytes_per_second), "B/s"), "latency": _duration(link.latency)}


def _duration(seconds: float) -> str:
    seconds = max(seconds, _LEAST_LATENCY)
    unit = next(unit for unit in ("s", "ms", "us") if unit == "us" or seconds >= SECONDS[unit])
    return f"{_measured(seconds / float(SECONDS[unit])):g}{unit}"


def _measured(value: float) -> float:
    """To three digits, which is more than two runs agree on."""
    return float(f"{value:.3g}")
