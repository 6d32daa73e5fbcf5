"""Greedy-Dual-Size-Frequency: what is cheap to have again, for the bytes it takes, goes first."""

from __future__ import annotations

from typing import Generic

from hicache.policies.base import E, EntryView, EvictionOrder
from hicache.policies.basic import LazyHeap
from hicache.types import Tier

ATTENTION_TOKENS = 32_768
"""Tokens of context at which attention costs as much as the rest of a prefill, about, for models of 8 B parameters."""
RELOAD_COST = 0.1
"""Reading a token from the tier below, as a share of computing one without context."""


class CostAware(EvictionOrder[E], Generic[E]):
    """GDSF (Cherkasova, 1998) for one tier: the lowest value goes first.

    value = age + uses · cost per token. The cost of an entry is the prefill of its tokens, which grows with what
    is before them, or the reload from a lower tier that has them, if that is less. Bytes are the same for
    every token, so cost per byte is cost per token. `age` is the value of the last victim, so that what is not
    used any more goes in the end.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._heap = LazyHeap[E]()
        self._values: dict[E, float] = {}
        self._age = 0.0

    def value(self, entry: EntryView) -> float:
        recompute = 1 + (entry.start + len(entry.key) / 8) / ATTENTION_TOKENS
        cost = min(recompute, RELOAD_COST) if entry.lowest > self._tier else recompute
        return self._age + (1 + entry.hits) * cost

    def add(self, entry: E) -> None:
        self._values[entry] = self.value(entry)
        self._heap.push(entry, self._values[entry])

    def discard(self, entry: E) -> None:
        del self._values[entry]
        self._heap.remove(entry)

    def touch(self, entry: E) -> None:
        self.add(entry)

    def evicted(self, entry: E) -> None:
        self._age = max(self._age, self._values[entry])
        self.discard(entry)

    def first(self) -> E | None:
        item = self._heap.first()
        return item[1] if item is not None else None

    def __contains__(self, entry: object) -> bool:
        return entry in self._values

    def __len__(self) -> int:
        return len(self._values)
