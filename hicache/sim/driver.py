"""Replays a trace the way a serving scheduler drives the cache.

    step:  poll → take in and prefetch → admit → plan chunks → compute → commit, insert → end_step

Compute runs on a stream of its own, and so do the copies: what is checked here is the ordering between them. Time
is the machine's, or a virtual one in which everything takes as long as a model says (`sim.timeline`).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice

from hicache.errors import CapacityError, IntegrityError, TransferError
from hicache.sim.compute import Compute, PageChecks, StandInCompute
from hicache.sim.options import ReplayOptions
from hicache.sim.ports import ReplayTarget
from hicache.sim.result import Accounts, ReplayResult, RequestTiming, Tally
from hicache.sim.running import Chunk, Running
from hicache.sim.standin import StandIn
from hicache.sim.timeline import RealTime, Timeline
from hicache.sim.waiting import WaitingQueue
from hicache.sim.workload import TraceRequest

Progress = Callable[[int, int], None]
"""Called with (finished requests, their prompt tokens) whenever a request has finished."""

_PATIENCE = 0.01
"""Seconds in which copies may still free pages, before a running request is retracted for room."""


def ignore_progress(requests: int, prompt_tokens: int) -> None:
    pass


class Replay:
    """One replay of one trace. The calling thread is the scheduler: it alone touches the cache.

    `compute` is the model's place. Requests stop waiting for their prefetch after `deadline` seconds, None if the
    cache has none.
    """

    def __init__(
        self,
        target: ReplayTarget,
        compute: Compute,
        timeline: Timeline,
        options: ReplayOptions,
        progress: Progress = ignore_progress,
        deadline: float | None = None,
    ) -> None:
        self._target = target
        self._cache = target.cache
        self._requests = target.requests
        self._options = options
        self._progress = progress
        self._compute = compute
        self._timeline = timeline
        self._deadline = deadline
        self._timings: list[RequestTiming] = []
        self._first_tokens: dict[str, float] = {}
        self._running: list[Running] = []
        self._tally = Tally()
        self._accounts = Accounts(self._tally)
        self._starved = False
        self._starved_since: float | None = None
        self._last_progress = 0.0

    @classmethod
    def with_bytes(
        cls, target: ReplayTarget, poison_byte: int, options: ReplayOptions, progress: Progress = ignore_progress
    ) -> Replay:
        """A replay in the machine's time, with a stand-in for the model that writes bytes and checks them."""
        standin = StandIn(target.pool.layout, poison_byte)
        compute = StandInCompute(target.requests, target.pool, target.compute, standin, options.verify)
        return cls(target, compute, RealTime(), options, progress)

    def run(self, trace: Iterable[TraceRequest]) -> ReplayResult:
        """Serve all requests, then let everything in flight land and check the cache.

        Raises IntegrityError if tokens or pages do not add up, CapacityError if nothing moves any more.
        """
        queue = WaitingQueue(trace, self._target, self._options.window, self._timeline, self._deadline)
        queue.refill()
        with _frozen_heap():
            start = time.perf_counter()
            self._last_progress = self._timeline.now()
            while queue or self._running:
                self._step(queue)
            self._settle()
            seconds = time.perf_counter() - start
        return self._result(queue, seconds)

    def _step(self, queue: WaitingQueue) -> None:
        self._cache.poll()
        queue.refill()
        if not self._starved:
            self._admit(queue)
        batch = self._plan(self._decode_tokens(queue))
        if not batch:
            self._idle(queue)
        elif self._execute(batch, queue):
            self._starved_since = None
            self._last_progress = self._timeline.now()

    @property
    def timings(self) -> Sequence[RequestTiming]:
        """Of each request, in the order in which they finished; seconds of the timeline."""
        return self._timings

    def _admit(self, queue: WaitingQueue) -> None:
        room = self._options.max_running - len(self._running)
        if not room or not queue.waiting:
            return
        busy = {running.trace.session for running in self._running if running.trace.session is not None}
        for waiting in islice(queue.candidates(busy), room):
            admission = self._requests.admit(waiting.request)
            if admission is None:
                return
            queue.remove(waiting)
            self._running.append(Running(waiting, admission, self._timeline.now()))

    def _decode_tokens(self, queue: WaitingQueue) -> int:
        """Tokens of each answer in this step: few while others prefill, one while others only wait to be let in."""
        mixed = self._options.mixed_decode_tokens
        if mixed is None:
            return self._options.decode_tokens
        if any(running.prefilling for running in self._running):
            return mixed
        return 1 if queue.waiting else self._options.decode_tokens

    def _plan(self, decode: int) -> list[Chunk]:
        """Chunks of this step, the oldest request first. Those without room wait."""
        batch: list[Chunk] = []
        budget, most = self._options.step_tokens, self._options.chunk_tokens
        extend = self._requests.extend
        self._starved = False
        for running in self._running:
            if not budget:
                break
            stop = running.next_stop(min(budget, most), min(budget, decode))
            if extend(running.request, stop):
                batch.append(Chunk(running, stop))
                budget -= stop - running.done
            else:
                # nobody new is let in before those that run have room again
                self._starved = True
        return batch

    def _execute(self, batch: list[Chunk], queue: WaitingQueue) -> bool:
        """Compute a batch and commit it; False if a load failed and the step has to be taken again."""
        for chunk in batch:
            self._compute.submit(chunk)
        event = self._compute.record()
        try:
            event.synchronize()
        except TransferError as error:
            self._recover(error, queue)
            return False
        self._compute.commit()
        for chunk in batch:
            self._commit(chunk)
        self._cache.end_step(event)
        return True

    def _commit(self, chunk: Chunk) -> None:
        running, stop = chunk.running, chunk.stop
        prefilled = running.prefilling
        if prefilled or running.answer_known:  # KV of filler is never committed, so it never enters the tree
            self._commit_tokens(running, stop)
        running.advance(stop)
        if prefilled and not running.prefilling:
            self._first_tokens.setdefault(running.trace.rid, self._timeline.now())
        if running.finished:
            self._finish(running)
        elif prefilled:
            self._requests.cache_unfinished_req(running.request)

    def _commit_tokens(self, running: Running, stop: int) -> None:
        if running.answer_known and len(answered := running.answered(stop)):
            self._requests.append(running.request, answered)
        self._requests.commit(running.request, stop)

    def _finish(self, running: Running) -> None:
        self._requests.cache_finished_req(running.request)
        self._running.remove(running)
        hits = self._accounts.finished(running)
        first_token = self._first_tokens.pop(running.trace.rid)
        self._timings.append(RequestTiming.of(running, hits, first_token, self._timeline.now()))
        self._progress(self._tally.requests, self._tally.prompt_tokens)

    def _recover(self, error: TransferError, queue: WaitingQueue) -> None:
        """A load failed: who waited for it is computed anew. Everybody else repeats the step."""
        self._compute.discard()
        failed = [running for running in self._running if running.load_failed()]
        if not failed:
            raise error
        self._tally.failed_loads += len(failed)
        for running in failed:
            self._retract(running, queue)
        self._cache.end_step(None)
        self._check_stall()

    def _retract(self, running: Running, queue: WaitingQueue) -> None:
        self._requests.retract(running.request)
        self._running.remove(running)
        self._accounts.retracted(running)
        queue.put_back(running.trace, running.arrived)

    def _idle(self, queue: WaitingQueue) -> None:
        """Nothing could be computed: wait for copies, and when they do not help make room."""
        self._cache.end_step(None)
        if self._starved and len(self._running) > 1:
            now = self._timeline.now()
            if self._starved_since is None:
                self._starved_since = now
                self._timeline.wake(_PATIENCE)
            elif now - self._starved_since >= _PATIENCE:
                self._retract(self._running[-1], queue)
                self._starved_since = None
                return
        self._check_stall()
        self._timeline.idle()

    def _check_stall(self) -> None:
        if self._timeline.stalled(self._last_progress, self._options.stall_seconds):
            seconds = self._timeline.now() - self._last_progress
            raise CapacityError(
                f"nothing moved for {seconds:.0f} s: {len(self._running)} requests run, "
                f"{self._target.allocator.available_size()} device tokens are free, "
                f"{self._cache.evictable_size()} evictable, {self._cache.protected_size()} protected"
            )

    def _settle(self) -> None:
        """Let copies land, then account for every page: with no request left, each is free or in the tree."""
        self._cache.end_step(None)
        if not self._timeline.settle(self._cache, self._options.stall_seconds):
            raise CapacityError(f"copies are still in flight after {self._options.stall_seconds:.0f} s")
        self._cache.check_integrity()
        free, evictable = self._target.allocator.available_size(), self._cache.evictable_size()
        total = self._target.pool.num_pages * self._target.pool.layout.page_size
        difference = free + evictable - total
        if difference or self._cache.protected_size():
            raise IntegrityError(
                f"device pool of {total} tokens at the end: {free} free + {evictable} evictable ({difference:+d}), "
                f"{self._cache.protected_size()} protected by no request"
            )

    def _result(self, queue: WaitingQueue, seconds: float) -> ReplayResult:
        stats = self._cache.stats()
        checks: PageChecks = self._compute.checks
        return ReplayResult(
            **asdict(self._tally),
            skipped=tuple(queue.skipped),
            demoted_pages=dict(stats.demoted_pages),
            dropped_pages=dict(stats.dropped_pages),
            moved_bytes=dict(stats.moved_bytes),
            failures=dict(stats.failures),
            storage_loads=stats.storage_loads,
            storage_stores=stats.storage_stores,
            checked_pages=checks.checked,
            wrong_pages=checks.wrong,
            poisoned_pages=checks.poisoned,
            wrong_examples=tuple(checks.examples),
            seconds=seconds,
        )


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Keep the garbage collector off everything made before now, so that its pauses stay short."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
