"""A bounded log of what was decided about pages, to answer later why they are not where one looks for them.

An entry names the tokens start .. stop - 1 of one prefix; it is found by the hash of namespace and tokens up to the end
of its first page. The oldest entries fall out; since when it is complete, the log knows. With size 0, the default, it
keeps nothing and costs a call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import xxhash

from hicache.tree.node import Node
from hicache.types import TOKEN_BYTES, DropReason, PrefixKey, Tier

Verb = Literal["left", "failed", "fetched"]

QUIET_FETCHES = ("nothing_missing", "cancelled")
"""Ends of a prefetch that explain nothing."""


@dataclass(frozen=True, eq=False, slots=True)
class Decision:
    """`why` is a word: a DropReason, how a prefetch ended, or what failed. `demoted`: another tier had the pages.
    Later ones have higher numbers."""

    number: int
    name: int
    tier: Tier
    verb: Verb
    why: str
    start: int
    stop: int
    at: float
    demoted: bool = False


class DecisionLog:
    """The last `size` decisions about pages of `page_size` tokens. Scheduler thread only."""

    def __init__(self, size: int = 0, page_size: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.size = size
        self.clock = clock
        self.since: float | None = None
        """The log has everything that was decided after this time; None: everything."""
        self._page_bytes = page_size * TOKEN_BYTES
        self._count = 0
        self._ring: deque[Decision] = deque()
        self._found: dict[tuple[Tier, int], list[Decision]] = {}
        self._watched: dict[str, Callable[[], object]] = {}

    def __len__(self) -> int:
        return len(self._ring)

    # ---- what is written --------------------------------------------------------------------

    def left(self, node: Node, tier: Tier, reason: DropReason) -> None:
        """`node` is about to lose its copy on `tier`; `reason` holds if no other copy stays behind."""
        if self.size:
            states = node.residency
            kept = states.on_host if tier is Tier.DEVICE else states.on_device or states.on_storage
            self._write(node, tier, "left", reason.value, kept)

    def load_failed(self, nodes: Sequence[Node]) -> None:
        """A copy of `nodes` from the host to the device has failed."""
        for node in nodes if self.size else ():
            self._write(node, Tier.DEVICE, "failed", "load")

    def fetched(self, key: PrefixKey, first_page: int, how: str) -> None:
        """A prefetch of `key` from page `first_page` on has ended."""
        if self.size and how not in QUIET_FETCHES:
            head = key.data[: (first_page + 1) * self._page_bytes]
            page = self._page_bytes // TOKEN_BYTES
            span = (first_page * page, len(key) // page * page)
            self._append(_name(key.namespace, [head]), Tier.STORAGE, "fetched", how, span)

    def _write(self, node: Node, tier: Tier, verb: Verb, why: str, demoted: bool = False) -> None:
        parts, at = [node.key[: self._page_bytes]], node.parent
        while at is not None and at.parent is not None:
            parts.append(at.key)
            at = at.parent
        parts.reverse()
        name = _name(at.key if at is not None else b"", parts)
        span = (node.start, node.start + len(node.key) // TOKEN_BYTES)
        self._append(name, tier, verb, why, span, demoted)

    def _append(
        self, name: int, tier: Tier, verb: Verb, why: str, span: tuple[int, int], demoted: bool = False
    ) -> None:
        if len(self._ring) == self.size:
            oldest = self._ring.popleft()
            self.since = oldest.at
            entries = self._found[oldest.tier, oldest.name]
            entries.pop(0)
            if not entries:
                del self._found[oldest.tier, oldest.name]
        self._count += 1
        decision = Decision(self._count, name, tier, verb, why, *span, self.clock(), demoted)
        self._ring.append(decision)
        self._found.setdefault((decision.tier, decision.name), []).append(decision)

    # ---- what is asked ----------------------------------------------------------------------

    def last(self, key: PrefixKey, tier: Tier, token: int) -> Decision | None:
        """The latest decision about the page of `key` that starts at `token`."""
        hasher = _hasher(key.namespace)
        best: Decision | None = None
        for start in range(0, token * TOKEN_BYTES + 1, self._page_bytes):
            hasher.update(key.data[start : start + self._page_bytes])
            for decision in self._found.get((tier, hasher.intdigest()), ()):
                if decision.stop > token and (best is None or decision.number > best.number):
                    best = decision
        return best

    def watch(self, rid: str, callback: Callable[[], object]) -> None:
        """Call `callback` whenever request `rid` asks to be admitted, before anything is done for it."""
        self._watched[rid] = callback

    def asks(self, rid: str) -> None:
        """Request `rid` asks to be admitted."""
        if self._watched and rid in self._watched:
            self._watched[rid]()


def _hasher(namespace: bytes) -> xxhash.xxh3_64:
    return xxhash.xxh3_64(len(namespace).to_bytes(8, "little") + namespace)


def _name(namespace: bytes, parts: Sequence[bytes]) -> int:
    hasher = _hasher(namespace)
    for part in parts:
        hasher.update(part)
    return hasher.intdigest()
