"""When a device page gets its host copy, and a host page its copy on storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WriteMode = Literal["write_through", "write_through_selective", "write_back"]


@dataclass(frozen=True)
class WritePolicy:
    """Write mode of one tier edge.

    | mode                    | copy made                                                |
    |-------------------------|----------------------------------------------------------|
    | write_through           | when the page enters the upper tier                      |
    | write_through_selective | when it is hit for the `selective_hits`-th time          |
    | write_back              | when it is evicted from the upper tier                   |

    Whatever the mode, a page evicted without a copy is written back, except that the selective mode
    lets go of what was never worth a copy.
    """

    mode: WriteMode = "write_through"
    selective_hits: int = 2

    def on_entry(self) -> bool:
        return self.mode == "write_through"

    def on_hit(self, hits: int) -> bool:
        return self.mode == "write_through_selective" and hits >= self.selective_hits

    def on_eviction(self, hits: int) -> bool:
        return self.mode != "write_through_selective" or hits >= self.selective_hits
