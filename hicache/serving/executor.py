"""The model as the engine sees it, so that another one can take its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hicache.device_pool import DevicePool
from hicache.serving.blocks import Chunk, Mode
from hicache.serving.generation import Slice
from hicache.serving.loaded import LoadedModel
from hicache.serving.model import Transformer, WaitLayer
from hicache.streams.base import Event


class Model(Protocol):
    """Computes slices. `name` and `dtype` are for reports; `context` is the longest sequence in tokens."""

    name: str
    dtype: str
    vocab: int
    context: int
    eos_ids: tuple[int, ...]

    def forward(self, batch: Sequence[Slice], pool: DevicePool, wait_layer: WaitLayer) -> torch.Tensor:
        """Write the KV of the slices into the pool; logits of each one's last token, float32 (slices, vocab).

        `wait_layer(i)` is called before KV of layer i is read. What it raises ends the step.
        """
        ...

    def record(self) -> Event | None:
        """The event behind the compute of the last `forward`; None if it was over when that returned."""
        ...


class TransformerModel:
    """A loaded model on the CPU: compute is over when `forward` returns."""

    def __init__(self, loaded: LoadedModel, mode: Mode = "exact") -> None:
        geometry = loaded.geometry
        self.name, self.dtype = loaded.name, geometry.dtype
        self.vocab, self.context, self.eos_ids = geometry.vocab, geometry.context, geometry.eos_ids
        self._transformer = Transformer(geometry, loaded.tensors, mode)

    def forward(self, batch: Sequence[Slice], pool: DevicePool, wait_layer: WaitLayer) -> torch.Tensor:
        """See `Model`."""
        chunks = [Chunk(part.tokens(), part.table) for part in batch]
        return self._transformer.forward(chunks, pool, wait_layer)

    def record(self) -> Event | None:
        """None: an engine with a compute stream records an event on it here."""
        return None
