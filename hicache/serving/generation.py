"""One request on its way through the engine, and a slice of it that a step computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hicache.requests import Admission, Request
from hicache.serving.metrics import RequestTimer
from hicache.serving.outputs import FinishReason, GenerationHandle, GenerationRequest
from hicache.serving.text_stream import TextStream


class Generation:
    """A request's state. `kv` is what the cache knows of it; its tokens are the prompt and all answered ones.

    KV of the first `done` tokens is computed or restored. Up to `known`, the tokens there were at its admission, it
    is prefilled; then it is decoded. A retracted generation keeps its answer and its place in the queue: it is
    prefilled with both, and goes on where it was.
    """

    def __init__(self, request: GenerationRequest, kv: Request, number: int, stop_ids: frozenset[int]) -> None:
        self.request = request
        self.kv = kv
        self.number = number
        self.stop_ids = stop_ids
        self.namespace = request.namespace.encode()
        self.handle = GenerationHandle(kv.rid)
        self.text: TextStream | None = None
        self.timer = RequestTimer(0.0)
        self.arrival = 0.0
        self.admission: Admission | None = None
        self.restored = False  # the hits of this admission have arrived
        self.done = 0
        self.known = 0

    @property
    def rid(self) -> str:
        return self.kv.rid

    @property
    def length(self) -> int:
        """Tokens so far, of prompt and answer."""
        return len(self.kv.tokens)

    @property
    def produced(self) -> int:
        """Answered tokens so far."""
        return self.length - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that may still be answered."""
        return self.request.max_tokens - self.produced

    @property
    def prefilling(self) -> bool:
        return self.done < self.known

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: the least. Of the running ones, the greatest is retracted first."""
        return -self.request.priority, self.number

    def arrives(self, now: float) -> None:
        """It came in at this time, in seconds."""
        self.arrival, self.timer = now, RequestTimer(now)

    def admitted(self, admission: Admission) -> None:
        """The cache has let it in."""
        self.admission, self.restored = admission, False
        self.done, self.known = admission.prefix_len, self.length

    def released(self) -> None:
        """Its pages are given back; it may be admitted again."""
        self.admission, self.done, self.known = None, 0, 0

    def computed(self, stop: int) -> None:
        """A step has computed its tokens up to `stop`."""
        if not self.restored and self.admission is not None:
            hits = self.admission
            self.timer.served(hits.device_len, hits.host_len, hits.storage_len)
            self.restored = True
        self.timer.ran(self.done, stop)
        self.done = stop

    def load_failed(self) -> bool:
        """True if a load that this request waits for has failed."""
        loads = self.admission.loads if self.admission is not None else ()
        return not self.restored and any(ticket.failed() for ticket in loads)

    def end_of(self, token: int) -> FinishReason | None:
        """Whether the answer ends with `token`, which is its last one."""
        if token in self.stop_ids or (self.text is not None and self.text.stopped):
            return "stop"
        return "length" if self.remaining <= 0 else None


@dataclass(frozen=True)
class Slice:
    """Tokens start .. stop-1 of one generation, computed in one step.

    `table`, int64 (stop,), are the pool slots of its tokens so far. The KV of those before `start` is there, or
    will be once the loads of the admission are.
    """

    generation: Generation
    start: int
    stop: int
    table: torch.Tensor

    def tokens(self) -> torch.Tensor:
        """The tokens to compute, int64."""
        return torch.from_numpy(self.generation.kv.tokens[self.start : self.stop]).to(torch.int64)
