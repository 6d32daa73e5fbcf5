"""The scheduler's side alone: two ranks that report at different times, a disk that is slow, hints, events, resets."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from hicache.errors import ConfigError
from hicache.hashing import StoreIdentity
from hicache.integrations.vllm import identity
from hicache.integrations.vllm.events import EventLog
from hicache.integrations.vllm.hints import Hints, hints_of
from hicache.integrations.vllm.identity import unsupported
from hicache.integrations.vllm.jobs import Hello, Load, Persist, Read, StepPlan, Store, WorkerReport
from hicache.integrations.vllm.scheduler import CacheScheduler
from hicache.integrations.vllm.settings import EngineFacts, config_file, load_settings

BLOCK = 16
FACTS = EngineFacts("tiny", None, "w", "b", BLOCK, layers=2, plane_bytes=BLOCK * 8, num_blocks=64, device="cpu")


@dataclass
class Request:
    request_id: str
    all_token_ids: list[int]
    salt: str = ""
    priority: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: Any = None
    lora_request: Any = None
    skip_reading_prefix_cache: bool = False
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        parent = self.salt.encode()
        for start in range(0, len(self.all_token_ids) - BLOCK + 1, BLOCK):
            parent = sha256(parent + bytes(self.all_token_ids[start : start + BLOCK])).digest()
            self.block_hashes.append(parent)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A scheduler's side, and what ranks would do with its plans."""

    def __init__(self, folder: Path, pages: int = 16, ranks: int = 2, disk: str | None = "") -> None:
        text = f"tiers:\n  - {{tier: host, size: {pages * BLOCK} tokens}}\n"
        if disk is not None:
            text += f"  - {{tier: storage, path: {folder / 'store'}, size: 64MiB{disk}}}\n"
        file = folder / "tiers.yaml"
        file.write_text(text)
        settings = load_settings(file, FACTS)
        own: StoreIdentity = settings.identity()
        self.clock = Clock()
        hellos = [Hello(own, pages + rank) for rank in range(ranks)]
        self.side: Any = CacheScheduler(settings, hellos, EventLog(True, BLOCK), self.clock)
        self.ranks = ranks

    def admit(self, rid: str, tokens: list[int], **more: Any) -> Request:
        request = Request(rid, tokens, **more)
        self.side.added(request)
        return request

    def step(self, *scheduled: tuple[Request, int, int], resumed: tuple[str, ...] = ()) -> StepPlan:
        """`scheduled`: request, tokens computed before, tokens of this step. Blocks are numbered from 100 on."""
        cached = SimpleNamespace(
            req_ids=[request.request_id for request, _, _ in scheduled],
            num_computed_tokens=[computed for _, computed, _ in scheduled],
            resumed_req_ids=set(resumed),
        )
        output = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={request.request_id: tokens for request, _, tokens in scheduled},
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda rid: (list(range(100, 164)),)),
        )
        plan: StepPlan = pickle.loads(pickle.dumps(self.side.step(output)))
        return plan

    def done(self, *results: tuple[int, int], ranks: int | None = None) -> None:
        report = WorkerReport()
        for _ in range(self.ranks if ranks is None else ranks):
            one = WorkerReport()
            for job, result in results:
                one.add(job, 1, result)
            merged = report.aggregate(one)
            assert isinstance(merged, WorkerReport)
            report = merged
        self.side.report(report)

    def store(self, rid: str, tokens: list[int], **more: Any) -> Request:
        """A request that is computed in one step; all ranks store it, on disk as well."""
        request = self.admit(rid, tokens, **more)
        plan = self.step((request, 0, len(tokens)))
        for store in plan.stores:
            self.done((store.job, 1))
        for persist in plan.persists:
            self.done((persist.job, len(persist.pages)))
        self.side.finished(request)
        return request


def blocks(job: Load | Store) -> list[int]:
    return [copy.block for copy in job.copies]


def keys(job: Read | Persist) -> list[bytes]:
    return [named.key for named in job.pages]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def tokens(first: int, blocks: int) -> list[int]:
    return [(first + number) % 256 for number in range(blocks * BLOCK)]


