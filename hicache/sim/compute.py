"""The model's place in a replay: a stand-in that waits for loads, checks hit pages and writes KV, on a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Protocol

import numpy as np

from hicache.sim.ports import Requests
from hicache.sim.running import Chunk, Running
from hicache.sim.standin import PagedPlanes, PageMask, StandIn
from hicache.streams.base import Event, Stream
from hicache.types import PageIndices

MAX_EXAMPLES = 8
"""Wrong pages that are explained; all are counted."""


@dataclass
class PageChecks:
    """What checking hit pages has found so far."""

    checked: int = 0
    wrong: int = 0
    poisoned: int = 0
    examples: list[str] = field(default_factory=list)


class Compute(Protocol):
    """Runs the chunks of one step at a time: `submit` each, `record`, then `commit` or `discard` the step."""

    @property
    def checks(self) -> PageChecks: ...

    def submit(self, chunk: Chunk) -> None:
        """Queue one chunk, after what its request loads."""
        ...

    def record(self) -> Event:
        """Complete when the step is computed. Raises TransferError, when asked, if a load failed."""
        ...

    def commit(self) -> None:
        """The step has succeeded."""
        ...

    def discard(self) -> None:
        """The step has failed: it is to be submitted again."""
        ...


class StandInCompute:
    """Compute that writes and checks bytes in the pages of `pool`, see StandIn."""

    def __init__(self, requests: Requests, pool: PagedPlanes, stream: Stream, standin: StandIn, verify: bool) -> None:
        self._requests = requests
        self._pool = pool
        self._stream = stream
        self._standin = standin
        self._verify = verify
        self._hit_checks: list[_HitCheck] = []
        self.checks = PageChecks()

    def submit(self, chunk: Chunk) -> None:
        """Queue one chunk: layer by layer its hits, if they were not used before, then the KV it computes."""
        running, layout = chunk.running, self._pool.layout
        pages = self._requests.pages(running.request)
        if not running.hits_ready:
            self._submit_hits(running, pages[: running.hit_len // layout.page_size].copy())
        first_page = running.done // layout.page_size
        table = pages[first_page : layout.pages_of(chunk.stop)].copy()
        offset = running.done - first_page * layout.page_size
        self._stream.submit(partial(self._standin.write, self._pool, table, offset, running.hashes(chunk.stop)))

    def record(self) -> Event:
        return self._stream.record()

    def commit(self) -> None:
        """The step has succeeded: count what its checks found."""
        found = self.checks
        for check in self._hit_checks:
            found.checked += len(check.wrong)
            found.wrong += int(check.wrong.sum())
            found.poisoned += int(check.poisoned.sum())
            found.examples += check.examples[: MAX_EXAMPLES - len(found.examples)]
        self._hit_checks.clear()

    def discard(self) -> None:
        """The step has failed: make the stream usable again; the step's hits are checked once more."""
        self._stream.clear_error()
        self._hit_checks.clear()

    def _submit_hits(self, running: Running, pages: PageIndices) -> None:
        check = _HitCheck(self._standin, self._pool, pages, running)
        verify = self._verify and len(pages) > 0
        for layer in range(self._pool.layout.num_layers):
            for ticket in running.admission.loads:
                self._stream.wait(ticket.layer_done(layer))
            if verify:
                self._stream.submit(partial(check.layer, layer))
        if verify:
            self._hit_checks.append(check)


class _HitCheck:
    """Compares the hit pages of one request with the stand-in, a layer at a time; a page counts once."""

    def __init__(self, standin: StandIn, pool: PagedPlanes, pages: PageIndices, running: Running) -> None:
        self._standin = standin
        self._pool = pool
        self._pages = pages
        self._rid = running.trace.rid
        self._hashes = running.hit_hashes
        self.wrong: PageMask = np.zeros(len(pages), np.bool_)
        self.poisoned: PageMask = np.zeros(len(pages), np.bool_)
        self.examples: list[str] = []

    def layer(self, layer: int) -> None:
        per_layer = self._pool.layout.planes_per_layer
        planes = range(layer * per_layer, (layer + 1) * per_layer)
        wrong = self._standin.wrong_pages(self._pool, self._pages, self._hashes, planes)
        if wrong.any():
            self.wrong |= wrong
            self.poisoned |= wrong & self._standin.poisoned_pages(self._pool, self._pages, planes)
            lines = self._standin.explain(self._pool, self._pages, self._hashes, planes)
            self.examples += [f"request {self._rid}: {line}" for line in islice(lines, MAX_EXAMPLES)]
