"""Replays a trace the way a serving scheduler drives the cache, as fast as it goes.

    step:  poll → take in and prefetch → admit → plan chunks → compute → commit, insert → end_step

Compute runs on a stream of its own, and so do the copies: what is checked here is the ordering between them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice

from hicache.errors import CapacityError, IntegrityError, TransferError
from hicache.sim.compute import Compute
from hicache.sim.ports import ReplayTarget
from hicache.sim.result import ReplayResult, Tally
from hicache.sim.running import Chunk, Running
from hicache.sim.standin import StandIn
from hicache.sim.waiting import WaitingQueue
from hicache.sim.workload import TraceRequest

Progress = Callable[[int, int], None]
"""Called with (finished requests, their prompt tokens) whenever a request has finished."""

_IDLE_SECONDS = 0.0002
_PATIENCE = 50
"""Idle steps in which copies may still free pages, before a running request is retracted for room."""


@dataclass(frozen=True)
class ReplayOptions:
    """Limits of the scheduler, in requests and tokens.

    `window` waiting requests prefetch ahead. A step computes at most `step_tokens`, of one request at most
    `chunk_tokens` of its prompt or `decode_tokens` of its answer. Without any progress for
    `stall_seconds` the replay is given up.
    """

    verify: bool = False
    max_running: int = 8
    window: int = 16
    chunk_tokens: int = 2048
    step_tokens: int = 8192
    decode_tokens: int = 16
    stall_seconds: float = 60.0


def _ignore_progress(requests: int, prompt_tokens: int) -> None:
    pass


class Replay:
    """One replay of one trace. The calling thread is the scheduler: it alone touches the cache."""

    def __init__(
        self, target: ReplayTarget, poison_byte: int, options: ReplayOptions, progress: Progress = _ignore_progress
    ) -> None:
        self._target = target
        self._cache = target.cache
        self._requests = target.requests
        self._options = options
        self._progress = progress
        standin = StandIn(target.pool.layout, poison_byte)
        self._compute = Compute(target.requests, target.pool, target.compute, standin, options.verify)
        self._running: list[Running] = []
        self._tally = Tally()
        self._starved = False
        self._idle_steps = 0
        self._last_progress = 0.0

    def run(self, trace: Iterable[TraceRequest]) -> ReplayResult:
        """Serve all requests, then let everything in flight land and check the cache.

        Raises IntegrityError if tokens or pages do not add up, CapacityError if nothing moves any more.
        """
        queue = WaitingQueue(trace, self._target, self._options.window)
        queue.refill()
        with _frozen_heap():
            start = self._last_progress = time.perf_counter()
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
        batch = self._plan()
        if not batch:
            self._idle(queue)
        elif self._execute(batch, queue):
            self._idle_steps = 0
            self._last_progress = time.perf_counter()

    def _admit(self, queue: WaitingQueue) -> None:
        busy = {running.trace.session for running in self._running if running.trace.session is not None}
        room = self._options.max_running - len(self._running)
        for waiting in islice(queue.candidates(busy), room):
            admission = self._requests.admit(waiting.request)
            if admission is None:
                return
            queue.remove(waiting)
            self._running.append(Running(waiting, admission))

    def _plan(self) -> list[Chunk]:
        """Chunks of this step, the oldest request first. Those without room wait."""
        batch: list[Chunk] = []
        budget = self._options.step_tokens
        self._starved = False
        for running in self._running:
            if not budget:
                break
            chunk = min(budget, self._options.chunk_tokens)
            stop = running.next_stop(chunk, min(budget, self._options.decode_tokens))
            if self._requests.extend(running.request, stop):
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
        running, request = chunk.running, chunk.running.request
        prefilled = running.prefilling
        answered = running.answered(chunk.stop)
        if len(answered):
            self._requests.append(request, answered)
        if prefilled or len(answered):  # KV of filler is never committed, so it never enters the tree
            self._requests.commit(request, chunk.stop)
        running.advance(chunk.stop)
        if running.finished:
            self._finish(running)
        elif prefilled:
            self._requests.cache_unfinished_req(request)

    def _finish(self, running: Running) -> None:
        self._requests.cache_finished_req(running.request)
        self._running.remove(running)
        self._tally.finished(running)
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
        self._tally.retracted(running)
        queue.put_back(running.trace)

    def _idle(self, queue: WaitingQueue) -> None:
        """Nothing could be computed: wait for copies, and when they do not help make room."""
        self._cache.end_step(None)
        self._idle_steps += 1
        if self._starved and len(self._running) > 1 and self._idle_steps >= _PATIENCE:
            self._retract(self._running[-1], queue)
            self._idle_steps = 0
        self._check_stall()
        time.sleep(_IDLE_SECONDS)

    def _check_stall(self) -> None:
        stalled = time.perf_counter() - self._last_progress
        if stalled > self._options.stall_seconds:
            raise CapacityError(
                f"nothing moved for {stalled:.0f} s: {len(self._running)} requests run, "
                f"{self._target.allocator.available_size()} device tokens are free, "
                f"{self._cache.evictable_size()} evictable, {self._cache.protected_size()} protected"
            )

    def _settle(self) -> None:
        """Let copies land, then account for every page: with no request left, each is free or in the tree."""
        self._cache.end_step(None)
        if not self._cache.drain(self._options.stall_seconds):
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
        return ReplayResult(
            **asdict(self._tally),
            skipped=tuple(queue.skipped),
            demoted_pages=dict(stats.demoted_pages),
            dropped_pages=dict(stats.dropped_pages),
            moved_bytes=dict(stats.moved_bytes),
            failures=dict(stats.failures),
            storage_loads=stats.storage_loads,
            storage_stores=stats.storage_stores,
            checked_pages=self._compute.checked_pages,
            wrong_pages=self._compute.wrong_pages,
            poisoned_pages=self._compute.poisoned_pages,
            wrong_examples=tuple(self._compute.wrong_examples),
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
