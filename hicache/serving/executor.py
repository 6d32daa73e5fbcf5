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
from hicache.streams import Event, record_compute


class Model(Protocol):
    """Computes slices. `name` and `dtype` are for reports; `context` is the longest sequence in tokens."""

    name: str
    dtype: str
    vocab: int
    context: int
    eos_ids: tuple[int, ...]

    def forward(self, batch: Sequence[Slice], pool: DevicePool, wait_layer: WaitLayer) -> torch.Tensor:
        """Write the KV of the slices into the pool; logits of each one's last token, float32 (slices, vocab).

        `wait_layer(i)` is called before KV of layer i is read. What it raises ends the step. The logits may be on
        the model's device and not computed yet: whoever moves them to the CPU waits for them.
        """
        ...

    def record(self) -> Event | None:
        """The event behind the compute of the last `forward`; None if it was over when that returned."""
        ...


class TransformerModel:
    """A loaded model on a device, "cpu" or "cuda:N"; weights that are elsewhere are moved there once.

    On CUDA `forward` returns when the work is on the calling thread's current stream, on a CPU when it is done.
    """

    def __init__(self, loaded: LoadedModel, mode: Mode = "exact", device: str = "cpu") -> None:
        geometry = loaded.geometry
        self.name, self.dtype = loaded.name, geometry.dtype
        self.vocab, self.context, self.eos_ids = geometry.vocab, geometry.context, geometry.eos_ids
        self._device = device
        self._transformer = Transformer(geometry, loaded.to(device).tensors, mode)

    def forward(self, batch: Sequence[Slice], pool: DevicePool, wait_layer: WaitLayer) -> torch.Tensor:
        """See `Model`."""
        chunks = [Chunk(part.tokens(), part.table) for part in batch]
        return self._transformer.forward(chunks, pool, wait_layer)

    def record(self) -> Event | None:
        """See `Model`: None on a CPU."""
        return record_compute(self._device)
