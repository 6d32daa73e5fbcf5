"""A replay without bytes does what one with bytes does, and its choice to load or to recompute pays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from hicache.config import CacheConfig, parse_config
from hicache.config.cost_model import costs_of
from hicache.costs import Costs, Link
from hicache.sim.generator import ChatWorkload, generate
from hicache.sim.options import ReplayOptions, SimOptions
from hicache.sim.result import ReplayResult
from hicache.sim.simulate import SimResult, simulate
from hicache.sim.traces import read_trace
from hicache.sim.workload import TraceRequest

SHARED = Path(os.environ.get("HICACHE_SHARED", Path(__file__).parents[3] / "shared"))
TRACES = SHARED / "data"

SMALL = ChatWorkload(
    seed=3, conversations=40, turns=5, system_tokens=192, tool_tokens=384, user_tokens=80, output_tokens=48,
    context_tokens=2048, tenants=2,
)  # fmt: skip

HEAD = """
model: {{name: example/tiny, layers: 2, kv_heads: 1, head_dim: 4, dtype: float16}}
page_size: {page}
costs: {{prefill: {{tokens_per_second: 20000, pairs_per_second: 1000000000}}, decode_step: 5ms}}
tiers:
  - {{tier: device, device: cpu, size: {device} tokens, eviction: {eviction}}}
"""
HOST = "  - {{tier: host, size: {host} tokens, eviction: {eviction}, write: {write}}}\n"
STORE = (
    "  - {{tier: storage, {store}, size: {stored} tokens, write: {stores}, admission: {{policy: {admission}}},\n"
    "     prefetch: {{policy: {prefetch}, deadline: 200ms}}}}\n"
)
DEFAULTS = {
    "page": 16, "device": 4096, "host": 6144, "stored": 24576, "eviction": "lru", "write": "write_through",
    "store": "backend: memory", "stores": "write_through", "admission": "all", "prefetch": "wait_complete",
}  # fmt: skip
LMDB = {"store": "path: {folder}/no-such-store"}

CASES = {
    "device alone": (1, {}),
    "device alone, mru": (1, {"eviction": "mru", "page": 4}),
    "host": (2, {"page": 8}),
    "host, write back": (2, {"write": "write_back", "eviction": "slru"}),
    "host, selective": (2, {"write": "write_through_selective", "page": 4}),
    "host smaller than device": (2, {"host": 1024}),
    "memory": (3, {}),
    "memory, timeout": (3, {"prefetch": "timeout", "page": 8, "write": "write_back"}),
    "lmdb": (3, LMDB),
    "lmdb, slru, small": (3, {**LMDB, "eviction": "slru", "stored": 9000, "page": 8}),
    "lmdb, write back": (3, {**LMDB, "write": "write_back", "stores": "write_back", "stored": 12288}),
    "lmdb, second hit": (3, {**LMDB, "admission": "hits", "write": "write_through_selective"}),
}


def configured(tiers: int, changes: dict[str, object], folder: Path) -> CacheConfig:
    text = "".join((HEAD, HOST, STORE)[:tiers])
    values = {**DEFAULTS, **changes}
    values["store"] = str(values["store"]).format(folder=folder)
    return parse_config(text.format(**values))


def counted(result: ReplayResult) -> ReplayResult:
    """Without what differs between a replay with bytes and one without: its pace, and that bytes were checked."""
    return replace(result, seconds=0.0, checked_pages=0)


def both(config: CacheConfig, trace: Sequence[TraceRequest], costs: Costs, folder: Path) -> tuple[SimResult, SimResult]:
    options = ReplayOptions(verify=True)
    without = simulate(config, trace, costs, SimOptions(options))
    with_bytes = simulate(config, trace, costs, SimOptions(options, bytes_in=folder / "store"))
    return without, with_bytes


@pytest.mark.parametrize("name", CASES)
def test_hits_and_traffic_without_bytes_are_those_with_bytes_and_instant_copies(name: str, tmp_path: Path) -> None:
    config = configured(*CASES[name], tmp_path)
    costs = costs_of(config).instant_copies()
    without, real = both(config, generate(SMALL), costs, tmp_path)
    assert counted(without.replay) == counted(real.replay)
    assert without.timings == real.timings
    assert replace(without.stats, storage_bytes=0) == replace(real.stats, storage_bytes=0)
    assert real.replay.checked_pages * config.page_size == sum(real.replay.hit_tokens.values()) > 0
    assert without.replay.checked_pages == real.replay.wrong_pages == 0
    assert real.replay.hit_tokens["host"] > 0 or len(config.tiers) < 2


@pytest.mark.parametrize("trace", ["sharegpt_4000", "claudecode_60", "mooncake_conversation"])
def test_so_they_are_on_real_traces(trace: str, tmp_path: Path) -> None:
    path = TRACES / f"{trace}.trie.csv.gz"
    if not path.exists():
        pytest.skip("the shared traces are not here")
    sizes: dict[str, object] = {"page": 64, "device": 131072, "host": 262144, "stored": 524288}
    config = configured(3, {**LMDB, **sizes}, tmp_path)
    requests = list(islice(read_trace(path), 60))
    without, real = both(config, requests, costs_of(config).instant_copies(), tmp_path)
    assert counted(without.replay) == counted(real.replay)
    assert without.timings == real.timings and real.replay.requests > 40


def test_the_same_arguments_give_the_same_result(tmp_path: Path) -> None:
    config = configured(3, LMDB, tmp_path)
    first, second = (simulate(config, generate(SMALL), costs_of(config)) for _ in range(2))
    assert first.timings == second.timings and counted(first.replay) == counted(second.replay)
    assert not (tmp_path / "no-such-store").exists(), "a replay without bytes opens no store"


def test_time_is_made_of_what_the_costs_say(tmp_path: Path) -> None:
    """One request that hits nothing, and later the same again, which loads from the host."""
    config = configured(2, {"host": 65536, "page": 16}, tmp_path)
    lone = next(iter(generate(replace(SMALL, conversations=1, agents=0.0))))
    again = replace(lone, rid="again", arrival_ms=lone.arrival_ms + 1e6)
    costs = costs_of(config)
    result = simulate(config, [lone, again], costs)
    first, second = result.timings
    assert first.ttft == pytest.approx(costs.prefill.seconds(0, lone.prompt_len))
    kept = second.device_tokens
    assert second.ttft == pytest.approx(costs.prefill.seconds(kept, lone.prompt_len)) and kept > 0
    assert second.arrived == first.arrived + 1000 and result.virtual_seconds > 1000
    assert result.busy["compute"] == pytest.approx(first.ttft + second.ttft + 2 * 0.005 * (lone.output_len - 1))


# ---- load or recompute ----------------------------------------------------------------------------


def test_a_head_that_is_loaded_and_a_tail_that_is_computed_are_the_right_bytes(tmp_path: Path) -> None:
    """Copies that take time, a link slower than prefill, and a disk about as fast, with bytes and without."""
    config = configured(3, {"stored": 49152}, tmp_path)
    costs = replace(costs_of(config), to_device=Link(500e3, 1e-4), disk_read=Link(700e3, 1e-3))
    config = config.model_copy(update={"load": config.load.model_copy(update={"policy": "auto"})})
    without, real = both(config, generate(SMALL), costs, tmp_path)
    assert real.replay.wrong_pages == 0 and real.replay.checked_pages > 0
    assert counted(without.replay) == counted(real.replay) and without.timings == real.timings
    assert real.stats.load_choices == without.stats.load_choices
    assert real.stats.load_choices["host_split"] > 0 and real.stats.declined_tokens["host"] > 0


CHATS = ChatWorkload(
    seed=1, conversations=150, turns=4, start_gap_ms=700, think_ms=120000, context_tokens=8192, tool_tokens=2048,
    system_prompts=12, user_tokens=512, output_tokens=64,
)  # fmt: skip
PRICED = """
model: {{name: Qwen/Qwen3-8B}}
page_size: 16
costs:
  prefill: {{flops: 400TFLOPS}}
  decode_step: 10ms
  disk_read: {{bandwidth: {disk}}}
  disk_write: {{bandwidth: 100GB/s}}
