"""Prefix keys are int32 little-endian bytes within a namespace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import TokenError
from hicache.requests import Request
from hicache.types import DropReason, PrefixKey, Tier, no_pages, token_array

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(TOKENS)
def test_a_key_is_its_tokens(tokens: list[int]) -> None:
    key = PrefixKey.of(tokens, b"tenant")
    assert key.data == b"".join(token.to_bytes(4, "little") for token in tokens)
    assert key.namespace == b"tenant"
    assert len(key) == len(tokens)
    assert key.tokens().tolist() == tokens


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.dtype(">i4"), np.uint16])
def test_the_integer_type_of_the_tokens_does_not_matter(dtype: type[np.integer]) -> None:
    tokens = [1, 256, 65535]
    assert PrefixKey.of(np.array(tokens, dtype)) == PrefixKey.of(tokens)
    strided = np.repeat(np.array(tokens, dtype), 2)[::2]
    assert PrefixKey.of(strided) == PrefixKey.of(tokens)


BEYOND = [
    [2**31],
    [1, 2**32 + 1],
    [1, -1],
    [-1, 2**63],
    [2**64],
    [1, 2.0],
    [True, 2**64],
    ["1"],
    [None],
    np.array([5, 2**32 + 5]),
    np.array([2**31], np.uint32),
    np.array([2**63], np.uint64),
    np.array([-1], np.int32),
    np.array([-1], np.int8),
    np.array([1.0, 2.0]),
    np.array([True, False]),
    np.array([2**40, 1], object),
    np.array(["1"]),
    torch.tensor([7, 2**32 + 7]),
    torch.tensor([1.5]),
    torch.tensor([1.0], dtype=torch.bfloat16),
    torch.tensor([True]),
]


@pytest.mark.parametrize("tokens", BEYOND, ids=repr)
def test_what_is_no_token_id_is_refused_at_every_door(tokens: Any) -> None:
    """Never wrapped, rounded or cut to another id, whatever it is an array of."""
    with pytest.raises(TokenError, match="token"):
        PrefixKey.of(tokens)
    with pytest.raises(TokenError, match="token"):
        Request("r", tokens)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([3, 2**32 + 5], "tokens[1] is 4294967301: token ids are integers from 0 to 2147483647"),
        (np.array([3, 4, -1]), "tokens[2] is -1: token ids are integers from 0 to 2147483647"),
        ([1, 2, 2**64], f"tokens[2] is {2**64}: token ids are integers from 0 to 2147483647"),
        ([1, 2.0], "tokens[1] is 2.0: token ids are integers from 0 to 2147483647"),
        (np.array([1.0]), "tokens: they are of type float64, integers are needed"),
        (np.array([[1, 2]]), "tokens: they have shape (1, 2), one sequence (tokens,) is needed"),
        (7, "tokens: they have shape (), one sequence (tokens,) is needed"),
    ],
)  # fmt: skip
def test_the_first_that_does_not_fit_is_named(tokens: Any, message: str) -> None:
    with pytest.raises(TokenError) as caught:
        token_array(tokens)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "tokens",
    [
        [0, 2**31 - 1],
        range(0, 2**31, 2**31 - 1),
        np.array([0, 2**31 - 1], np.uint64),
        torch.tensor([0, 2**31 - 1]),
        [np.uint64(0), np.int64(2**31 - 1)],  # numpy alone would make floats of these
    ],
    ids=repr,
)
def test_all_ids_that_fit_are_taken_as_they_are(tokens: Any) -> None:
    assert PrefixKey.of(tokens).tokens().tolist() == [0, 2**31 - 1]


@pytest.mark.parametrize("tokens", [[], np.array([]), range(0), torch.tensor([])], ids=repr)
def test_no_tokens_are_a_key_too(tokens: Any) -> None:
    assert len(PrefixKey.of(tokens)) == 0


def test_a_request_owns_its_tokens() -> None:
    tokens = np.arange(4, dtype=np.int32)
    request = Request("r", tokens)
    tokens[0] = 9
    assert request.tokens.tolist() == [0, 1, 2, 3]


@given(TOKENS, st.integers(0, 25))
def test_the_head_of_a_key_is_the_key_of_the_head(tokens: list[int], count: int) -> None:
    assert PrefixKey.of(tokens, b"ns").head(count) == PrefixKey.of(tokens[:count], b"ns")


def test_keys_of_two_namespaces_differ() -> None:
    assert PrefixKey.of([1]) != PrefixKey.of([1], b"x")


def test_tiers_are_ordered_fastest_first() -> None:
    assert list(Tier) == [0, 1, 2] == [Tier.DEVICE, Tier.HOST, Tier.STORAGE]


def test_no_pages_is_a_fresh_array_of_page_numbers() -> None:
    assert no_pages().dtype == np.int32 and not len(no_pages())
    assert no_pages() is not no_pages()


def test_drop_reasons_are_distinct_labels() -> None:
    assert len({str(reason.value) for reason in DropReason}) == len(DropReason)