def test_a_block_is_a_hit_once_all_ranks_have_stored_it(rig: Rig) -> None:
    request = rig.admit("a", tokens(0, 3))
    (store,) = rig.step((request, 0, 3 * BLOCK)).stores
    assert blocks(store) == [100, 101, 102] and len({copy.page for copy in store.copies}) == 3
    again = rig.admit("b", [*tokens(0, 3), 1])
    rig.side.disk = False
    assert rig.side.matched(again, 0) == 0
    rig.done((store.job, 1), ranks=1)
    assert rig.side.matched(again, 0) == 0
    rig.done((store.job, 1), ranks=1)
    assert rig.side.matched(again, 0) == 3 * BLOCK
    assert rig.side.matched(again, BLOCK) == 2 * BLOCK


def test_the_result_of_a_job_is_the_smallest_of_its_ranks(rig: Rig) -> None:
    request = rig.admit("a", tokens(0, 2))
    plan = rig.step((request, 0, 2 * BLOCK))
    rig.done((plan.stores[0].job, 1), ranks=1)
    rig.done((plan.stores[0].job, 0), ranks=1)
    rig.done((plan.persists[0].job, 0))
    assert len(rig.side.index) == 0 and rig.side.index.owned_pages() == 0


def test_one_token_is_always_left_to_compute(rig: Rig) -> None:
    rig.store("a", tokens(0, 3))
    assert rig.side.matched(rig.admit("b", tokens(0, 3)), 0) == 2 * BLOCK


def test_chunks_and_decoded_tokens_are_stored_when_their_blocks_are_full(rig: Rig) -> None:
    request = rig.admit("a", tokens(0, 3))
    stored = [rig.step((request, computed, 12)).stores for computed in (0, 12, 24, 36)]
    assert [[blocks(store) for store in stores] for stores in stored] == [[], [[100]], [[101]], [[102]]]


def test_only_what_is_known_to_be_final_is_stored(rig: Rig) -> None:
    """More tokens may be scheduled than are confirmed: drafts, or those of a step that is still under way."""
    request = rig.admit("a", tokens(0, 2))
    (store,) = rig.step((request, 0, 4 * BLOCK)).stores
    assert blocks(store) == [100, 101]


def test_blocks_around_those_on_the_host_are_copied_from_their_own(rig: Rig) -> None:
    """A tail may be on the host without what is before it: new pages are then on both sides of it."""
    request = rig.admit("a", tokens(0, 5))
    assert rig.side.matched(request, 2 * BLOCK) is None
    rig.done((rig.step().lookups[0].job, 2))
    (read,) = rig.step().reads
    rig.side.finished(request)  # aborted; what is read by then is kept
    rig.done((read.job, 2))
    rig.side.events.take()
    assert [entry.start for entry in rig.side.index.entries()] == [2 * BLOCK, 3 * BLOCK]
    again = rig.admit("b", tokens(0, 7), skip_reading_prefix_cache=True)
    (store,) = rig.step((again, 0, 7 * BLOCK)).stores
    page_of = {copy.page: copy.block for copy in store.copies}
    new = [rig.side.index.get(again.block_hashes[number]) for number in (0, 1, 4, 5, 6)]
    assert [page_of.pop(entry.page) for entry in new] == [100, 101, 104, 105, 106] and not page_of
    rig.done((store.job, 1))
    stored = [event for event in rig.side.events.take() if event.medium == "CPU"]
    names = [maybe_convert_block_hash(BlockHash(one)) for one in again.block_hashes]
    assert [event.block_hashes for event in stored] == [names[:2], names[4:]]
    assert [event.parent_block_hash for event in stored] == [None, names[3]]
    assert [event.token_ids for event in stored] == [again.all_token_ids[: 2 * BLOCK], again.all_token_ids[4 * BLOCK :]]


def test_what_a_read_brings_after_a_known_block_is_told_as_what_it_is(rig: Rig) -> None:
    request = rig.admit("a", tokens(0, 6))
    assert rig.side.matched(request, 0) is None
    rig.done((rig.step().lookups[0].job, 5))
    (read,) = rig.step().reads
    one = rig.admit("b", tokens(0, 6), skip_reading_prefix_cache=True)
    (store,) = rig.step((one, 0, BLOCK)).stores  # the first block is stored meanwhile
    rig.done((store.job, 1))
    rig.side.events.take()
    rig.done((read.job, 5))
    (event,) = rig.side.events.take()
    names = [maybe_convert_block_hash(BlockHash(one)) for one in request.block_hashes]
    assert event.block_hashes == names[1:5] and event.parent_block_hash == names[0]
    assert event.token_ids == request.all_token_ids[BLOCK : 5 * BLOCK]


