from __future__ import annotations

import gc
import io
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from rich.console import Console

from hicache.errors import CapacityError, IntegrityError, TransferError
from hicache.layout import KVLayout
from hicache.plane_access import HostPlanes
from hicache.sim.driver import Replay
from hicache.sim.generator import ChatWorkload, generate
from hicache.sim.options import ReplayOptions
from hicache.sim.ports import ReplayTarget
from hicache.sim.report import to_json, to_table
from hicache.sim.result import ReplayResult
from hicache.sim.workload import BlockPrompt, TokenPrompt, TraceRequest
from hicache.streams.base import Event, Stream
from hicache.types import PageIndices, PrefixKey, TokenIds

POISON = 0xDB
LAYOUT = KVLayout(2, 1, 8, 4)
CHATS = generate(
    ChatWorkload(
        seed=1, conversations=12, turns=4, system_tokens=24, tool_tokens=16, user_tokens=12, output_tokens=10,
        context_tokens=200, tenants=2,
    )
)  # fmt: skip
OPTIONS = ReplayOptions(verify=True, max_running=4, window=6, chunk_tokens=16, step_tokens=40, decode_tokens=3)


@dataclass
class EagerEvent:
    failed: bool = False

    def query(self) -> bool:
        if self.failed:
            raise TransferError("the copy failed")
        return True

    def synchronize(self) -> None:
        self.query()


class EagerStream(Stream):
    """Runs work at once; poisoned by the failure of an event, as every stream is."""

    def __init__(self) -> None:
        self.failed = False

    def submit(self, work: Callable[[], None]) -> None:
        if not self.failed:
            work()

    def record(self) -> Event:
        return EagerEvent(self.failed)

    def wait(self, event: Event) -> None:
        try:
            event.query()
        except TransferError:
            self.failed = True

    def clear_error(self) -> None:
        self.failed = False

    def close(self) -> None:
        pass


@dataclass
class Ticket:
    fails: bool = False

    def layer_done(self, layer: int) -> Event:
        return EagerEvent(self.fails and layer == 1)

    def failed(self) -> bool:
        return self.fails


@dataclass
class Admission:
    device_len: int
    host_len: int
    storage_len: int
    loads: list[Ticket]


@dataclass(eq=False)
class Request:
    rid: str
    tokens: TokenIds
    namespace: bytes
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    """Leading pages that are the tree's."""
    committed: int = 0

    def key(self, page: int) -> bytes:
        return self.namespace + b"|" + np.asarray(self.tokens[: (page + 1) * LAYOUT.page_size], np.int32).tobytes()


@dataclass
class Pool:
    layout: KVLayout
    planes: list[npt.NDArray[np.uint8]]

    @property
    def num_pages(self) -> int:
        return len(self.planes[0])

    @property
    def access(self) -> HostPlanes:
        return HostPlanes(self.planes)


@dataclass
class Stats:
    demoted_pages: dict[str, int] = field(default_factory=lambda: {"device_host": 0, "host_storage": 0})
    dropped_pages: dict[str, int] = field(default_factory=dict)
    moved_bytes: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    storage_loads: str | None = None
    storage_stores: str | None = None


