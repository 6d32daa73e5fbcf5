"""The stand-in of the replay as a model: no arithmetic, all of the cache's work, and every byte of KV is checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hicache.device_pool import DevicePool
from hicache.host_pool.pool import POISON_BYTE
from hicache.layout import KVLayout
from hicache.serving.generation import Slice
from hicache.serving.model import WaitLayer
from hicache.sim.prefix_hash import PrefixHasher
from hicache.sim.standin import StandIn
from hicache.streams.base import Event

_MAX_EXAMPLES = 8
_CERTAINTY = 8.0
"""Logit of the token that follows, where the others have 0: sampling takes another one now and then."""


class StandInModel:
    """KV and next token are functions of namespace and tokens. All whole pages before a slice are checked at every
    step; where one is wrong, so is the token. `wrong_pages` counts them, `examples` tells of the first few.
    """

    name = "stand-in"

    def __init__(self, layout: KVLayout, vocab: int = 512, context: int = 1 << 20) -> None:
        self.dtype, self.vocab, self.context = layout.dtype, vocab, context
        self.eos_ids: tuple[int, ...] = (vocab - 1,)
        self.wrong_pages = 0
        self.examples: list[str] = []
        self._layout = layout
        self._standin = StandIn(layout, POISON_BYTE)

    def forward(self, batch: Sequence[Slice], pool: DevicePool, wait_layer: WaitLayer) -> torch.Tensor:
        """See `executor.Model`."""
        for layer in range(self._layout.num_layers):
            wait_layer(layer)
        return torch.stack([self._compute(part, pool) for part in batch])

    def record(self) -> Event | None:
        """None: all is written when `forward` returns."""
        return None

    def _compute(self, part: Slice, pool: DevicePool) -> torch.Tensor:
        generation, size = part.generation, self._layout.page_size
        pages = (part.table[::size] // size).to(torch.int32).numpy()
        hashes = PrefixHasher(generation.namespace).extend(generation.kv.tokens[: part.stop])
        whole = part.start // size
        planes = range(self._layout.num_planes)
        known = hashes[: whole * size]
        wrong = self._standin.count_wrong(pool, pages[:whole], known, planes)
        if wrong:
            self._explain(generation.rid, next(iter(self._standin.explain(pool, pages[:whole], known, planes))))
        self.wrong_pages += wrong
        self._standin.write(pool, pages, part.start, hashes[part.start :])
        row = torch.zeros(self.vocab)
        row[(int(hashes[-1]) + bool(wrong)) % self.vocab] = _CERTAINTY
        return row

    def _explain(self, rid: str, line: str) -> None:
        if len(self.examples) < _MAX_EXAMPLES:
            self.examples.append(f"request {rid}: {line}")