def test_a_load_keeps_its_pages_until_all_ranks_are_done(rig: Rig) -> None:
    rig.store("a", tokens(0, 4))
    request = rig.admit("b", [*tokens(0, 4), 1])
    assert rig.side.matched(request, BLOCK) == 3 * BLOCK
    rig.side.allocated(request, range(200, 205), 3 * BLOCK)
    (load,) = rig.step().loads
    assert blocks(load) == [201, 202, 203] and load.request == "b"
    rig.side.finished(request)  # aborted meanwhile
    rig.side.reset()
    rig.done((load.job, 1), ranks=1)
    assert rig.side.index.owned_pages() == 3  # the first block was free at once
    rig.done((load.job, 1), ranks=1)
    assert rig.side.index.owned_pages() == 0


def test_after_a_failed_load_a_request_computes_and_stores_anew(rig: Rig) -> None:
    rig.store("a", tokens(0, 2))
    request = rig.admit("b", [*tokens(0, 2), 1])
    assert rig.side.matched(request, 0) == 2 * BLOCK
    rig.side.allocated(request, range(200, 203), 2 * BLOCK)
    (load,) = rig.step().loads
    rig.done((load.job, 0))
    assert len(rig.side.index) == 0
    assert rig.side.matched(request, 0) == 0
    (store,) = rig.step((request, 0, 2 * BLOCK + 1)).stores
    assert len(store.copies) == 2


def test_what_the_host_lacks_is_read_from_disk(rig: Rig) -> None:
    request = rig.admit("a", tokens(0, 5))
    assert rig.side.matched(request, BLOCK) is None
    (lookup,) = rig.step().lookups
    assert lookup.keys == request.block_hashes[1:4]
    rig.done((lookup.job, 3), ranks=1)
    rig.done((lookup.job, 2), ranks=1)
    (read,) = rig.step().reads
    assert keys(read) == request.block_hashes[1:3]
    assert rig.side.matched(request, BLOCK) is None
    rig.done((read.job, 2))
    assert rig.side.matched(request, BLOCK) == 2 * BLOCK
    rig.side.allocated(request, range(200, 205), 2 * BLOCK)
    assert rig.side.sources(request) == (0, 2 * BLOCK)
    (load,) = rig.step().loads
    rig.done((load.job, 1))
    rig.side.finished(request)
    assert all(not entry.pins for entry in rig.side.index.entries())


def test_a_slow_disk_costs_no_more_than_its_deadline(rig: Rig) -> None:
    request = rig.admit("a", tokens(0, 5))
    assert rig.side.matched(request, 0) is None
    (lookup,) = rig.step().lookups
    rig.done((lookup.job, 4))
    (read,) = rig.step().reads
    rig.clock.now = 0.3
    assert rig.side.matched(request, 0) == 0
    plan = rig.step((request, 0, 5 * BLOCK))
    assert plan.cancelled == [read.job] and len(plan.stores[0].copies) == 5
    rig.done((read.job, 2))  # late: it is there already
    rig.done((plan.stores[0].job, 1))
    assert rig.side.index.owned_pages() == 5


def test_a_read_waits_for_pages_that_are_about_to_be_free(tmp_path: Path) -> None:
    rig = Rig(tmp_path, pages=4)
    first = rig.admit("a", tokens(0, 4))
    plan = rig.step((first, 0, 4 * BLOCK))
    rig.done((plan.stores[0].job, 1))
    second = rig.admit("b", [*tokens(100, 3), 1])
    assert rig.side.matched(second, 0) is None
    rig.done((rig.step().lookups[0].job, 3))
    assert rig.side.matched(second, 0) is None and not rig.step().reads
    rig.done((plan.persists[0].job, 4))  # until then its pages are in use
    assert rig.side.matched(second, 0) is None
    (read,) = rig.step().reads
    assert len(read.pages) == 3
    rig.done((read.job, 3))
    assert rig.side.matched(second, 0) == 3 * BLOCK


