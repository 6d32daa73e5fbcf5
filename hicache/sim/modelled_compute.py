"""Compute in virtual time: how long the steps of a scheduler take, by a model of prefill and decode."""

from __future__ import annotations

from hicache.costs import Costs
from hicache.sim.compute import Compute, PageChecks
from hicache.sim.ports import LoadTicket
from hicache.sim.running import Chunk
from hicache.sim.virtual import VirtualStream
from hicache.streams.base import Event


class ModelledCompute:
    """Compute that takes modelled time on a virtual stream, after `inner`, which may have bytes to write.

    A step takes its prefill (PrefillCost of each chunk), or its decode if that is longer: answers advance together, a
    token in each `decode_step` seconds, in the same passes over the weights as the prefill. Layers are equal; layer i
    waits for layer i of the loads that the step needs, so that a load goes on beside the layers before it.
    """

    def __init__(self, stream: VirtualStream, costs: Costs, num_layers: int, inner: Compute | None = None) -> None:
        self._stream = stream
        self._costs = costs
        self._num_layers = num_layers
        self._inner = inner
        self._checks = PageChecks()
        self._prefill = 0.0
        self._decoded = 0
        self._loads: list[LoadTicket] = []

    @property
    def checks(self) -> PageChecks:
        return self._inner.checks if self._inner is not None else self._checks

    def submit(self, chunk: Chunk) -> None:
        """See Compute."""
        if self._inner is not None:
            self._inner.submit(chunk)
        running = chunk.running
        if running.prefilling:
            self._prefill += self._costs.prefill.seconds(running.done, chunk.stop)
        elif chunk.stop - running.done > self._decoded:
            self._decoded = chunk.stop - running.done
        if not running.hits_ready:
            self._loads.extend(running.admission.loads)

    def record(self) -> Event:
        """See Compute."""
        if self._inner is not None:
            self._inner.record()
        seconds = max(self._prefill, self._decoded * self._costs.decode_step)
        if self._loads:
            for layer in range(self._num_layers):
                for ticket in self._loads:
                    self._stream.wait(ticket.layer_done(layer))
                self._stream.spend(seconds / self._num_layers)
        else:
            self._stream.spend(seconds)
        self._prefill, self._decoded = 0.0, 0
        self._loads.clear()
        return self._stream.record()

    def commit(self) -> None:
        """See Compute."""
        if self._inner is not None:
            self._inner.commit()

    def discard(self) -> None:
        """See Compute."""
        if self._inner is not None:
            self._inner.discard()