load: {{policy: {policy}}}
tiers:
  - {{tier: device, device: cpu, size: 65536 tokens}}
  - {{tier: host, size: 98304 tokens}}
  - {{tier: storage, backend: memory, size: 4000000 tokens, queue: 100GiB, load_deadline: 1h,
     prefetch: {{policy: wait_complete, deadline: 1h}}}}
"""


def priced(disk: str, policy: str, speed: float) -> SimResult:
    config = parse_config(PRICED.format(disk=disk, policy=policy))
    return simulate(config, generate(CHATS), costs_of(config), SimOptions(ReplayOptions(), speed))


@pytest.mark.parametrize("speed", [0.5, 2.0])
@pytest.mark.parametrize("disk", ["50MB/s", "5GB/s"])
def test_weighing_is_no_worse_than_always_loading_or_never(disk: str, speed: float) -> None:
    always, never, auto = (priced(disk, policy, speed) for policy in ("always", "never", "auto"))
    assert auto.ttft.mean <= always.ttft.mean
    assert auto.ttft.mean <= never.ttft.mean
    assert sum(never.replay.hit_tokens.values()) == never.replay.hit_tokens["device"]
    choices = auto.stats.load_choices
    if disk == "50MB/s":
        assert auto.ttft.mean < always.ttft.mean / 2 and auto.stats.saved_seconds > 0
        assert choices.get("storage_recomputed", 0) + choices.get("storage_split", 0) > choices.get("storage_loaded", 0)
        assert auto.stats.declined_tokens["storage"] > 0
    else:
        assert auto.ttft.mean < never.ttft.mean and choices["storage_loaded"] > 10
