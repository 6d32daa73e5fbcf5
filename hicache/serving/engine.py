"""The engine: requests in, tokens out, one step at a time. Synchronous; one thread, which owns the cache.

    step:  poll → admit → plan → forward → sample → commit, share → end_step

docs/serving.md tells what each call is for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from hicache.build import build_requests
from hicache.cache import HiCache
from hicache.errors import BadInput, CapacityError, IntegrityError, TransferError
from hicache.hashing import RequestNamespace
from hicache.requests import Request
from hicache.serving.executor import Model
from hicache.serving.generation import Generation, Slice
from hicache.serving.metrics import RunMetrics
from hicache.serving.outputs import (
    EngineStopped,
    FinishReason,
    GenerationHandle,
    GenerationRequest,
    TokenOutput,
    logprobs_of,
)
from hicache.serving.report import cache_json, evidence
from hicache.serving.sampling import sample
from hicache.serving.scheduler import Scheduler, SchedulerOptions, waits_of
from hicache.serving.text_stream import TextStream
from hicache.serving.tokenizer import Tokenizer

_IDLE_SECONDS = 0.0002

LogitsHook = Callable[[str, int, torch.Tensor], None]
"""Called with a request's name, the number of tokens before the next one, and its logits (vocab,)."""


@dataclass(frozen=True)
class Surroundings:
    """What the engine takes from outside. `clock` gives seconds; `sleep` is called when a step finds nothing to do.

    `seed` is only reported. `on_logits` sees every row of logits that a token is chosen from.
    """

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    on_logits: LogitsHook | None = None
    seed: int | None = None


