"""A request in flight, from its admission to its last token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hicache.errors import IntegrityError, TransferError
from hicache.sim.ports import Admission
from hicache.sim.prefix_hash import Hashes, PrefixHasher
from hicache.sim.waiting import Waiting
from hicache.sim.workload import TokenArray


@dataclass(frozen=True)
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
        self.done = self.hit_len = admission.device_len + admission.host_len + admission.storage_len
        if not 0 <= self.hit_len < self.trace.prompt_len:
            raise IntegrityError(
                f"request {self.trace.rid}: {self.hit_len} tokens hit of a prompt of {self.trace.prompt_len}; "
                "at least one must be left to compute"
            )
        self._hasher: PrefixHasher | None = None  # made when hashes are asked for: a replay without bytes never does
        self._hit_hashes: Hashes = np.empty(0, np.uint64)
        self._ahead: PrefixHasher | None = None
        self.hits_ready = False
        self.computed = 0

    @property
    def finished(self) -> bool:
        return self.done == len(self.sequence)

    @property
    def prefilling(self) -> bool:
        return self.done < self.trace.prompt_len

    def next_stop(self, prefill_tokens: int, decode_tokens: int) -> int:
        """Where the next step would bring this request; prefill ends with the prompt."""
        if self.prefilling:
            return min(self.done + prefill_tokens, self.trace.prompt_len)
        return min(self.done + decode_tokens, len(self.sequence))

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
        """The known answer's tokens that a step up to `stop` adds; empty during prefill and for filler."""
        if self.trace.output is None:
            return np.empty(0, np.int32)
        return self.sequence[max(self.done, self.trace.prompt_len) : stop]

    def advance(self, stop: int) -> None:
        """The step up to `stop`, whose hashes were asked for last, has succeeded."""
        self._hasher = self._ahead
        self.computed += stop - self.done
        self.done = stop
        self.hits_ready = True
        self._hit_hashes = self._hit_hashes[:0]

    def load_failed(self) -> bool:
        """True if a load this request waits for has failed."""
        try:
            for ticket in self.admission.loads:
                ticket.query()
        except TransferError:
            return True
        return False