def test_requests_that_miss_the_same_blocks_read_them_once(rig: Rig) -> None:
    first, second = rig.admit("a", tokens(0, 3)), rig.admit("b", tokens(0, 3))
    assert rig.side.matched(first, 0) is None and rig.side.matched(second, 0) is None
    (lookup,) = rig.step().lookups
    rig.done((lookup.job, 2))
    (read,) = rig.step().reads
    rig.done((read.job, 2))
    assert rig.side.matched(second, 0) == rig.side.matched(first, 0) == 2 * BLOCK


def test_what_is_read_when_everything_is_reset_does_not_come_back(rig: Rig) -> None:
    request = rig.admit("a", tokens(0, 3))
    rig.side.matched(request, 0)
    rig.done((rig.step().lookups[0].job, 2))
    (read,) = rig.step().reads
    rig.side.reset()
    rig.done((read.job, 2))
    assert len(rig.side.index) == 0 and rig.side.index.owned_pages() == 0


def test_what_was_computed_before_a_reset_is_not_stored_after_it(rig: Rig) -> None:
    request = rig.admit("a", tokens(0, 3))
    request.num_computed_tokens = 12
    rig.step((request, 0, 12))
    rig.side.reset()
    assert not rig.step((request, 12, 36)).stores
    assert rig.step((request, 0, 48), resumed=("a",)).stores  # preempted, and computed again


def test_room_is_made_leaf_by_leaf_and_a_chain_is_never_cut(tmp_path: Path) -> None:
    rig = Rig(tmp_path, pages=4)
    old = rig.store("a", tokens(0, 4))
    rig.store("b", tokens(100, 2))
    assert [rig.side.index.get(key) is not None for key in old.block_hashes] == [True, True, False, False]
    rig.store("c", tokens(50, 9))  # more than there is
    assert rig.side.index.owned_pages() == len(rig.side.index) <= 4
    assert rig.side.counters["no_room_blocks"] == 5


def test_blocks_are_written_to_disk_with_those_before_them(tmp_path: Path) -> None:
    rig = Rig(tmp_path, disk=", admission: {policy: hits, min_hits: 1}")
    rig.store("a", tokens(0, 3))
    request = rig.admit("b", [*tokens(0, 3), 1])
    rig.side.disk, found = False, rig.side.matched(request, 0)
    rig.side.disk = True
    rig.side.allocated(request, range(200, 204), found)
    (persist,) = rig.step().persists
    assert keys(persist) == request.block_hashes[:3] and persist.parent is None
    rig.done((persist.job, 2))
    assert [rig.side.index.get(key).stored for key in keys(persist)] == [True, True, False]


def test_events_rebuild_what_is_where(rig: Rig) -> None:
    request = rig.store("a", tokens(0, 3))
    cpu, disk = rig.side.events.take()
    assert (cpu.medium, disk.medium) == ("CPU", "DISK")
    assert cpu.token_ids == disk.token_ids == tokens(0, 3) and cpu.parent_block_hash is None
    assert len(cpu.block_hashes) == 3 and cpu.block_size == BLOCK
    rig.side.finished(request)
    rig.store("b", tokens(100, 15))
    removed = [event for event in rig.side.events.take() if type(event).__name__ == "BlockRemoved"]
    assert [event.medium for event in removed] == ["CPU"] * 2
    assert {event.block_hashes[0] for event in removed} == set(cpu.block_hashes[1:])
    rig.side.reset()
    assert [type(event).__name__ for event in rig.side.events.take()] == ["AllBlocksCleared"]


def test_hints_come_from_parameters_and_the_envelope() -> None:
    action = SimpleNamespace(action_type="retain", payload={"priority": 80, "duration": 60})
    request = Request("a", [], priority=3, kv_hints=SimpleNamespace(actions=[action]))
    hints = hints_of(request)  # type: ignore[arg-type]
    assert hints.priority == -3 and hints.retention is not None and hints.retention.priority == 80
    request.kv_transfer_params = {"hicache": {"store": False, "priority": 2, "load": 1, "retain": {"priority": 800}}}
    assert hints_of(request) == Hints(store=False, priority=2, retention=hints.retention)  # type: ignore[arg-type]


