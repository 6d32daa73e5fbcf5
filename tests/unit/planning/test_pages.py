from __future__ import annotations

import numpy as np
import pytest

from hicache.errors import ConfigError, TraceError
from hicache.planning.model_config import read_model
from hicache.planning.pages import page_trace
from hicache.planning.plan import PlanInput
from hicache.sim.workload import BlockPrompt, TokenPrompt, TraceRequest


def asks(rid: str, tokens: list[int], output: list[int] | None = None, namespace: bytes = b"") -> TraceRequest:
    answer = None if output is None else np.array(output, np.int32)
    prompt = TokenPrompt(np.array(tokens, np.int32))
    return TraceRequest(rid, 0.0, None, prompt, len(output or [0]), answer, namespace)


def blocks(numbers: list[int], length: int, size: int = 4) -> TraceRequest:
    return TraceRequest("b", 0.0, None, BlockPrompt(np.array(numbers, np.int32), size, length, 99), 1)


def chains(trace: list[TraceRequest], page_size: int = 2) -> list[list[int]]:
    return [request.blocks.tolist() for request in page_trace(trace, page_size).requests]


def test_equal_prefixes_are_equal_pages_and_later_pages_name_their_prefix() -> None:
    assert chains([asks("a", [1, 2, 3, 4]), asks("b", [1, 2, 3, 4, 5]), asks("c", [9, 9, 3, 4])]) == [
        [0, 1],
        [0, 1],
        [2, 3],
    ]


def test_namespaces_share_nothing() -> None:
    assert chains([asks("a", [1, 2]), asks("b", [1, 2], namespace=b"x"), asks("c", [1, 2])]) == [[0], [1], [0]]


def test_an_answer_that_is_known_is_cached_but_for_its_last_token() -> None:
    trace = [asks("a", [1, 2, 3], [4, 5, 6, 7]), asks("b", [1, 2, 3, 4, 5, 6, 7, 8])]
    assert chains(trace) == [[0, 1, 2], [0, 1, 2, 3]]
    first = page_trace(trace, 2).requests[0]
    assert (first.usable, first.room) == (1, 4)


def test_blocks_are_numbered_anew_and_partial_ones_left_out() -> None:
    assert chains([blocks([7, 3, 5], 10), blocks([7, 4], 8)]) == [[2, 0], [2, 1]]
    pages = page_trace([blocks([7, 3, 5], 10)], 64)
    assert (pages.page_size, pages.unique_pages, pages.total_tokens) == (4, 2, 10)


def test_what_cannot_be_planned_for_is_refused() -> None:
    with pytest.raises(TraceError, match="no requests"):
        page_trace([], 64)
    with pytest.raises(ConfigError, match="blocks of several sizes"):
        page_trace([blocks([1], 4), blocks([2], 8, 8)], 64)


@pytest.mark.parametrize(("block", "page"), [(512, 64), (16, 16), (48, 32), (100, 64)])
def test_the_suggested_page_is_a_power_of_two(block: int, page: int) -> None:
    pages = page_trace([blocks([1], block, block)], 64)
    assert PlanInput(pages, read_model("Qwen/Qwen3-8B"), {}).page_size == page
