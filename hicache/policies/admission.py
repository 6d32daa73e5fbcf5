"""Which host pages are worth a place on storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AdmissionMode = Literal["all", "hits", "priority"]


@dataclass(frozen=True)
class AdmissionPolicy:
    """Filter in front of storage. Ancestors that an admitted page needs are stored with it, whatever they are.

    | mode     | admitted                                               |
    |----------|--------------------------------------------------------|
    | all      | every page                                             |
    | hits     | a page that was matched `min_hits` times               |
    | priority | a page of a request of priority `min_priority` or more |
    """

    mode: AdmissionMode = "all"
    min_hits: int = 2
    min_priority: int = 1

    def admits(self, hits: int, priority: int) -> bool:
        if self.mode == "hits":
            return hits >= self.min_hits
        return self.mode == "all" or priority >= self.min_priority