def test_several_groups_are_refused_with_a_reason() -> None:
    cache = SimpleNamespace(kv_cache_groups=[1, 2])
    reason = unsupported(SimpleNamespace(), cache)  # type: ignore[arg-type]
    assert reason == "the model has 2 KV cache groups, one is supported"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tiers: []\nmodel: {}\n", "tiers.yaml:2: model: the engine says that itself: remove it, only tiers stay"),
        ("tiers:\n  - {tier: device, size: 1GiB}\n", "tiers.yaml:2: tiers[0]: the device tier is the engine's"),
        ("tiers:\n  - {tier: host, siez: 1GiB}\n", "tiers.yaml:2: tiers[0].siez: unknown key, did you mean 'size'?"),
        ("tiers:\n  - {tier: host, size: 1GiB, write: write_back}\n", "tiers.yaml:2: tiers[0].write: only write"),
        ("tiers: []\n", "tiers.yaml:1: tiers: there is no host tier"),
    ],
)  # fmt: skip
def test_mistakes_in_the_file_name_their_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "tiers.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file, FACTS)
    assert message in str(caught.value)


def test_the_extra_configuration_names_one_file() -> None:
    with pytest.raises(ConfigError, match="unknown key 'confg'"):
        config_file({"confg": "tiers.yaml"})
    with pytest.raises(ConfigError, match="name the file of the tiers"):
        config_file({})


def test_workers_are_told_when_a_step_computes_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    request = rig.admit("a", list(range(40)))
    assert rig.step().idle
    assert not rig.step((request, 0, 40)).idle


class HfConfig:
    architectures = ("LlamaForCausalLM",)
    _commit_hash = None

    def __init__(self, place: str) -> None:
        self.place = place

    def to_dict(self) -> dict[str, Any]:
        return {"hidden_size": 64, "_name_or_path": self.place, "transformers_version": "5"}


def facts_of(folder: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> EngineFacts:
    """Of a rank of vLLM `version` that serves the model in `folder`."""
    group = SimpleNamespace(rank_in_group=0, world_size=1)
    monkeypatch.setattr(identity, "get_tp_group", lambda: group)
    monkeypatch.setattr(identity, "get_pp_group", lambda: group)
    monkeypatch.setattr(vllm, "__version__", version)
    spec = SimpleNamespace(block_size=16, page_size_bytes=4096, dtype="bfloat16", num_kv_heads=2, head_size=64)
    kv_group = SimpleNamespace(kv_cache_spec=spec, layer_names=["l0"])
    cache: Any = SimpleNamespace(kv_cache_groups=[kv_group], kv_cache_layout="NHD", num_blocks=10)
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "FLASH_ATTN"), isa=None)
    model = SimpleNamespace(
        model=str(folder), revision=None, hf_config=HfConfig(str(folder)), quantization=None, dtype="bfloat16", seed=0
    )
    config: Any = SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(load_format="auto"),
        compilation_config=SimpleNamespace(static_forward_context={"l0": layer}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    return identity.worker_facts(config, cache, "cpu")


def test_pages_are_named_by_the_engines_version_and_the_weights_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by where the weights lie, nor by when they were written."""
    for name, content in (("a", b"x"), ("b", b"x"), ("c", b"y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content * 1000)
        os.utime(tmp_path / name / "model.safetensors", (1, 1))
    known = facts_of(tmp_path / "a", "0.32.0", monkeypatch)
    os.utime(tmp_path / "a" / "model.safetensors", (2, 2))
    assert facts_of(tmp_path / "a", "0.32.0", monkeypatch) == known
    assert facts_of(tmp_path / "b", "0.32.0", monkeypatch) == known
    assert facts_of(tmp_path / "c", "0.32.0", monkeypatch).weights_digest != known.weights_digest
    assert facts_of(tmp_path / "a", "0.33.0", monkeypatch).backend != known.backend


def test_pages_of_the_plug_ins_first_form_are_never_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may hold another block's bytes."""
    (tmp_path / "model.safetensors").write_bytes(b"x")
    known = facts_of(tmp_path, "0.32.0", monkeypatch)
    assert identity.BLOCK_FORM > 1
    monkeypatch.setattr(identity, "BLOCK_FORM", 1)
    assert facts_of(tmp_path, "0.32.0", monkeypatch).backend != known.backend
