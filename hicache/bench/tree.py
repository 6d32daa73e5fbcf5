"""`hicache bench tree`: the radix tree on four workloads, its memory, and the bookkeeping of write-through.

W1  one sequence of 128k tokens, matched whole
W2  200 conversations of 40 turns, 300 new tokens each, on a shared prompt of 1k: mean per turn
W3  20,000 sequences of 512 tokens that share 256: median
W4  one leaf evicted per call, in trees of 1k to 100k leaves (1M if `long`): median
"""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from hicache.tree.radix_tree import RadixTree
from hicache.types import PageIndices, PrefixKey, Tier, TokenIds

PAGE_SIZES = (1, 16, 64)
VOCABULARY = 128_000

TARGETS = {
    "W1 match": 15.0,
    "W2 match": 30.0,
    "W2 insert": 30.0,
    "W3 match": 5.0,
    "W3 insert": 12.0,
    "W4 evict": 10.0,
    "write-through turn": 60.0,
    "leaf of 256 tokens": 2000.0,
}
"""What is aimed at: microseconds a call, and bytes for the last."""


@dataclass(frozen=True)
class Figure:
    """One measurement. `name` begins with a key of TARGETS; `unit` is "us" or "bytes"."""

    name: str
    page_size: int
    value: float
    target: float
    unit: str = "us"

    @property
    def met(self) -> bool:
        return self.value <= self.target


@dataclass(frozen=True)
class _Scale:
    """How much to run; the defaults are the workloads above."""

    tokens: int = 131_072
    conversations: int = 200
    turns: int = 40
    sequences: int = 20_000
    leaves: tuple[int, ...] = (1_000, 10_000, 100_000)
    memory_leaves: int = 20_000
    repeats: int = 21


class _Turn(NamedTuple):
    """Seconds of a turn."""

    match: float
    insert: float
    copies: float


_RUNS = 3
_QUICK = _Scale(16_384, 10, 5, 500, (500,), 2_000, 5)
_LONG = _Scale(leaves=(1_000, 10_000, 100_000, 1_000_000))


