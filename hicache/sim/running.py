"""A request in flight, from its admission to its last token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hicache.errors import IntegrityError
from hicache.sim.ports import Admission
from hicache.sim.prefix_hash import Hashes, PrefixHasher
from hicache.sim.waiting import Waiting
from hicache.sim.workload import TokenArray


@dataclass(slots=True)
class Chunk:
    """Tokens of one request computed in one step: those from its progress up to `stop`."""

    running: Running
    stop: int


class Running:
    """Progress of one admitted request, in tokens with final KV. Changes only when a step has succeeded."""

    def __init__(self, waiting: Waiting, admission: Admission, now: float) -> None:
        self.arrived, self.admitted = waiting.arrived, now
        self.trace = waiting.trace
        self.request = waiting.request
        self.sequence = waiting.sequence
        self.admission = admission
        self.prompt_len, self.length = self.trace.prompt_len, len(self.sequence)
        self.answer_known = self.trace.output is not None  # else filler stands for it
        self.hit_len = admission.device_len + admission.host_len + admission.storage_len
        if not 0 <= self.hit_len < self.prompt_len:
            raise IntegrityError(
                f"request {self.trace.rid}: {self.hit_len} tokens hit of a prompt of {self.prompt_len}; "
                "at least one must be left to compute"
            )
        self._hasher: PrefixHasher | None = None  # made when hashes are asked for: a replay without bytes never does
        self._hit_hashes: Hashes = np.empty(0, np.uint64)
        self._ahead: PrefixHasher | None = None
        self.hits_ready = False
        self.computed = 0
        self._reach(self.hit_len)

    def _reach(self, done: int) -> None:
        """The only place where progress changes, and what follows from it: both are asked for all the time."""
        self.done = done
        self.prefilling = done < self.prompt_len
        self.finished = done == self.length

    def next_stop(self, prefill_tokens: int, decode_tokens: int) -> int:
        """Where the next step would bring this request; prefill ends with the prompt."""
        if self.prefilling:
            return min(self.done + prefill_tokens, self.prompt_len)
        return min(self.done + decode_tokens, self.length)

    @property
    def hit_hashes(self) -> Hashes:
        """Hashes of the tokens that were hit, until the first step has succeeded."""
        self._hashed_hits()
        return self._hit_hashes

    def hashes(self, stop: int) -> Hashes:
        """Hashes of the tokens from `done` up to `stop`; they count once `advance` says so."""
        self._ahead = self._hashed_hits().fork()
        return self._ahead.extend(self.sequence[self.done : stop])

    def _hashed_hits(self) -> PrefixHasher:
        if self._hasher is None:
            self._hasher = PrefixHasher(self.trace.namespace)
            self._hit_hashes = self._hasher.extend(self.sequence[: self.hit_len])
        return self._hasher

    def answered(self, stop: int) -> TokenArray:
        """The answer's tokens that a step up to `stop` adds; empty during prefill."""
        return self.sequence[max(self.done, self.prompt_len) : stop]

    def advance(self, stop: int) -> None:
        """The step up to `stop`, whose hashes were asked for last, has succeeded."""
        self._hasher = self._ahead
        self.computed += stop - self.done
        self._reach(stop)
        if not self.hits_ready:
            self.hits_ready = True
            self._hit_hashes = self._hit_hashes[:0]

    def load_failed(self) -> bool:
        """True if a load this request waits for has failed."""
        return any(ticket.failed() for ticket in self.admission.loads)
