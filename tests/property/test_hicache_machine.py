"""HiCache on stepped streams over three tiers: hypothesis chooses the interleaving and the failures.

After every step all invariants hold and every byte that a tier calls readable is right.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from hicache.costs import Costs, Link, PrefillCost
from hicache.errors import TransferError
from hicache.policies.admission import AdmissionPolicy
from hicache.policies.eviction import EVICTION_POLICIES
from hicache.policies.retention import retention_range
from hicache.policies.write import WritePolicy
from hicache.prefetch import PrefetchPolicy
from hicache.requests import Admission, Request
from hicache.streams.base import Event
from hicache.testing.rig import Rig, RigOptions
from hicache.testing.stepped import drain
from hicache.transfer.breaker import BreakerState
from hicache.types import Tier

STEMS = ([1] * 13, [1] * 6 + [2] * 7, [3] * 13, [3] * 4 + [1] * 5, [4] * 11)
TAILS = ([], [5], [6, 6, 6])
PROMPTS = st.builds(
    lambda stem, cut, tail: stem[:cut] + tail, st.sampled_from(STEMS), st.integers(7, 13), st.sampled_from(TAILS)
)
PICK = st.integers(0, 5)
STREAMS = ("compute", "d2h", "h2d", "storage")


@dataclass
class Job:
    """A request as a scheduler sees it."""

    req: Request
    admission: Admission | None = None
    chunk: tuple[int, Event] | None = None  # tokens after it, and the event behind its compute
    checked: bool = False
    wrong: list[str] = field(default_factory=list)


class HiCacheMachine(RuleBasedStateMachine):
    options: RigOptions

    @initialize()
    def build(self) -> None:
        self.rig = Rig(self.options)
        self.cache, self.requests = self.rig.cache, self.rig.requests
        self.jobs: list[Job] = []
        self.serial = 0
        self.failures = 0
        self.seen: set[str] = set()

    def pick(self, index: int, admitted: bool) -> Job | None:
        jobs = [job for job in self.jobs if job.req.admitted == admitted]
        return jobs[index % len(jobs)] if jobs else None

    # ---- the scheduler ----------------------------------------------------------------------

    @rule(tokens=PROMPTS, tenant=st.sampled_from([b"", b"", b"other"]))
    def enqueue(self, tokens: list[int], tenant: bytes) -> None:
        if len(self.jobs) >= 5:
            return
        self.serial += 1
        req = Request(f"r{self.serial}", tokens, tenant, priority=self.serial % 3)
        self.cache.prefetch(req.rid, req.key())
        self.jobs.append(Job(req))

    @rule(index=PICK, start=st.integers(0, 8), length=st.integers(1, 8), priority=st.sampled_from([0, 60, 100]))
    def retain(self, index: int, start: int, length: int, priority: int) -> None:
        if self.jobs:
            wish = retention_range(start, start + length, priority, duration=30.0)
            self.cache.retain(self.jobs[index % len(self.jobs)].req.key(), [wish])

    @rule(tokens=PROMPTS, tenant=st.sampled_from([b"", b"", b"other"]), finish=st.booleans())
    def serve(self, tokens: list[int], tenant: bytes, finish: bool) -> None:
        """A request goes as far as it can without waiting for copies down; these stay in flight."""
        if len(self.jobs) >= 5:
            return
        self.enqueue(tokens, tenant)
        job = self.jobs[-1]
        for _ in range(6):
            self.run("storage", 1)
            self.cache.poll()
            self.rig.now += 0.1
        self.try_to_admit(job)
        if not job.req.admitted:
            return
        self.forward_all(job, len(job.req.tokens))
        drain(self.rig.h2d, self.rig.compute)
        if job.chunk is not None and self.landed(job) and finish and self.loads_over(job):
            self.requests.cache_finished_req(job.req)
            self.jobs.remove(job)

    @rule(index=PICK)
    def admit(self, index: int) -> None:
        job = self.pick(index, admitted=False)
        if job is not None:
            self.try_to_admit(job)

    def try_to_admit(self, job: Job) -> None:
        if not self.cache.prefetch_ready(job.req.rid):
            return
        job.admission = self.requests.admit(job.req)
        job.checked = False
        if job.admission is not None:
            assert job.admission.prefix_len == job.req.kv_committed_len < len(job.req.tokens)

    @rule(index=PICK, num_tokens=st.integers(1, 7))
    def compute(self, index: int, num_tokens: int) -> None:
        job = self.pick(index, admitted=True)
        if job is not None and job.chunk is None:
            self.forward_all(job, num_tokens)

    def forward_all(self, job: Job, num_tokens: int) -> None:
        start, stop = job.req.kv_committed_len, min(job.req.kv_committed_len + num_tokens, len(job.req.tokens))
        if stop == start or not self.requests.extend(job.req, stop):
            return
        assert job.admission is not None
        for ticket in job.admission.loads:
            for layer in range(self.rig.layout.num_layers):
                self.rig.compute.wait(ticket.layer_done(layer))
        self.rig.compute.submit(lambda: self.forward(job, start, stop))
        event = self.rig.compute.record()
        job.chunk = (stop, event)
        self.cache.end_step(event)

    def forward(self, job: Job, start: int, stop: int) -> None:
        if not job.checked:
            assert job.admission is not None
            self.rig.check_pages(job.req, job.admission.prefix_len)
            job.checked = True
        self.rig.write_kv(job.req, start, stop)

    @rule(index=PICK)
    def land(self, index: int) -> None:
        job = self.pick(index, admitted=True)
        if job is not None and job.chunk is not None:
            self.landed(job)

    def landed(self, job: Job) -> bool:
        """Share a chunk if its compute is done; retract the request if it failed."""
        assert job.chunk is not None
        stop, event = job.chunk
        try:
            if not event.query():
                return False
        except TransferError as error:
            assert "wrong pages" not in str(error), error
            job.chunk = None
            self.requests.retract(job.req)
            self.rig.compute.clear_error()
            return False
        job.chunk = None
        self.requests.commit(job.req, stop)
        self.requests.cache_unfinished_req(job.req)
        return True

    @rule(index=PICK, how=st.sampled_from(["finish", "retract", "abort"]))
    def leave(self, index: int, how: str) -> None:
        job = self.pick(index, admitted=True)
        if job is None or job.chunk is not None or not self.loads_over(job):
            return
        if how == "finish":
            self.requests.cache_finished_req(job.req)
        elif how == "retract":
            self.requests.retract(job.req)
            self.cache.prefetch(job.req.rid, job.req.key())
            return
        else:
            self.requests.abort(job.req)
        self.jobs.remove(job)

    def loads_over(self, job: Job) -> bool:
        """Finishing needs what the request was admitted with; a request whose load failed is retracted."""
        assert job.admission is not None
        try:
            return all(ticket.query() for ticket in job.admission.loads)
        except TransferError:
            self.requests.retract(job.req)
            return False

    @rule(index=PICK)
    def give_up_waiting(self, index: int) -> None:
        job = self.pick(index, admitted=False)
        if job is not None:
            self.requests.abort(job.req)
            self.jobs.remove(job)

    @rule(send=st.booleans(), commit=st.booleans())
    def step(self, send: bool, commit: bool) -> None:
        if send:
            self.cache.end_step(None)
        if commit:
            self.cache.poll()

    @rule()
    def settle(self) -> None:
        """The world catches up: all copies land and are committed."""
        self.rig.settle()

    @rule(tiers=st.sets(st.sampled_from(list(Tier)), min_size=1), rarely=st.integers(0, 9))
    def flush(self, tiers: set[Tier], rarely: int) -> None:
        if rarely < 9:
            return
        if any(job.req.admitted for job in self.jobs):
            assert not self.cache.flush(tiers).flushed or not any(n.lock_ref for n in self.rig.tiers.tree.nodes())
            return
        report = self.cache.flush(tiers)
        if report.flushed and set(Tier) == tiers:
            assert not list(self.rig.tiers.tree.nodes())

    # ---- the world --------------------------------------------------------------------------

    @rule(which=st.sampled_from(STREAMS), times=st.integers(1, 12))
    def run(self, which: str, times: int) -> None:
        for _ in range(times):
            if which == "storage":
                if self.rig.engine is not None:
                    self.rig.engine.run_next()
            else:
                {"compute": self.rig.compute, "d2h": self.rig.d2h, "h2d": self.rig.h2d}[which].step()

    @rule(seconds=st.sampled_from([0.3, 1.1, 6.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.rig.now += seconds

    @rule(which=st.sampled_from(["d2h", "h2d", "load", "store"]))
    def fail_next(self, which: str) -> None:
        self.failures += 1
        if self.failures % 4:
            return
        backend = self.rig.backend
        if which in ("load", "store"):
            if backend is not None:
                backend.failing_loads += which == "load"
                backend.failing_stores += which == "store"
        else:
            (self.rig.d2h if which == "d2h" else self.rig.h2d).fail_next()

    @rule(which=st.sampled_from(["load", "store"]), rarely=st.integers(0, 5))
    def fail_many(self, which: str, rarely: int) -> None:
        """Enough failures in a row to stop loads or stores, and to fail their first trial."""
        backend = self.rig.backend
        if backend is not None and rarely == 5:
            backend.failing_loads += 4 * (which == "load")
            backend.failing_stores += 4 * (which == "store")

    @rule(rarely=st.integers(0, 3))
    def hang(self, rarely: int) -> None:
        if rarely == 3:
            self.rig.hang()

    @rule()
    def hang_for_long(self) -> None:
        """Two calls, so that not only loads are met, which go before stores: beyond every deadline."""
        self.rig.hang()
        self.rig.hang()
        self.rig.now += 6.0
        self.cache.poll()

    @rule()
    def release(self) -> None:
        self.rig.release()

    @rule(rarely=st.integers(0, 5))
    def clear_elsewhere(self, rarely: int) -> None:
        """Another process flushes the store that it shares with this one."""
        if rarely == 5 and self.rig.backend is not None:
            self.rig.backend.clear()

    @rule(rarely=st.integers(0, 5))
    def detach_or_attach(self, rarely: int) -> None:
        if self.options.storage_pages == 0 or rarely < 5:
            return
        if self.rig.tiers.storage is None:
            self.rig.attach()
            return
        hanging = bool(self.rig.hanging)
        report = self.rig.detach()
        assert report.closed or hanging
        assert not any(node.residency.on_storage for node in self.rig.tiers.tree.nodes())

    @rule(seed=st.integers(0, 1 << 16))
    def burst(self, seed: int) -> None:
        """Thirty random moves, checked one by one: depth that single rules rarely reach."""
        rng = random.Random(seed)
        for _ in range(30):
            stem, tail = rng.choice(STEMS), rng.choice(TAILS)
            tokens, index = stem[: rng.randint(7, 13)] + tail, rng.randrange(6)
            moves = (
                (6, lambda tokens=tokens: self.serve(tokens, rng.choice([b"", b"", b"other"]), rng.random() < 0.8)),
                (2, lambda tokens=tokens: self.enqueue(tokens, b"")),
                (2, lambda index=index: self.admit(index)),
                (1, lambda index=index: self.retain(index, rng.randint(0, 8), rng.randint(1, 8), 100)),
                (2, lambda index=index: self.compute(index, rng.randint(1, 7))),
                (2, lambda index=index: self.land(index)),
                (4, lambda index=index: self.leave(index, rng.choice(["finish", "finish", "retract", "abort"]))),
                (2, lambda index=index: self.give_up_waiting(index)),
                (8, lambda: self.step(rng.random() < 0.7, rng.random() < 0.7)),
                (10, lambda: self.run(rng.choice(STREAMS), rng.randint(1, 12))),
                (1, lambda: self.settle()),
                (1, lambda: self.wait(rng.choice([0.4, 0.4, 0.4, 6.0, 70.0]))),
                (1, lambda: self.fail_next(rng.choice(["d2h", "h2d", "load", "store"]))),
                (0.3, lambda: self.fail_many(rng.choice(["load", "store"]), 5)),
                (1, lambda: self.hang(3)),
                (0.2, lambda: self.hang_for_long()),
                (0.5, lambda: self.release()),
                (0.1, lambda: self.clear_elsewhere(5)),
                (0.1, lambda: self.detach_or_attach(5)),
            )
            rng.choices([move for _, move in moves], [weight for weight, _ in moves])[0]()
            self.check()

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "rig"):
            self.check()

    def check(self) -> None:
        self.rig.check()
        self.look_at_breakers()
        for job in self.jobs:
            if job.req.admitted and job.checked:  # its loads have arrived: all it may read is there
                self.rig.check_pages(job.req, job.req.kv_committed_len)

    def look_at_breakers(self) -> None:
        if self.rig.tiers.storage is None:
            return
        for what, state in zip(("loads", "stores"), self.rig.tiers.storage.engine.states):
            stopped = f"{what} stopped" in self.seen
            if state is BreakerState.OFF:
                self.seen.add(f"{what} stopped")
            elif stopped and state is BreakerState.ON:
                self.seen.add(f"{what} work again")

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for _ in range(3):
            self.rig.settle()
        for job in self.jobs:
            self.requests.abort(job.req)
        self.rig.settle()
        self.rig.check()
        stats = self.cache.stats()
        assert stats.device.free + stats.device.evictable == stats.device.total
        assert stats.device.request_owned == 0
        assert stats.host is not None
        assert stats.host.free + stats.host.evictable == stats.host.total
        outcomes = (stats.demoted_pages, stats.hit_tokens, stats.prefetches, stats.failures, stats.dropped_pages)
        for counts in (*outcomes, stats.load_choices):
            REACHED.update({name: int(count > 0) for name, count in counts.items()})
        REACHED.update([*self.seen, *(["forgotten"] if stats.forgotten_pages else [])])
        self.cache.close(0.0)


REACHED: Counter[str] = Counter()
"""In how many examples each thing happened at least once."""

MUST_REACH = (
    *("device_host", "host_storage", "device", "host", "storage"),  # demotions and hits
    *("complete", "cut_short", "cancelled", "miss"),  # prefetches
    *("copy", "store_failed", "load_failed", "store_timeout", "load_timeout", "store_shed"),  # failures
    *("host_full", "storage_failed", "not_admitted", "tier_degraded"),  # drops
    *("host_loaded", "host_split", "storage_loaded", "declined"),  # load: auto
    *(
        "forgotten",
        "loads stopped",
        "loads work again",
        "stores stopped",
        "stores work again",
    ),  # stores cleared by others, breakers
)


COSTS = Costs(PrefillCost(0.01, 0.005), to_device=Link(60_000.0, 0.01), disk_read=Link(20_000.0, 0.01))
"""A page of the rig takes 25 to 150 ms to compute, by its place in the prompt, and 68 or 205 ms from host or disk."""


def configuration(seed: int) -> RigOptions:
    pick = random.Random(seed).choice
    return RigOptions(
        device_pages=pick([7, 10, 16]),
        host_pages=pick([1, 3, 8, 24]),
        storage_pages=pick([0, 6, 24, 64]),
        eviction=EVICTION_POLICIES[seed % len(EVICTION_POLICIES)],
        host_write=WritePolicy(pick(["write_through", "write_through_selective", "write_back"]), 1),
        storage_write=WritePolicy(pick(["write_through", "write_back"])),
        admission=AdmissionPolicy(pick(["all", "all", "hits", "priority"])),
        prefetch=PrefetchPolicy(pick(["best_effort", "timeout", "wait_complete"]), 1.0),
        queue_aware=pick([False, True]),
        load=pick(["always", "auto", "auto", "never"]),
        costs=COSTS,
    )


def by_way_of_storage(seed: int) -> RigOptions:
    """Little room above a large store, and loads that are weighed: hits on storage are rare elsewhere."""
    small = {"device_pages": 10, "host_pages": 8, "storage_pages": 64, "load": "auto"}
    patient = {"admission": AdmissionPolicy("all"), "prefetch": PrefetchPolicy("wait_complete", 1.0)}
    return replace(configuration(seed), **small, **patient)


def search(options: RigOptions, examples: int) -> None:
    machine = type("Machine", (HiCacheMachine,), {"options": options})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=20, deadline=None))


@pytest.mark.parametrize("seed", range(21))
def test_every_interleaving_keeps_every_byte(seed: int) -> None:
    search(configuration(seed), 20)


def test_long_walks_reach_everything_and_keep_every_byte() -> None:
    """Depth instead of shrinking: the same moves, hundreds in a row, over many configurations."""
    REACHED.clear()
    for seed in range(136):
        machine = HiCacheMachine()
        machine.options = (by_way_of_storage if seed % 3 == 0 else configuration)(1000 + seed)
        if seed % 8 == 7:  # large enough for pages to be evicted ahead of need
            machine.options = replace(machine.options, device_pages=33)
        machine.build()
        for part in range(8):
            machine.burst(seed * 1000 + part)
        machine.teardown()
    rare = [name for name in MUST_REACH if not REACHED[name]]
    assert not rare, f"the walks no longer reach {rare}: {REACHED}"