def run(quick: bool = False, long: bool = False, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run everything at every page size.

    Returns {machine: {cpu, cores, python, numpy}, figures: [{name, page_size, value, unit, target, met}]}.
    """
    scale = _QUICK if quick else _LONG if long else _Scale()
    figures: list[Figure] = []
    for page_size in PAGE_SIZES:
        for workload in (_w1, _w2, _write_through, _w3, _w4, _memory):
            progress(f"page {page_size}: {workload.__name__.strip('_')}")
            figures += workload(page_size, scale)
    return {"machine": machine(), "figures": [{**asdict(figure), "met": figure.met} for figure in figures]}


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# ---- workloads ------------------------------------------------------------------------------


def _w1(page_size: int, scale: _Scale) -> list[Figure]:
    tree, key = RadixTree(page_size), PrefixKey.of(_random_tokens(np.random.default_rng(0), scale.tokens))
    tree.insert(key, _pages(scale.tokens, page_size))
    with _no_collection():
        seconds = [_timed(lambda: tree.match(key)) for _ in range(scale.repeats)]
    return [_figure("W1 match", page_size, median(seconds))]


def _w2(page_size: int, scale: _Scale) -> list[Figure]:
    match, insert, _ = _best_turn(page_size, scale, write_through=False)
    return [_figure("W2 match", page_size, match), _figure("W2 insert", page_size, insert)]


def _write_through(page_size: int, scale: _Scale) -> list[Figure]:
    """The turns of W2 when the new pages of each are copied to the host: match, insert, copy begun and committed."""
    return [_figure("write-through turn", page_size, sum(_best_turn(page_size, scale, write_through=True)))]


def _best_turn(page_size: int, scale: _Scale, write_through: bool) -> _Turn:
    """The run with the least time in all: what disturbs a run only ever adds to it."""
    return min((_mean_turn(page_size, scale, write_through) for _ in range(_RUNS)), key=sum)


def _mean_turn(page_size: int, scale: _Scale, write_through: bool) -> _Turn:
    tree, turns = RadixTree(page_size), list[_Turn]()
    with _no_collection():
        for key in _turns(scale):
            pages = _pages(len(key), page_size)
            start = time.perf_counter()
            tree.match(key)
            matched = time.perf_counter()
            result = tree.insert(key, pages)
            inserted = time.perf_counter()
            if write_through:
                count = sum(len(node.key) for node in result.adopted) // tree.page_bytes
                tree.fills.commit(tree.fills.begin(Tier.HOST, result.adopted, pages[:count]))
                tree.coalesce(result.adopted)  # as HiCache.poll does
            turns.append(_Turn(matched - start, inserted - matched, time.perf_counter() - inserted))
    return _Turn(*(mean(column) for column in zip(*turns, strict=True)))


def _w3(page_size: int, scale: _Scale) -> list[Figure]:
    tree, keys, pages = RadixTree(page_size), list(_siblings(scale.sequences)), _pages(512, page_size)
    with _no_collection():
        inserts = [_timed(lambda: tree.insert(key, pages)) for key in keys]  # noqa: B023 - called at once
        matches = [_timed(lambda: tree.match(key)) for key in keys[::4]]  # noqa: B023
    return [_figure("W3 match", page_size, median(matches)), _figure("W3 insert", page_size, median(inserts))]


def _w4(page_size: int, scale: _Scale) -> list[Figure]:
    return [_evictions(page_size, leaves) for leaves in scale.leaves]


def _evictions(page_size: int, leaves: int) -> Figure:
    tree, pages = RadixTree(page_size), _pages(512, page_size)

    def evict() -> None:
        leaf = tree.ledger.device.first()
        assert leaf is not None
        tree.drop_device(leaf)

    with _no_collection():
        for key in _siblings(leaves):
            tree.insert(key, pages)
        seconds = [_timed(evict) for _ in range(min(2_000, leaves // 2))]
    return _figure("W4 evict", page_size, median(seconds), f" of {leaves:,} leaves")


def _memory(page_size: int, scale: _Scale) -> list[Figure]:
    """In a process of its own, whose memory nothing else has touched."""
    code = f"from hicache.bench.tree import print_leaf_bytes; print_leaf_bytes({page_size}, {scale.memory_leaves})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name = "leaf of 256 tokens"
    return [Figure(name, page_size, round(float(done.stdout)), TARGETS[name], "bytes")]


def print_leaf_bytes(page_size: int, leaves: int) -> None:
    """Print the growth of this process's resident memory per leaf of 256 tokens."""
    tree, pages = RadixTree(page_size), _pages(512, page_size)
    for key in _siblings(50, seed=1):
        tree.insert(key, pages)
    gc.collect()
    before = _resident_bytes()
    for key in _siblings(leaves):
        tree.insert(key, pages)
    gc.collect()
    print((_resident_bytes() - before) / leaves)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# ---- tokens and pages -----------------------------------------------------------------------


def _random_tokens(rng: np.random.Generator, count: int) -> TokenIds:
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


def _turns(scale: _Scale) -> Iterator[PrefixKey]:
    """Prompt by prompt, the conversations take turns."""
    rng = np.random.default_rng(0)
    histories = [np.asarray(_random_tokens(rng, 1024))] * scale.conversations
    for _ in range(scale.turns):
        for index, history in enumerate(histories):
            histories[index] = np.concatenate([history, _random_tokens(rng, 300)])
            yield PrefixKey.of(histories[index])


def _siblings(count: int, seed: int = 0) -> Iterator[PrefixKey]:
    """Sequences of 512 tokens: 256 that all share, then 256 of their own."""
    rng = np.random.default_rng(seed)
    shared = _random_tokens(rng, 256)
    for index in range(count):
        yield PrefixKey.of(np.concatenate([shared, [index], _random_tokens(rng, 255)]))


def _pages(tokens: int, page_size: int) -> PageIndices:
    return np.arange(tokens // page_size, dtype=np.int32)


# ---- time -----------------------------------------------------------------------------------


def _figure(name: str, page_size: int, seconds: float, suffix: str = "") -> Figure:
    return Figure(name + suffix, page_size, round(seconds * 1e6, 2), TARGETS[name])


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def _no_collection() -> Iterator[None]:
    """As in a server after gc.freeze(): the garbage collector passes over none of what is measured."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