class Engine:
    """Serves requests with one model over one cache; the cache is closed with it.

    The same calls in the same order give the same tokens: whatever copies do meanwhile, and whatever else runs.
    """

    def __init__(
        self,
        model: Model,
        cache: HiCache,
        options: SchedulerOptions | None = None,
        tokenizer: Tokenizer | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.options = options = options or SchedulerOptions()
        self.tokenizer = tokenizer
        self._around = surroundings or Surroundings()
        self._requests = build_requests(cache, options.max_running)
        self._scheduler = Scheduler(cache, self._requests, options, self._around.clock)
        self._generations: dict[str, Generation] = {}
        self._numbers = count()
        self._ended: list[TokenOutput] = []  # outside of a step: aborts
        self._closed = False
        self.metrics = RunMetrics(self._around.clock(), cache.tiers.device_allocator.num_pages)

    # ---- requests ---------------------------------------------------------------------------

    @property
    def max_tokens(self) -> int:
        """The longest prompt with its answer, in tokens, that the device pool and the model can take."""
        return min(self.cache.tiers.device_allocator.num_pages * self.cache.page_size, self.model.context)

    def check(self, request: GenerationRequest) -> None:
        """Raise BadInput or CapacityError if the request can never run. Safe from any thread."""
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.model.vocab:
            raise BadInput(f"prompt: a token is outside the vocabulary of {self.model.vocab}")
        if request.stop and self.tokenizer is None:
            raise BadInput("stop: strings need a tokenizer, use stop_ids")
        longest = len(request.prompt) + request.max_tokens
        if longest > self.model.context:
            raise BadInput(f"prompt and max_tokens take {longest} tokens, the model's context is {self.model.context}")
        if longest > self.max_tokens:
            raise CapacityError(
                f"prompt and max_tokens take {longest} tokens, the device tier has room for {self.max_tokens}: "
                "ask for less or give it a larger size"
            )

    def add_request(self, request: GenerationRequest) -> GenerationHandle:
        """Queue a request. Raises BadInput or CapacityError, as `check`, and BadInput if its name is in use."""
        if self._closed:
            raise EngineStopped("the engine is closed")
        self.check(request)
        number = next(self._numbers)
        rid = request.rid if request.rid is not None else f"request-{number}"
        if rid in self._generations:
            raise BadInput(f"rid: there is a request {rid!r} already")
        generation = Generation(request, self._kv_request(request, rid, number), number, self._stop_ids(request))
        if self.tokenizer is not None:
            generation.text = TextStream(self.tokenizer, request.stop)
        generation.arrives(self._around.clock())
        self._generations[rid] = generation
        self._scheduler.enqueue(generation)
        return generation.handle

    def _kv_request(self, request: GenerationRequest, rid: str, number: int) -> Request:
        namespace = request.namespace
        if not self.options.reuse:  # one that nobody has: nothing is found, whatever the cache holds
            namespace = RequestNamespace(extra_key=f"no reuse {number}")
        return Request(rid, request.prompt, namespace.encode(), request.priority)

    def _stop_ids(self, request: GenerationRequest) -> frozenset[int]:
        ends = () if request.ignore_eos else self.model.eos_ids
        return request.sampling.stop_ids | frozenset(ends)

    def abort(self, rid: str) -> bool:
        """End a request in whatever state it is; the next step tells. False if there is none of this name."""
        generation = self._generations.get(rid)
        if generation is None:
            return False
        self._scheduler.cut_off(generation)
        self._ended.append(self._end(generation, None, "abort"))
        return True

    @property
    def has_work(self) -> bool:
        """Are there requests, or ends of some that no step has told yet?"""
        return bool(self._generations or self._ended)

    # ---- steps ------------------------------------------------------------------------------

    def step(self) -> list[TokenOutput]:
        """Advance whom there is room for. Returns what came out, in no step more than one token of a request.

        Without anything to compute it sleeps for a moment and returns: copies in flight need to be polled.
        """
        self.cache.poll()
        batch = self._scheduler.schedule()
        outputs, self._ended = self._ended, []
        if not batch:
            self.cache.end_step(None)
            self._around.sleep(_IDLE_SECONDS)
            return outputs
        try:
            logits = self.model.forward(batch, self.cache.tiers.device_pool, waits_of(batch))
        except TransferError:
            if not self._scheduler.recover():
                raise
            self.cache.end_step(self.model.record())  # what was computed until then still goes to pages freed now
            return outputs
        compute = self.model.record()
        if any(part.stop == part.generation.length for part in batch):
            logits = logits.cpu()  # tokens are to be chosen: the step's only wait for a GPU's compute
        for part, row in zip(batch, logits):
            outputs += self._advance(part, row)
        self.cache.end_step(compute)
        self.metrics.step(self._used_pages(), len(self._scheduler.running))
        return outputs

    def _advance(self, part: Slice, logits: torch.Tensor) -> list[TokenOutput]:
        """Commit a slice; if it ends with the last known token, choose the next one."""
        generation = part.generation
        self._scheduler.committed(part)
        if part.stop < generation.length:
            return []
        if self._around.on_logits is not None:
            self._around.on_logits(generation.rid, part.stop, logits)
        try:
            token = sample(logits, generation.request.sampling, generation.produced)
        except BadInput as error:  # KV that gives no numbers is not shared
            self._scheduler.abort(generation)
            return [self._end(generation, None, "error", error=str(error))]
        return [self._answer(generation, token, logits)]

    def _answer(self, generation: Generation, token: int, logits: torch.Tensor) -> TokenOutput:
        self._requests.append(generation.kv, [token])
        generation.timer.token(self._around.clock())
        text = ""
        if generation.text is not None and token not in generation.stop_ids:
            text = generation.text.push(token)
        wanted = generation.request.top_logprobs
        logprobs = None if wanted is None else logprobs_of(logits, token, wanted)
        reason = generation.end_of(token)
        if reason is not None:
            self._scheduler.finish(generation)
            return self._end(generation, token, reason, text=text, logprobs=logprobs)
        output = TokenOutput(generation.rid, token, text, logprobs)
        generation.handle.take(output)
        return output

    def _end(
        self, generation: Generation, token: int | None, reason: FinishReason, *, text: str = "", **more: Any
    ) -> TokenOutput:
        """The last output of a request, which has been released."""
        del self._generations[generation.rid]
        if generation.text is not None:
            text += generation.text.finish()
        prompt, now = len(generation.request.prompt), self._around.clock()
        metrics = generation.timer.result(generation.rid, prompt, generation.produced, now)
        self.metrics.ended(metrics, reason)
        output = TokenOutput(generation.rid, token, text, finish_reason=reason, metrics=metrics, **more)
        generation.handle.take(output)
        return output

    def _used_pages(self) -> int:
        """Device pages that requests own or have locked."""
        return self.cache.protected_size() // self.cache.page_size + self.cache.tiers.request_pages

    # ---- runs -------------------------------------------------------------------------------

    def generate(self, requests: Iterable[GenerationRequest], stall_seconds: float = 60.0) -> list[GenerationHandle]:
        """Serve all requests to their end. Raises CapacityError if no token comes for `stall_seconds`."""
        handles = [self.add_request(request) for request in requests]
        moved = self._around.clock()
        while any(not handle.finished for handle in handles):
            steps = self.metrics.steps
            if self.step() or self.metrics.steps > steps:
                moved = self._around.clock()
            elif self._around.clock() - moved > stall_seconds:
                raise CapacityError(f"nothing moved for {stall_seconds:g} s: {self.cache.stats().device}")
        return handles

    @property
    def waiting(self) -> int:
        """Requests that wait to be admitted."""
        return len(self._scheduler.queue)

    @property
    def running(self) -> int:
        """Requests that are admitted."""
        return len(self._scheduler.running)

    def settle(self, timeout: float = 60.0) -> None:
        """Let copies land and account for every page, while there is no request.

        Raises CapacityError if they take longer than `timeout` seconds, IntegrityError if a page is lost, counted
        twice, or kept by nobody's lock.
        """
        self.cache.end_step(None)
        if not self.cache.drain(timeout):
            raise CapacityError(f"copies are still in flight after {timeout:g} s")
        self.cache.check_integrity()
        use = self.cache.stats().device
        if not self._generations and (use.protected or use.request_owned or use.free + use.evictable != use.total):
            raise IntegrityError(f"the device pool at the end: {use}")

    def report(self) -> dict[str, Any]:
        """Plain values: what was run (`evidence`), what came of it (`run`), what the cache did (`cache`)."""
        return {
            "evidence": evidence(self.model, self.cache, self.options, self._around.seed),
            "run": self.metrics.to_json(self._around.clock()),
            "cache": cache_json(self.cache.stats()),
        }

    def close(self, timeout: float = 60.0) -> list[TokenOutput]:
        """Abort what is left and close the cache, which brings to storage what only memory has. Idempotent."""
        if self._closed:
            return []
        self._closed = True
        for rid in list(self._generations):
            self.abort(rid)
        self.cache.close(timeout)
        outputs, self._ended = self._ended, []
        return outputs
