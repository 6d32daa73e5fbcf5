"""Prefix keys are int32 little-endian bytes within a namespace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.types import DropReason, PrefixKey, Tier, no_pages

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
