"""Which host pages are worth a place on storage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hicache.policies.base import EntryView, identity
from hicache.policies.memory import Recent
from hicache.policies.tinylfu import FrequencySketch

AdmissionMode = Literal["all", "hits", "tinylfu", "priority"]

_REMEMBERED_STAYS = 16_384


class _Stays:
    """How often a content came to memory lately, by a sketch; a stay counts once, however often it is asked about."""

    def __init__(self) -> None:
        self._sketch = FrequencySketch()
        self._last = Recent[int, int](_REMEMBERED_STAYS)  # identity -> when its stay began

    def count(self, entry: EntryView) -> int:
        name = identity(entry.key)
        if self._last.pop(name) != entry.created:
            self._sketch.see(name)
        self._last.put(name, entry.created)
        return self._sketch.count(name)


@dataclass(frozen=True)
class AdmissionPolicy:
    """Filter in front of storage. Ancestors that an admitted page needs are stored with it, whatever they are.

    | mode     | admitted                                                                           |
    |----------|------------------------------------------------------------------------------------|
    | all      | every page                                                                         |
    | hits     | a page that was matched `min_hits` times                                           |
    | tinylfu  | that, and a page that came to memory for the `min_hits`-th time within a while     |
    | priority | a page of a request of priority `min_priority` or more                             |
    """

    mode: AdmissionMode = "all"
    min_hits: int = 2
    min_priority: int = 1
    _stays: _Stays = field(default_factory=_Stays, init=False, repr=False, compare=False)

    def admits(self, entry: EntryView) -> bool:
        if self.mode == "hits":
            return entry.hits >= self.min_hits
        if self.mode == "tinylfu":
            return max(entry.hits, self._stays.count(entry)) >= self.min_hits
        return self.mode == "all" or entry.priority >= self.min_priority
