"""Continuous batching: who is admitted, what a step computes, and who gives way when the device is full.

A step computes at most `step_tokens` tokens:

| order in the batch | gets | why |
|---|---|---|
| 1. requests that decode, by rank | one token each | a long prompt does not stop the answers that others read |
| 2. requests that prefill, by rank | what is left, `chunk_tokens` at most | decoding leaves most of a step unused |

Both go through the model together. Rank: higher priority, then earlier arrival.

Nothing here waits: what finds no room is asked for again in the next step, after `poll` has committed the copies
that make it. Requests that decode or prefill and find none for `patience` steps push out the one of the last rank.
The first in rank is never pushed out by others, and alone it always fits: so it ends, and everybody gets there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import torch

from hicache.cache import HiCache
from hicache.errors import ConfigError
from hicache.requests import RequestManager
from hicache.serving.generation import Generation, Slice
from hicache.serving.queue import QueuePolicy, WaitingQueue, common_pages, peek_prefix

_DECAY = 0.98
"""Of the reserve after a retraction, each step."""


@dataclass(frozen=True)
class SchedulerOptions:
    """Limits in requests, tokens and steps.

    `reserve` is the share of its longest possible answer that a request is promised room for when it is admitted:
    1 never retracts, 0 fills the device with prompts. After a retraction it is 1 for a while. `share_prefills`:
    a request waits while another one prefills whole pages that both begin with. `max_wait` seconds bound how long
    the order of the queue may put a request last. `reuse` off is an engine without cache: nothing is looked up,
    nothing is kept. Raises ConfigError for values out of range.
    """

    policy: QueuePolicy = "fcfs"
    max_running: int = 16
    step_tokens: int = 512
    chunk_tokens: int = 256
    reserve: float = 0.3
    patience: int = 16
    max_wait: float = 10.0
    share_prefills: bool = True
    reuse: bool = True

    def __post_init__(self) -> None:
        if self.policy not in ("fcfs", "lpm", "dfs_weight"):
            raise ConfigError(f"policy is {self.policy!r}, use fcfs, lpm or dfs_weight")
        for name in ("max_running", "step_tokens", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if not 0.0 <= self.reserve <= 1.0:
            raise ConfigError(f"reserve is {self.reserve}, it is a share and must be 0 to 1")


class Scheduler:
    """Queue and running requests over one cache. The thread that owns the cache calls it."""

    def __init__(
        self, cache: HiCache, requests: RequestManager, options: SchedulerOptions, clock: Callable[[], float]
    ) -> None:
        self.running: list[Generation] = []
        self.queue = WaitingQueue(cache.tiers, options.policy, options.max_wait)
        self._cache = cache
        self._requests = requests
        self._options = options
        self._clock = clock
        self._reserve = options.reserve
        self._starved = 0  # steps in a row in which somebody found no room

    # ---- coming and going -------------------------------------------------------------------

    def enqueue(self, generation: Generation) -> None:
        """A request comes, or comes back: begin to look on storage for it."""
        self.queue.add(generation)
        if self._options.reuse:
            self._cache.prefetch(generation.rid, generation.kv.key())

    def abort(self, generation: Generation) -> None:
        """Release a request, whatever it does; nothing more of it is shared."""
        self._requests.abort(generation.kv)
        if generation in self.queue:
            self.queue.remove(generation)
        else:
            self._leave(generation)

    def cut_off(self, generation: Generation) -> None:
        """End a request whose client has gone: what has been computed of its answer stays of use, too."""
        if self._options.reuse and generation in self.running and generation.restored:
            self._requests.cache_unfinished_req(generation.kv)
        self.abort(generation)

    def retract(self, generation: Generation) -> None:
        """Take a running request off the device; it waits again, with its answer so far."""
        self._requests.retract(generation.kv)
        self._leave(generation)
        generation.timer.retractions += 1
        self.enqueue(generation)

    def finish(self, generation: Generation) -> None:
        """Share what a request leaves behind, and release it."""
        if self._options.reuse:
            self._requests.cache_finished_req(generation.kv)
        else:
            self._requests.retract(generation.kv)
        self._leave(generation)

    def recover(self) -> int:
        """Loads have failed: who waited for them is computed anew, the others repeat the step. Returns how many."""
        failed = [generation for generation in self.running if generation.load_failed()]
        for generation in failed:
            generation.timer.failed_loads += 1
            self.retract(generation)
        return len(failed)

    def committed(self, part: Slice) -> None:
        """The KV of a slice is written: share it while its prompt is prefilled, for those that begin alike."""
        generation, prefilled = part.generation, part.generation.prefilling
        self._requests.commit(generation.kv, part.stop)
        generation.computed(part.stop)
        if prefilled and self._options.reuse:
            self._requests.cache_unfinished_req(generation.kv)

    def _leave(self, generation: Generation) -> None:
        self.running.remove(generation)
        generation.released()

    # ---- one step ---------------------------------------------------------------------------

    def schedule(self) -> list[Slice]:
        """Admit who fits, then choose what to compute now. Empty if nothing can be."""
        self._reserve = max(self._reserve * _DECAY, self._options.reserve)
        if not self._starved:
            self._admit()
        plan = self._plan()
        return [self._slice(generation, stop) for generation, stop in plan.items()]

    def _admit(self) -> None:
        if self._full() and not any(self._lower(waiting) for waiting in self.queue.all()[:1]):
            return
        for generation in self.queue.ordered(self._clock()):
            if self._shares_a_prefill(generation):
                continue
            victims = self._victims(generation)
            if victims is None:
                return  # nobody smaller overtakes: the large would starve
            if not self._cache.prefetch_ready(generation.rid):  # asked last, as the answer may end its prefetch
                continue
            for victim in victims:
                self.retract(victim)
            if not self._let_in(generation):
                return

    def _let_in(self, generation: Generation) -> bool:
        admission = self._requests.admit(generation.kv)
        if admission is None:
            return False
        self.queue.remove(generation)
        generation.admitted(admission)
        generation.timer.admitted(self._clock())
        self.running.append(generation)
        return True

    def _shares_a_prefill(self, generation: Generation) -> bool:
        """Does a running request prefill pages that this one needs, and that are not in memory yet?

        Beginning now would compute them twice, in a step that has no more room for it; the other is ahead.
        """
        prefilling = [other for other in self.running if other.prefilling]
        if not (self._options.share_prefills and self._options.reuse and prefilling):
            return False
        key, size = generation.kv.key(generation.length - 1), self._cache.page_size
        shared = max(common_pages(key, other.kv.key(other.known), size) for other in prefilling)
        return shared > peek_prefix(self._cache.tiers, key).pages

    def _victims(self, generation: Generation) -> list[Generation] | None:
        """Running requests of lower priority that have to go so that there is a place; None if there is none."""
        lower, victims = self._lower(generation), list[Generation]()
        while not self._has_place(generation, victims):
            if not lower:
                return None
            victims.append(lower.pop())
        return victims

    def _lower(self, generation: Generation) -> list[Generation]:
        lower = [other for other in self.running if other.request.priority < generation.request.priority]
        return sorted(lower, key=lambda other: other.rank)

    def _full(self, without: int = 0) -> bool:
        return len(self.running) - without >= self._options.max_running

    def _has_place(self, generation: Generation, without: Sequence[Generation]) -> bool:
        """Is there room for the prompt and a share of the answer, beside what the others were promised?

        Free and evictable pages count. Of its cached prefix, pages on the device need no new ones but cannot be
        evicted for it either; pages on the host do need new ones.
        """
        if self._full(len(without)):
            return False
        others = [other for other in self.running if other not in without]
        if not others:
            return True  # alone it fits, or did not get into the queue
        cached = peek_prefix(self._cache.tiers, generation.kv.key(generation.length - 1))
        free = self._cache.tiers.device_allocator.free_pages + sum(other.kv.num_pages for other in without)
        evictable = self._cache.evictable_size() // self._cache.page_size - cached.unlocked_pages
        promised = sum(self._promised_pages(other) - other.kv.num_pages for other in others)
        return self._promised_pages(generation) - cached.device_pages <= free + evictable - promised

    def _promised_pages(self, generation: Generation) -> int:
        answer = ceil(generation.remaining * self._reserve)
        return max(self._cache.layout.pages_of(generation.length + answer), generation.kv.num_pages)

    def _plan(self) -> dict[Generation, int]:
        """Where this step brings whom."""
        plan: dict[Generation, int] = {}
        found_room = True
        for generation in sorted(self.running, key=lambda other: (other.prefilling, other.rank)):
            budget = self._options.step_tokens - sum(stop - other.done for other, stop in plan.items())
            if budget <= 0:
                break
            if generation in self.running:  # may have given way to one before it
                stop = self._next_stop(generation, budget)
                if self._extend(generation, stop, plan):
                    plan[generation] = stop
                else:
                    found_room = False
        self._starved = 0 if found_room else self._starved + 1
        return plan

    def _next_stop(self, generation: Generation, budget: int) -> int:
        """A chunk ends with a page where it can, so that all of it can be shared."""
        stop = min(generation.done + min(budget, self._options.chunk_tokens), generation.length)
        whole = stop // self._cache.page_size * self._cache.page_size
        return whole if stop < generation.length and whole > generation.done else stop

    def _extend(self, generation: Generation, stop: int, plan: dict[Generation, int]) -> bool:
        """Pages up to `stop`; False if the request has to wait for them."""
        if self._requests.extend(generation.kv, stop):
            return True
        if self._cache.in_flight and self._starved < self._options.patience:
            return False  # copies that end may free pages
        last = max(self.running, key=lambda other: other.rank)
        if last is generation:
            return False
        self._starved, self._reserve = 0, 1.0
        plan.pop(last, None)
        self.retract(last)
        return self._requests.extend(generation.kv, stop)

    def _slice(self, generation: Generation, stop: int) -> Slice:
        assert generation.kv.row is not None
        slots = self._requests.req_to_token_pool.token_slots(generation.kv.row, 0, stop)
        return Slice(generation, generation.done, stop, torch.from_numpy(slots))


def waits_of(batch: Sequence[Slice]) -> Callable[[int], None]:
    """What the model calls before it reads a layer: what it computes then comes after the loads of that layer.

    Raises TransferError if a load failed.
    """
    loads = {
        id(load): load
        for part in batch
        if not part.generation.restored and part.generation.admission is not None
        for load in part.generation.admission.loads
    }

    def wait(layer: int) -> None:
        for load in loads.values():
            load.layer_done(layer).gate()

    return wait
