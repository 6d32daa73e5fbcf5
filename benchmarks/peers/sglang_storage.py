"""Our disk tier beside SGLang's file backend: pages put and got through the functions that its cache controller calls.

    tests/engines/sglang/install.sh .venv-sglang
    .venv-sglang/bin/python benchmarks/peers/sglang_storage.py --folder /var/tmp

One run alternates between the backends; only ratios of one run say anything. SGLang 0.5.23, its own page_first host
pool, batches of 128 pages as its controller makes them.

put          until the backend says that the pages are stored. The file backend has them in the page cache then.
put + sync   and until a power loss cannot take them any more.
cold get     the bytes are not in the page cache.
get again    directly after it: the file backend reads from the page cache, ours from the disk.
inline       ours with `values: inline`, which has its pages in the page cache too; the ratio is that of the default.
raw          the same bytes in a plain file, in pieces of 8 MiB, to the memory of the same pool: what the disk gives.

Each for a pool in small memory pages, as SGLang has it unless told otherwise, and in huge pages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/engines/sglang")]
warnings.filterwarnings("ignore", message="Only .* support")  # SGLang on a CPU

import sglang_cpu  # noqa: E402

if not sglang_cpu.installed():
    sys.exit("SGLang is not installed here: tests/engines/sglang/install.sh VENV, then VENV/bin/python " + sys.argv[0])
sglang_cpu.load()

import torch  # noqa: E402
from cpu_cache import PAGE, DevicePool, Ranks, host_pool, place  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    STORAGE_BATCH_SIZE,
    HiCacheFile,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)

from hicache.integrations.sglang import HiCacheLMDBStorage  # noqa: E402

SHAPES = {"2MiB": (8, 8, 128), "8MiB": (32, 8, 128)}
"""Layers, KV heads and head_dim, by the size of a page of 64 tokens in bfloat16."""

MEMORY = {"small": "0", "huge": "2"}
"""SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS by the size of the memory pages that the host pool gets with it."""

RAW_BYTES = 8 << 20
DEPTHS = (1, 2, 4, 8)
"""Reads of so many bytes each, so many at a time."""

Put = Callable[[list[str], Any, list[str]], bool]
Get = Callable[[list[str], Any], int]


@dataclass(frozen=True)
class Peer:
    put: Put
    get: Get
    close: Callable[[], None]


def config(extra: dict[str, Any]) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name="bench", extra_config=extra,
    )  # fmt: skip


def file_backend(pool: Any, folder: Path) -> Peer:
    """As CacheController._generic_page_set and _generic_page_get call it."""
    storage = HiCacheFile(config({"file_storage_path": str(folder)}))
    folder.mkdir(exist_ok=True)

    def put(keys: list[str], indices: Any, prefix: list[str]) -> bool:
        return storage.batch_set(keys, [pool.get_data_page(indices[i * PAGE]) for i in range(len(keys))])

    def get(keys: list[str], indices: Any) -> int:
        pages = storage.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        for number, page in enumerate(pages):
            if page is None:
                return number
            pool.set_from_flat_data_page(indices[number * PAGE], page)
        return len(pages)

    return Peer(put, get, lambda: None)


def our_backend(values: str, pool: Any, folder: Path) -> Peer:
    """As CacheController._page_set_zero_copy and _page_get_zero_copy call it."""
    storage = HiCacheLMDBStorage(config({"path": str(folder), "size": "8GiB", "values": values}), {})
    storage.register_mem_pool_host(pool)

    def put(keys: list[str], indices: Any, prefix: list[str]) -> bool:
        return all(storage.batch_set_v1(keys, indices, HiCacheStorageExtraInfo(prefix_keys=prefix)))

    return Peer(put, lambda keys, indices: sum(storage.batch_get_v1(keys, indices)), storage.close)


BACKENDS = {
    "SGLang file": file_backend,
    "hicache": partial(our_backend, "slab"),
    "inline": partial(our_backend, "inline"),
}


def batches(keys: list[str]) -> Iterator[tuple[list[str], Any]]:
    for start in range(0, len(keys), STORAGE_BATCH_SIZE):
        part = keys[start : start + STORAGE_BATCH_SIZE]
        yield part, torch.arange(start * PAGE, (start + len(part)) * PAGE)


def forget_pages(folder: Path) -> None:
    """Drop the files' bytes from the page cache; they are on disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def one_round(make: Callable[[Any, Path], Peer], pool: Any, folder: Path, round_number: int) -> dict[str, float]:
    """GiB/s of each operation, on new pages in an empty folder. Every byte that is got is compared."""
    pool.kv_buffer.view(torch.uint8).random_(0, 255)
    truth = hashlib.blake2b(pool.kv_buffer.view(torch.uint8).numpy().data).digest()
    keys = [hashlib.sha256(f"{round_number}/{page}".encode()).hexdigest() for page in range(pool.page_num)]
    gib = pool.kv_buffer.nbytes / 2**30
    peer = make(pool, folder)
    began = time.perf_counter()
    prefix: list[str] = []
    for part, indices in batches(keys):
        assert peer.put(part, indices, prefix)
        prefix = prefix + part
    put = time.perf_counter() - began
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    synced = time.perf_counter() - began
    rates = {"put": gib / put, "put + sync": gib / synced}
    for name in ("cold get", "get again"):
        pool.kv_buffer.zero_()
        if name == "cold get":
            forget_pages(folder)
        began = time.perf_counter()
        assert sum(peer.get(part, indices) for part, indices in batches(keys)) == len(keys)
        rates[name] = gib / (time.perf_counter() - began)
        assert hashlib.blake2b(pool.kv_buffer.view(torch.uint8).numpy().data).digest() == truth
    peer.close()
    return rates


