"""The life of a request's pages, from admission to release.

Ownership of the pages in a request's table:

    page 0 ............ num_shared ............ num_pages
           the tree's,            the request's own
           locked for it

`kv_committed_len` tokens have their KV written; `kv_allocated_len` tokens have a page. Only whole
pages of committed tokens go to the tree; what was allocated beyond goes back to the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.cache import HiCache, device_table
from hicache.device_pool import ReqToTokenPool
from hicache.errors import ProtocolError
from hicache.stats import fresh_hits
from hicache.transfer.tickets import LoadTicket
from hicache.tree.plans import LockReceipt
from hicache.types import PageIndices, PrefixKey, TokenIds, token_array


class Request:
    """One request's tokens and what it holds of the cache. Made by the caller, changed by RequestManager.

    Raises TokenError for what is no token id.
    """

    def __init__(self, rid: str, tokens: TokenIds, namespace: bytes = b"", priority: int = 0) -> None:
        self.rid = rid
        self.tokens: npt.NDArray[np.int32] = token_array(tokens).copy()
        self.namespace = namespace
        self.priority = priority
        self.row: int | None = None  # of the ReqToTokenPool, while admitted
        self.num_shared = 0  # leading pages that are the tree's
        self.num_pages = 0
        self.kv_committed_len = 0
        self.receipt: LockReceipt | None = None
        self.counted: int | None = None  # tokens that it had when it was admitted first: what statistics count of it
        self.reached = 0  # how far its KV has ever been

    @property
    def admitted(self) -> bool:
        return self.row is not None

    def key(self, num_tokens: int | None = None) -> PrefixKey:
        return PrefixKey(self.tokens[:num_tokens].astype("<i4", copy=False).tobytes(), self.namespace)


@dataclass(frozen=True)
class Admission:
    """What the tiers serve of an admitted request; its attention waits for `loads`, layer by layer.

    A load that raises TransferError has brought nothing: retract the request and admit it again.
    """

    device_len: int
    host_len: int
    storage_len: int
    loads: Sequence[LoadTicket]

    @property
    def prefix_len(self) -> int:
        return self.device_len + self.host_len + self.storage_len


class RequestManager:
    """Admits, extends and releases requests over one cache."""

    def __init__(self, cache: HiCache, req_to_token_pool: ReqToTokenPool) -> None:
        self.cache = cache
        self.req_to_token_pool = req_to_token_pool
        self._page_size = cache.page_size
        self._admitted: dict[str, Request] = {}
        cache.add_owner(self._owned_pages)

    def admit(self, req: Request) -> Admission | None:
        """Match, lock and begin to load the cached prefix. At least one token is left to compute.

        None if there is no room now: nothing has changed, poll and try again.
        """
        if req.admitted or req.rid in self._admitted:
            raise ProtocolError(f"request {req.rid!r} is admitted already")
        self.cache.tiers.decisions.asks(req.rid)
        row = self.req_to_token_pool.alloc()
        if row is None:
            return None
        match = self.cache.match_prefix(req.key(max(len(req.tokens) - 1, 0)))
        load = self.cache.init_load_back(match)
        if load is None:
            self.req_to_token_pool.free(row)
            return None
        self.req_to_token_pool.write(row, 0, load.pages)
        req.row, req.receipt = row, load.receipt
        req.num_shared = req.num_pages = len(load.pages)
        req.kv_committed_len = len(load.pages) * self._page_size
        self._admitted[req.rid] = req
        self.cache.claim_prefetch(req.rid)
        self._count(match.device_len, load.tokens - load.storage_tokens, load.storage_tokens, req)
        return Admission(match.device_len, load.tokens - load.storage_tokens, load.storage_tokens, load.tickets)

    def _count(self, device: int, host: int, storage: int, req: Request) -> None:
        """Hits and computed tokens sum to the tokens that requests came with, each counted once."""
        counters = self.cache.tiers.counters
        if req.counted is None:
            req.counted = len(req.tokens)
            counters.computed_tokens += req.counted
        hits = fresh_hits(device, host, storage, req.reached, req.counted)
        counters.hit_tokens.update(hits)
        counters.computed_tokens -= sum(hits.values())

    def extend(self, req: Request, upto_tokens: int) -> bool:
        """Give the request pages for its first `upto_tokens` tokens. False, and none given, if there is no room."""
        if upto_tokens <= req.num_pages * self._page_size:
            return True
        missing = self.cache.layout.pages_of(upto_tokens) - req.num_pages
        pages = self.cache.alloc_pages(missing)
        if pages is None:
            return False
        self.req_to_token_pool.write(_row(req), req.num_pages, pages)
        req.num_pages += missing
        return True

    def append(self, req: Request, token_ids: TokenIds) -> None:
        """Decoded tokens join the request. Raises TokenError for what is no token id; nothing has joined then."""
        req.tokens = np.concatenate([req.tokens, token_array(token_ids)])

    def commit(self, req: Request, upto_tokens: int) -> None:
        """The KV of the first `upto_tokens` tokens is written (or will be, before the step's compute event)."""
        if not req.kv_committed_len <= upto_tokens <= min(self.kv_allocated_len(req), len(req.tokens)):
            raise ProtocolError(
                f"request {req.rid!r} cannot commit {upto_tokens} tokens: {req.kv_committed_len} are committed, "
                f"{self.kv_allocated_len(req)} allocated, {len(req.tokens)} known"
            )
        req.kv_committed_len = upto_tokens

    def kv_allocated_len(self, req: Request) -> int:
        """Tokens that have a page."""
        return req.num_pages * self._page_size

    def pages(self, req: Request) -> PageIndices:
        """The request's page table."""
        return self.req_to_token_pool.pages(_row(req), req.num_pages)

    def cache_unfinished_req(self, req: Request) -> None:
        """After a chunk: share the committed whole pages, and go on with the tree's where it has its own."""
        whole = self.cache.layout.whole_pages(req.kv_committed_len)
        if whole <= req.num_shared:
            return
        if self.cache.loading:
            self.cache.poll()  # what this request waited for has arrived: it can be built upon
        key = req.key(whole * self._page_size)
        result = self.cache.insert(key, self.pages(req)[:whole], req.num_shared, req.priority)
        self._take_over(req, device_table(result.node))
        lock = self.cache.tiers.tree.lock(result.node)
        self._unlock(req)
        req.receipt = lock
        req.num_shared = result.num_pages

    def _take_over(self, req: Request, tree_pages: PageIndices) -> None:
        """Write the tree's pages into the table, from the request's first own page on."""
        self.req_to_token_pool.write(_row(req), req.num_shared, tree_pages[req.num_shared :])

    def cache_finished_req(self, req: Request) -> None:
        """Share what is committed, give back everything else, release the request."""
        self.cache_unfinished_req(req)
        self._release(req)

    def retract(self, req: Request) -> None:
        """Release the request without sharing more of it; it can be admitted again."""
        self._release(req)

    def abort(self, req: Request) -> None:
        """Release the request in whatever state it is, waiting ones too."""
        self.cache.cancel_prefetch(req.rid)
        if req.admitted:
            self._release(req)

    def _release(self, req: Request) -> None:
        row = _row(req)
        self.cache.free_pages(self.pages(req)[req.num_shared :])
        req.reached = max(req.reached, req.kv_committed_len)
        self._unlock(req)
        self.req_to_token_pool.free(row)
        req.row = None
        req.num_shared = req.num_pages = req.kv_committed_len = 0
        del self._admitted[req.rid]

    def _unlock(self, req: Request) -> None:
        if req.receipt is not None:
            self.cache.unlock(req.receipt)
            req.receipt = None

    def _owned_pages(self) -> Iterable[PageIndices]:
        for req in self._admitted.values():
            yield self.pages(req)[req.num_shared :]


def _row(req: Request) -> int:
    if req.row is None:
        raise ProtocolError(f"request {req.rid!r} is not admitted")
    return req.row
