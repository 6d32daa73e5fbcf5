"""A trace as chains of pages: what is shared of it, counted without looking at tokens again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hicache.errors import ConfigError, TraceError
from hicache.sim.page_policies import BlockRequest, block_requests
from hicache.sim.workload import BlockPrompt, TraceRequest

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PageTrace:
    """A trace in units of pages of `page_size` tokens.

    `requests[i].blocks` are page numbers: equal numbers mean equal pages after equal pages, in one namespace.
    """

    page_size: int
    requests: Sequence[BlockRequest]
    trace: Sequence[TraceRequest]

    @cached_property
    def prompt_tokens(self) -> Ints:
        """Of each request."""
        return np.array([request.prompt_len for request in self.trace], np.int64)

    @cached_property
    def request_tokens(self) -> Ints:
        """Of each request, its answer included: what the device tier has to hold while it runs."""
        return np.array([request.prompt_len + request.output_len for request in self.trace], np.int64)

    @cached_property
    def arrivals(self) -> Floats:
        """Of each request, in seconds since the first one."""
        at: Floats = np.array([request.arrival_ms for request in self.trace], np.float64) / 1000
        at -= at[0]
        return at

    @cached_property
    def unique_pages(self) -> int:
        return 1 + max((int(request.blocks.max()) for request in self.requests if len(request.blocks)), default=-1)

    @cached_property
    def total_tokens(self) -> int:
        return int(self.prompt_tokens.sum())

    def hit_tokens(self, hits: Ints) -> Ints:
        """Tokens of hits that are counted in pages."""
        return hits * self.page_size


def page_trace(trace: Sequence[TraceRequest], page_size: int) -> PageTrace:
    """`trace` in pages: the blocks of a trace that names blocks, else pages of `page_size` tokens.

    Raises TraceError for a trace without requests, ConfigError for one that mixes both kinds.
    """
    if not trace:
        raise TraceError("the trace has no requests: there is nothing to plan for")
    sizes = {request.prompt.block_size if isinstance(request.prompt, BlockPrompt) else 0 for request in trace}
    if len(sizes) > 1:
        raise ConfigError("the trace has prompts of blocks of several sizes: plan for each part alone")
    size = sizes.pop()
    if size:
        return PageTrace(size, _renumbered(block_requests(trace)), trace)
    return PageTrace(page_size, _chained(trace, page_size), trace)


def _renumbered(requests: list[BlockRequest]) -> list[BlockRequest]:
    """Only whole blocks have numbers, without gaps."""
    used = np.unique(np.concatenate([request.blocks for request in requests]))
    if not len(used):
        return requests
    number = np.zeros(int(used[-1]) + 1, np.int32)
    number[used] = np.arange(len(used), dtype=np.int32)
    return [request._replace(blocks=number[request.blocks]) for request in requests]


def _chained(trace: Sequence[TraceRequest], page_size: int) -> list[BlockRequest]:
    """Pages of prompts and their answers, where these are known, numbered in order of appearance."""
    numbers: dict[tuple[int, bytes], int] = {}
    roots: dict[bytes, int] = {}
    return [_chain(request, page_size, numbers, roots) for request in trace]


def _chain(
    request: TraceRequest, page_size: int, numbers: dict[tuple[int, bytes], int], roots: dict[bytes, int]
) -> BlockRequest:
    tokens = request.tokens()
    if request.output is not None:
        tokens = np.concatenate([tokens, request.output[: max(request.output_len - 1, 0)]])
    data, step = tokens.tobytes(), page_size * tokens.itemsize
    at = roots.setdefault(request.namespace, -1 - len(roots))
    blocks = np.empty(len(tokens) // page_size, np.int32)
    for index in range(len(blocks)):
        at = numbers.setdefault((at, data[index * step : (index + 1) * step]), len(numbers))
        blocks[index] = at
    room = -(-(request.prompt_len + request.output_len) // page_size)
    return BlockRequest(blocks, (request.prompt_len - 1) // page_size, room)