def raw_round(pool: Any, folder: Path) -> dict[str, float]:
    """GiB/s of reading a plain file of the pool's size into the pool's memory."""
    memory = memoryview(pool.kv_buffer.view(torch.uint8).reshape(-1).numpy()).cast("B")
    memory = memory[: memory.nbytes // RAW_BYTES * RAW_BYTES]
    path = folder / "raw"

    def rate(flags: int, depth: int) -> float:
        file = os.open(path, os.O_RDONLY | flags)
        began = time.perf_counter()
        with ThreadPoolExecutor(depth) as readers:
            starts = range(0, memory.nbytes, RAW_BYTES)
            moved = sum(readers.map(lambda at: os.preadv(file, [memory[at : at + RAW_BYTES]], at), starts))
        took = time.perf_counter() - began
        os.close(file)
        assert moved == memory.nbytes
        return moved / 2**30 / took

    path.write_bytes(memory)
    forget_pages(folder)
    rates = {f"raw, O_DIRECT, {depth} at a time": rate(os.O_DIRECT, depth) for depth in DEPTHS}
    return {**rates, "raw, buffered, cold": rate(0, 1)}


def compare(pool: Any, rounds: int, folder: Path) -> dict[str, dict[str, float]]:
    """Median GiB/s by backend and operation, and of the disk alone as the last."""
    jobs: dict[str, Callable[[Path, int], dict[str, float]]] = {
        **{name: partial(one_round, make, pool) for name, make in BACKENDS.items()},
        "raw": lambda place_for, number: raw_round(pool, place_for),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in jobs}
    for number in range(rounds):
        for name, job in jobs.items():
            place_for = Path(tempfile.mkdtemp(dir=folder))
            try:
                found[name].append(job(place_for, number))
            finally:
                shutil.rmtree(place_for)
    return {
        name: {what: statistics.median(each[what] for each in results) for what in results[0]}
        for name, results in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on the disk to be measured")
    parser.add_argument("--mib", type=int, default=512, help="bytes put and got in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layout", default="page_first", help="of the host pool: page_first, layer_first, ...")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--memory", choices=list(MEMORY), action="append", help="only this (default: both)")
    args = parser.parse_args()
    place(Ranks())
    results = {}
    for memory in args.memory or MEMORY:
        os.environ["SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS"] = MEMORY[memory]
        for size, shape in SHAPES.items():
            pages = args.mib // int(size.removesuffix("MiB"))
            pool = host_pool(DevicePool(PAGE, torch.bfloat16, shape), args.layout, pages)
            found = results[f"{size}, {memory}"] = compare(pool, args.rounds, args.folder)
            load = os.getloadavg()[0]
            print(
                f"pages of {size}, {args.layout}, pool in {memory} memory pages, GiB/s; {args.mib} MiB, load {load:.1f}"
            )
            show(found)
            pool.destroy()
    if args.json:
        args.json.write_text(json.dumps({"layout": args.layout, "mib": args.mib, "GiB/s": results}, indent=1))


def show(found: dict[str, dict[str, float]]) -> None:
    raw, backends = found["raw"], [found[name] for name in BACKENDS]
    print(f"  {'':12}" + "".join(f" {name:>12}" for name in BACKENDS) + f" {'ratio':>8}")
    for what, theirs in backends[0].items():
        rates = "".join(f" {rates[what]:12.2f}" for rates in backends)
        print(f"  {what:12}{rates} {backends[1][what] / theirs:7.1f}x")
    for what, rate in raw.items():
        print(f"  {what:38} {rate:12.2f} {rate / backends[0]['cold get']:7.1f}x of the cold get of SGLang file")


if __name__ == "__main__":
    main()
