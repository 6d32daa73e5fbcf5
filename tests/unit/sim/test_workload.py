from __future__ import annotations

import numpy as np
import pytest

from hicache.sim.workload import BlockPrompt, TokenPrompt, TraceRequest, private_token


def block_prompt(blocks: list[int], length: int, tail: int = 9999) -> BlockPrompt:
    return BlockPrompt(np.array(blocks, np.int32), 4, length, tail)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (8, [12, 13, 14, 15, 4, 5, 6, 7]),
        (6, [12, 13, 14, 15, 4, 5]),
        (10, [12, 13, 14, 15, 4, 5, 6, 7, 9999, 9999]),
    ],
    ids=["whole", "last block cut", "private tail"],
)
def test_blocks_expand_to_exactly_the_prompt_length(length: int, expected: list[int]) -> None:
    tokens = block_prompt([3, 1], length).expand()
    assert tokens.dtype == np.int32
    assert tokens.tolist() == expected


def test_no_blocks_is_all_tail() -> None:
    assert block_prompt([], 2).expand().tolist() == [9999, 9999]


def test_private_tokens_are_int32_and_differ_by_request() -> None:
    tokens = np.array([private_token(index) for index in range(1000)], np.int32)
    assert len(set(tokens.tolist())) == 1000
    assert tokens.min() > 0


def test_requests_expand_their_prompt_on_demand() -> None:
    request = TraceRequest("r", 0.0, None, block_prompt([2], 3), output_len=1)
    assert request.prompt_len == 3
    assert request.tokens().tolist() == [8, 9, 10]
    assert request.output is None


def test_a_token_prompt_is_what_it_holds() -> None:
    tokens = np.arange(5, dtype=np.int32)
    assert TokenPrompt(tokens).expand() is tokens
    assert TokenPrompt(tokens).length == 5
