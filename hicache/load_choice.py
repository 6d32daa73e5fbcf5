"""Load or recompute: what of a prefix that a lower tier has is worth its way up, by bandwidths and the prefill model.

From the host, layer by layer beside the compute of what follows:

| loading all of it            | what is loaded                                                        |
|------------------------------|-----------------------------------------------------------------------|
| is faster than to compute it | all                                                                   |
| is slower                    | the head that arrives while the chunk after it is computed            |

From storage, while the request waits for its turn:

| reading all of it            | what is read                                                          |
|------------------------------|-----------------------------------------------------------------------|
| is faster than to compute it | all                                                                   |
| is slower                    | the head that arrives while requests wait anyway, as those before did |

and when it is the request's turn, what has not arrived is waited for only if it comes sooner than it is computed.

Storage is measured: every read tells what a page takes. The other costs are those of the configuration, as `hicache
bench calibrate` measures them. Near the point where both are equal the choice does not flap: it changes for a gain of
more than `hysteresis`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hicache.costs import Costs

LoadPolicy = Literal["always", "never", "auto"]

_NEW_SHARE = 0.25
"""Of a new measurement in a running mean."""

READ_BATCH = 64
"""Pages of a read whose latency is shared out, before anything was measured."""


@dataclass
class LoadCounts:
    """How often, how many tokens, what it saved. Only the policy auto counts.

    `choices` are named by tier and outcome: "host_loaded", "host_split", "host_recomputed", the same of "storage", and
    "storage_cut" for reads that were not waited for to their end. `declined_tokens` were there and are computed
    anew, by tier. `saved_seconds`: modelled seconds that this saved, against loading all of them.
    """

    choices: Counter[str] = field(default_factory=Counter)
    declined_tokens: Counter[str] = field(default_factory=Counter)
    saved_seconds: float = 0.0


@dataclass(frozen=True)
class PageSizes:
    """What a page is: its tokens, its bytes on the host and as read from storage."""

    tokens: int = 1
    host: int = 0
    stored: int = 0


NO_PAGES = PageSizes()


class HostLoad(NamedTuple):
    """`tokens` to load of `found`; `saved` seconds by that, against loading all."""

    tokens: int
    found: int
    saved: float = 0.0


class StorageLoad(NamedTuple):
    """How busy it is: `reads` of storage that take turns, this one too, and requests `waiting` for their turn.

    All who wait are held up by what one of them computes, and not by what it reads.
    """

    reads: int
    waiting: int


class LoadChoice:
    """The one owner of the choice. Lengths in tokens. `overlap` is the chunk whose compute hides a load. auto takes
    `costs`.
    """

    def __init__(
        self,
        policy: LoadPolicy = "always",
        costs: Costs | None = None,
        pages: PageSizes = NO_PAGES,
        hysteresis: float = 0.1,
        overlap: int = 2048,
    ) -> None:
        self.policy = policy
        self.counts = LoadCounts()
        self._costs = costs
        self._page_size = pages.tokens
        self._host_page = pages.host
        self._hysteresis = hysteresis
        self._overlap = overlap
        self._loads = {"host": True, "storage": True}  # what was chosen last, by tier
        self._wait = 0.0  # seconds that requests wait for their turn, a running mean
        self._page_seconds = costs.disk_read.seconds(READ_BATCH * pages.stored) / READ_BATCH if costs is not None else 0

    @property
    def weighs(self) -> bool:
        """Is there anything to choose?"""
        return self.policy == "auto" and self._costs is not None

    # ---- what is measured -------------------------------------------------------------------

    def measured_read(self, pages: int, seconds: float) -> None:
        """Storage took `seconds` for reading `pages` pages; reads that run at once have shared theirs out."""
        if pages:
            self._page_seconds += _NEW_SHARE * (seconds / pages - self._page_seconds)

    def measured_wait(self, seconds: float) -> None:
        """A request had to wait so long for its turn, from the start of its prefetch on."""
        self._wait += _NEW_SHARE * (seconds - self._wait)

    def _read_seconds(self, pages: int, load: StorageLoad) -> float:
        """To read `pages` pages: reads take turns."""
        return pages * self._page_seconds * max(load.reads, 1)

    # ---- what is chosen ---------------------------------------------------------------------

    def from_host(self, start: int, found: int, total: int) -> HostLoad:
        """What to load of `found` tokens on the host after token `start`, of a prompt of `total`. Not counted yet."""
        if self._costs is None or self.policy != "auto" or not found:
            return HostLoad(0 if self.policy == "never" else found, found)
        prefill, link = self._costs.prefill, self._costs.to_device
        load, compute = link.seconds(self._host_bytes(found)), prefill.seconds(start, start + found)
        if self._prefers_load("host", load, compute):
            return HostLoad(found, found)
        low, high = 0, found // self._page_size
        while low < high:  # the longest head that hides behind the chunk after it
            middle = (low + high + 1) // 2
            begin = start + middle * self._page_size
            hidden = prefill.seconds(begin, min(begin + self._overlap, total))
            if link.seconds(self._host_bytes(middle * self._page_size)) <= hidden:
                low = middle
            else:
                high = middle - 1
        loaded = low * self._page_size
        saved = load - prefill.seconds(start + loaded, start + found) if loaded < found else 0.0
        return HostLoad(loaded, found, saved)

    def taken(self, load: HostLoad) -> None:
        """The request was let in with it."""
        if self.weighs and load.found:
            self._count("host", load.tokens, load.found, load.saved)

    def from_storage(self, start: int, pages: int, load: StorageLoad) -> int:
        """Pages to read of `pages` pages on storage after token `start`."""
        if self._costs is None or self.policy != "auto":
            return 0 if self.policy == "never" else pages
        tokens = pages * self._page_size
        read, compute = self._read_seconds(pages, load), self._costs.prefill.seconds(start, start + tokens)
        wanted = pages
        if not self._prefers_load("storage", read, compute * max(load.waiting, 1)):
            wanted = min(pages, int(self._wait / max(self._read_seconds(1, load), 1e-12)))
        kept = wanted * self._page_size
        lost = self._costs.prefill.seconds(start + kept, start + tokens)
        self._count("storage", kept, tokens, max(read - self._wait - lost, 0.0) if wanted < pages else 0.0)
        return wanted

    def waits_for(self, start: int, pages: int, load: StorageLoad) -> bool:
        """It is a request's turn, and `pages` pages after token `start` are not there yet: are they worth waiting?"""
        if self._costs is None or self.policy != "auto":
            return True
        tokens = pages * self._page_size
        read, compute = self._read_seconds(pages, load), self._costs.prefill.seconds(start, start + tokens)
        if read <= compute * max(load.waiting, 1) * (1 + self._hysteresis):
            return True
        self.counts.choices["storage_cut"] += 1
        self.counts.declined_tokens["storage"] += tokens
        self.counts.saved_seconds += read - compute
        return False

    def _host_bytes(self, tokens: int) -> float:
        return tokens * self._host_page / self._page_size

    def _prefers_load(self, tier: str, load: float, compute: float) -> bool:
        """The choice of last time stands unless the other is better by more than the hysteresis."""
        bias = 1 + self._hysteresis
        self._loads[tier] = load <= compute * bias if self._loads[tier] else load * bias < compute
        return self._loads[tier]

    def _count(self, tier: str, loaded: int, found: int, saved: float) -> None:
        outcome = "loaded" if loaded == found else "split" if loaded else "recomputed"
        self.counts.choices[f"{tier}_{outcome}"] += 1
        self.counts.declined_tokens[tier] += found - loaded
        self.counts.saved_seconds += saved