class FakeCache:
    """Two tiers over dictionaries: just enough of HiCache, RequestManager and the allocator for a scheduler."""

    def __init__(self, num_pages: int) -> None:
        self.pool = Pool(LAYOUT, [np.full((num_pages, LAYOUT.plane_bytes), POISON, np.uint8) for _ in range(4)])
        self.free = list(range(num_pages))
        self.device: dict[bytes, int] = {}
        self.locks: dict[int, int] = {}
        self.host: dict[bytes, npt.NDArray[np.uint8]] = {}
        self.log: list[tuple[str, str]] = []
        self.counters = Stats()
        self.failing_loads = 0
        self.failed: list[bytes] = []
        self.corrupt: Callable[[npt.NDArray[np.uint8]], None] | None = None
        self.not_ready: dict[str, int] = {}

    def _alloc(self) -> int | None:
        if not self.free:
            key = next((key for key, page in self.device.items() if not self.locks[page]), None)
            if key is None:
                return None
            page = self.device.pop(key)
            self.host[key] = np.stack([plane[page] for plane in self.pool.planes])
            self.counters.demoted_pages["device_host"] += 1
            self._release(page)
        return self.free.pop(0)

    def _release(self, page: int) -> None:
        for plane in self.pool.planes:
            plane[page] = POISON
        self.free.append(page)

    def prefetch(self, rid: str, key: PrefixKey) -> None:
        self.log.append(("prefetch", rid))

    def prefetch_ready(self, rid: str) -> bool:
        self.not_ready[rid] = self.not_ready.get(rid, 0) - 1
        return self.not_ready[rid] < 0

    def admit(self, req: Request) -> Admission | None:
        limit = (len(req.tokens) - 1) // LAYOUT.page_size
        keys = [req.key(page) for page in range(limit)]
        on_device = next((n for n, key in enumerate(keys) if key not in self.device), limit)
        found = next((n for n, key in enumerate(keys) if key not in self.device and key not in self.host), limit)
        for key in keys[:on_device]:
            self._share(req, self.device[key])
        failed = found > on_device and self.failing_loads > 0
        for key in keys[on_device:found]:
            if key in self.device:
                self._share(req, self.device[key])
                continue
            if (page := self._alloc()) is None:
                self.retract(req)
                return None
            self._load(key, page, failed)
            self.device[key] = page
            self.locks[page] = 0
            self._share(req, page)
        self.log.append(("admit", req.rid))
        size = LAYOUT.page_size
        req.committed = found * size
        loads = [Ticket(failed)] if found > on_device else []
        if failed:
            self.failing_loads -= 1
            self.failed = keys[on_device:found]
        return Admission(on_device * size, (found - on_device) * size, 0, loads)

    def _load(self, key: bytes, page: int, failed: bool) -> None:
        values = self.host[key].copy()
        if self.corrupt is not None:
            self.corrupt(values)
        for plane, value in zip(self.pool.planes, values, strict=True):
            plane[page] = POISON if failed else value

    def _share(self, req: Request, page: int) -> None:
        self.locks[page] += 1
        req.pages.append(page)
        req.shared += 1

    def extend(self, req: Request, upto_tokens: int) -> bool:
        while len(req.pages) < LAYOUT.pages_of(upto_tokens):
            if (page := self._alloc()) is None:
                return False
            req.pages.append(page)
        return True

    def append(self, req: Request, token_ids: TokenIds) -> None:
        req.tokens = np.concatenate([req.tokens, token_ids])

    def commit(self, req: Request, upto_tokens: int) -> None:
        assert req.committed < upto_tokens <= len(req.tokens)
        assert upto_tokens <= len(req.pages) * LAYOUT.page_size
        req.committed = upto_tokens

    def cache_unfinished_req(self, req: Request) -> None:
        for number in range(req.shared, req.committed // LAYOUT.page_size):
            key, page = req.key(number), req.pages[number]
            if key in self.device:
                self._release(page)
            page = req.pages[number] = self.device.setdefault(key, page)
            self.locks[page] = self.locks.get(page, 0) + 1
            req.shared += 1

    def cache_finished_req(self, req: Request) -> None:
        self.cache_unfinished_req(req)
        self.log.append(("finish", req.rid))
        self._give_up(req)

    def retract(self, req: Request) -> None:
        self.log.append(("retract", req.rid))
        self._give_up(req)

    def _give_up(self, req: Request) -> None:
        for page in req.pages[: req.shared]:
            self.locks[page] -= 1
        for page in req.pages[req.shared :]:
            self._release(page)
        req.pages, req.shared, req.committed = [], 0, 0

    def pages(self, req: Request) -> PageIndices:
        return np.array(req.pages, np.int32)

    def poll(self) -> None:
        """The pages of a failed load are dropped from both tiers."""
        for key in self.failed:
            self._release(self.device.pop(key))
            self.host.pop(key, None)
        self.failed = []

    def end_step(self, after: Event | None) -> None:
        assert after is None or after.query()

    def available_size(self) -> int:
        return len(self.free) * LAYOUT.page_size

    def evictable_size(self) -> int:
        return sum(not self.locks[page] for page in self.device.values()) * LAYOUT.page_size

    def protected_size(self) -> int:
        return sum(self.locks[page] > 0 for page in self.device.values()) * LAYOUT.page_size

    def stats(self) -> Stats:
        return self.counters

    def check_integrity(self) -> None:
        self.log.append(("check", ""))

    def drain(self, timeout: float) -> bool:
        return True


def target(cache: FakeCache) -> ReplayTarget:
    size = len(cache.pool.planes[0]) * LAYOUT.page_size
    return ReplayTarget(cache, cache, Request, cache, cache.pool, EagerStream(), size)


def replay(
    cache: FakeCache, trace: list[TraceRequest] = CHATS, options: ReplayOptions = OPTIONS, **more: Any
) -> ReplayResult:
    return Replay.with_bytes(target(cache), POISON, options, **more).run(trace)


def prompt_only(count: int, length: int, output_len: int = 0) -> list[TraceRequest]:
    """Requests that share nothing."""
    return [
        TraceRequest(f"r{i}", 0.0, None, TokenPrompt(np.full(length, i, np.int32)), output_len) for i in range(count)
    ]


def test_every_request_is_served_and_every_hit_is_right() -> None:
    cache = FakeCache(120)
    result = replay(cache)
    assert result.requests == len(CHATS)
    assert result.prompt_tokens == sum(request.prompt_len for request in CHATS)
    assert result.output_tokens == sum(request.output_len for request in CHATS)
    assert result.hit_tokens["device"] > 0
    assert result.hit_tokens["host"] > 0
    assert result.checked_pages * LAYOUT.page_size == sum(result.hit_tokens.values())
    assert result.wrong_pages == result.retractions == result.recomputed_tokens == 0
    assert result.demoted_pages == cache.counters.demoted_pages
    assert cache.log[-1] == ("check", "")


def test_a_turn_hits_all_whole_pages_of_the_turn_before() -> None:
    history = np.arange(30, dtype=np.int32)
    turns = [
        TraceRequest("a", 0.0, "s", TokenPrompt(history[:9]), 7, history[9:16]),
        TraceRequest("b", 1.0, "s", TokenPrompt(history[:21]), 1, history[21:22]),
    ]
    result = replay(FakeCache(20), turns)
    # KV of the last answered token is never computed: 15 tokens are there, 12 of them in whole pages
    assert result.hit_tokens == {"device": 12, "host": 0, "storage": 0}
    assert result.computed_tokens == 30 - 12


def test_one_token_is_always_left_to_compute() -> None:
    same = [TraceRequest(str(i), 0.0, "s", TokenPrompt(np.arange(16, dtype=np.int32)), 0) for i in range(2)]
    assert replay(FakeCache(20), same).hit_tokens["device"] == 12


def test_a_hit_of_the_whole_prompt_is_refused() -> None:
    class Generous(FakeCache):
        def admit(self, req: Request) -> Admission | None:
            return Admission(len(req.tokens), 0, 0, [])

    with pytest.raises(IntegrityError, match="at least one must be left"):
        replay(Generous(20))


def test_turns_of_a_session_never_overlap_and_nobody_overtakes() -> None:
    cache = FakeCache(200)
    replay(cache)
    sessions = {request.rid: request.session for request in CHATS}
    open_sessions: list[str | None] = []
    admitted = []
    most = 0
    for action, rid in cache.log:
        if action == "admit":
            assert sessions[rid] not in open_sessions
            open_sessions.append(sessions[rid])
            admitted.append(rid)
        elif action == "finish":
            open_sessions.remove(sessions[rid])
        most = max(most, len(open_sessions))
    assert most > 1
    for session in set(sessions.values()):
        assert [rid for rid in admitted if sessions[rid] == session] == [
            request.rid for request in CHATS if request.session == session
        ]


def test_no_more_requests_run_than_allowed() -> None:
    for limit in (1, 3):
        cache = FakeCache(200)
        replay(cache, prompt_only(9, 20), replace(OPTIONS, max_running=limit))
        running = most = 0
        for action, _ in cache.log:
            running += {"admit": 1, "finish": -1}.get(action, 0)
            most = max(most, running)
        assert most == limit


def test_prefetch_runs_a_window_ahead_and_is_waited_for() -> None:
    cache = FakeCache(200)
    trace = prompt_only(8, 20)
    cache.not_ready["r0"] = 4
    replay(cache, trace, replace(OPTIONS, window=3, max_running=1))
    assert cache.log[:3] == [("prefetch", f"r{i}") for i in range(3)]
    assert [rid for action, rid in cache.log if action == "admit"][:2] == ["r1", "r2"]
    assert sum(action == "prefetch" for action, _ in cache.log) == 8


def test_chunks_and_decode_steps_keep_to_their_limits() -> None:
    steps: list[list[int]] = [[]]

    class Watched(FakeCache):
        def commit(self, req: Request, upto_tokens: int) -> None:
            steps[-1].append(upto_tokens - req.committed)
            super().commit(req, upto_tokens)

        def end_step(self, after: Event | None) -> None:
            steps.append([])

    replay(Watched(200))
    assert max(max(step, default=0) for step in steps) == OPTIONS.chunk_tokens
    assert max(sum(step) for step in steps) == OPTIONS.step_tokens


def test_an_unknown_answer_takes_pages_and_is_never_committed() -> None:
    committed, pages = [0], [0]

    class Watched(FakeCache):
        def commit(self, req: Request, upto_tokens: int) -> None:
            committed.append(upto_tokens)
            super().commit(req, upto_tokens)

        def cache_finished_req(self, req: Request) -> None:
            pages.append(len(req.pages))
            super().cache_finished_req(req)

    cache = Watched(50)
    result = replay(cache, prompt_only(1, 10, output_len=21))
    assert max(committed) == 10
    assert max(pages) == LAYOUT.pages_of(10 + 20)
    assert result.output_tokens == 21
    assert cache.evictable_size() == 8


def test_wrong_bytes_are_counted_and_explained() -> None:
    def flip(values: npt.NDArray[np.uint8]) -> None:
        values[3, 17] ^= 4

    cache = FakeCache(120)
    cache.corrupt = flip
    result = replay(cache)
    assert result.wrong_pages > 0
    assert result.poisoned_pages == 0
    assert "plane 3 (layer 1 V)" in result.wrong_examples[0]
    assert len(result.wrong_examples) <= 8
    assert replay(FakeCache(120)).checked_pages == result.checked_pages


def test_a_poisoned_page_is_counted_as_such() -> None:
    def poison(values: npt.NDArray[np.uint8]) -> None:
        values[:] = POISON

    cache = FakeCache(120)
    cache.corrupt = poison
    result = replay(cache)
    assert result.poisoned_pages == result.wrong_pages > 0
    assert "poison" in result.wrong_examples[0]


def test_without_verify_nothing_is_checked() -> None:
    cache = FakeCache(120)
    cache.corrupt = lambda values: values.fill(0)
    result = replay(cache, options=replace(OPTIONS, verify=False))
    assert result.checked_pages == result.wrong_pages == 0


def test_a_failed_load_is_a_recompute() -> None:
    cache = FakeCache(120)
    cache.failing_loads = 3
    result = replay(cache, options=replace(OPTIONS, max_running=1))
    assert result.failed_loads == result.retractions == 3
    assert result.requests == len(CHATS)
    assert result.wrong_pages == 0


def test_another_failure_of_the_compute_stream_is_not_swallowed() -> None:
    broken = target(FakeCache(50))
    assert isinstance(broken.compute, EagerStream)
    broken.compute.failed = True
    with pytest.raises(TransferError):
        Replay.with_bytes(broken, POISON, OPTIONS).run(CHATS)


def test_the_youngest_is_retracted_when_nothing_can_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.sim.driver._PATIENCE", 2)
    cache = FakeCache(12)
    result = replay(cache, prompt_only(4, 44))
    assert result.requests == 4
    assert result.retractions > 0
    # what they find again is their own, so it is no hit, and it was computed once
    assert result.computed_tokens == result.prompt_tokens and result.recomputed_tokens == 0
    assert next(entry for entry in cache.log if entry[0] == "retract") != ("retract", "r0")
    assert [rid for action, rid in cache.log if action == "finish"] == ["r0", "r1", "r2", "r3"]


def test_a_request_that_can_never_fit_is_skipped_with_a_line() -> None:
    trace = [*prompt_only(1, 30), *prompt_only(2, 10)]
    result = replay(FakeCache(5), trace)
    assert result.requests == 2
    (line,) = result.skipped
    assert str(line).startswith("request r0 takes 30 tokens and the device tier has room for 20")


def test_only_requests_that_cannot_fit_is_no_hang() -> None:
    result = replay(FakeCache(2), prompt_only(3, 30))
    assert (result.requests, len(result.skipped)) == (0, 3)


def test_skipped_requests_are_misses() -> None:
    """Else a device tier on which only the short requests run would seem the better one."""
    trace = [*prompt_only(1, 30), *prompt_only(1, 10), *prompt_only(1, 10)]
    result = replay(FakeCache(5), trace)
    hits = sum(result.hit_tokens.values())
    assert result.skipped_tokens == 30 and result.hit_rate == hits / 50
    assert to_json(result)["skipped_tokens"] == 30
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(to_table(result, verified=False))
    assert re.search(r"of requests too long to run +30 +60.0%", console.export_text())


def test_a_standstill_is_an_error_not_a_hang() -> None:
    cache = FakeCache(20)
    cache.not_ready["r0"] = 10**9
    with pytest.raises(CapacityError, match="nothing moved"):
        replay(cache, prompt_only(1, 10), replace(OPTIONS, stall_seconds=0.05))


@pytest.mark.parametrize("sign", ["-", "+"])
def test_a_page_that_is_not_accounted_for_is_found_at_the_end(sign: str) -> None:
    class Leaky(FakeCache):
        def cache_finished_req(self, req: Request) -> None:
            super().cache_finished_req(req)
            if req.rid == CHATS[-1].rid:
                self.free = self.free[1:] if sign == "-" else [*self.free, 0]

    with pytest.raises(IntegrityError, match=rf"\({'-' if sign == '-' else '[+]'}4\)"):
        replay(Leaky(400))


def test_what_does_not_land_is_an_error() -> None:
    class Stuck(FakeCache):
        def drain(self, timeout: float) -> bool:
            return False

    with pytest.raises(CapacityError, match="still in flight"):
        replay(Stuck(200))


def test_tokens_that_do_not_sum_are_an_error() -> None:
    result = replay(FakeCache(120))
    with pytest.raises(IntegrityError, match=r"[+]1 of the"):
        replace(result, computed_tokens=result.computed_tokens + 1)


def test_progress_is_told_at_every_finish() -> None:
    calls: list[tuple[int, int]] = []
    result = replay(FakeCache(120), progress=lambda requests, tokens: calls.append((requests, tokens)))
    assert [requests for requests, _ in calls] == list(range(1, len(CHATS) + 1))
    assert calls[-1] == (result.requests, result.prompt_tokens)


def test_the_heap_is_frozen_only_while_replaying() -> None:
    before, during = gc.get_freeze_count(), []
    replay(FakeCache(120), progress=lambda requests, tokens: during.append(gc.get_freeze_count()))
    assert min(during) > 1000
    assert gc.get_freeze_count() <= before


def test_block_traces_are_replayed_too() -> None:
    trace = [
        TraceRequest(str(i), 0.0, None, BlockPrompt(np.arange(5, dtype=np.int32), 8, 40, 10_000 + i), 3)
        for i in range(4)
    ]
    result = replay(FakeCache(60), trace, replace(OPTIONS, max_running=1))
    assert result.hit_tokens["device"] == 3 * 36
