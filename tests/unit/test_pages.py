"""A page is free or out, never both, and never twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ProtocolError
from hicache.pages import PageAllocator
from hicache.types import no_pages


def state(allocator: PageAllocator) -> list[int]:
    return sorted(allocator.free_list().tolist())


def test_a_fresh_pool_hands_out_the_lowest_pages_first() -> None:
    allocator = PageAllocator(8)
    first, second = allocator.alloc(3), allocator.alloc(2)
    assert first is not None and first.tolist() == [0, 1, 2] and first.dtype == np.int32
    assert second is not None and second.tolist() == [3, 4]


def test_a_request_is_served_whole_or_not_at_all() -> None:
    allocator = PageAllocator(4)
    allocator.alloc(2)
    assert allocator.alloc(3) is None
    assert allocator.free_pages == 2
    rest = allocator.alloc(2)
    assert rest is not None and rest.tolist() == [2, 3]
    assert allocator.alloc(1) is None
    empty = allocator.alloc(0)
    assert empty is not None and not len(empty)


def test_a_double_free_is_refused_and_changes_nothing() -> None:
    allocator = PageAllocator(4)
    pages = allocator.alloc(3)
    assert pages is not None
    allocator.free(pages[:1])
    before = state(allocator)
    with pytest.raises(ProtocolError, match=r"not allocated: \[0\]"):
        allocator.free(pages)
    assert state(allocator) == before and allocator.free_pages == 2
    with pytest.raises(ProtocolError, match=r"not allocated: \[0\]"):
        allocator.free(pages[:1])
    assert state(allocator) == before and allocator.free_pages == 2
    allocator.free(pages[1:])
    assert state(allocator) == [0, 1, 2, 3]


def test_the_same_page_twice_in_one_call_is_refused_and_changes_nothing() -> None:
    allocator = PageAllocator(4)
    allocator.alloc(3)
    for pages in ([1, 1], [0, 2, 0], [2, 1, 0, 1], [2, 1, 0, 1, 2]):
        with pytest.raises(ProtocolError, match="twice"):
            allocator.free(np.array(pages, np.int32))
        assert state(allocator) == [3]
    allocator.free(np.array([2, 0, 1], np.int32))
    assert state(allocator) == [0, 1, 2, 3]


def test_nothing_can_be_freed_any_time() -> None:
    allocator = PageAllocator(2)
    allocator.free(no_pages())
    assert allocator.free_pages == 2


def test_what_is_handed_out_is_not_a_view_of_the_free_list() -> None:
    allocator = PageAllocator(4)
    pages, listed = allocator.alloc(2), allocator.free_list()
    assert pages is not None
    pages[:] = 9
    listed[:] = 9
    assert state(allocator) == [2, 3]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_pages_are_conserved(operations: list[tuple[bool, int]]) -> None:
    allocator = PageAllocator(16)
    out: list[int] = []
    for take, count in operations:
        if take:
            pages = allocator.alloc(count)
            assert (pages is None) == (count > 16 - len(out))
            if pages is not None:
                assert not set(pages.tolist()) & set(out)
                out += pages.tolist()
        else:
            given_back, out = out[::-1][:count], out[::-1][count:]
            allocator.free(np.array(given_back, np.int32))
        assert sorted(out + allocator.free_list().tolist()) == list(range(16))
        assert allocator.free_pages == 16 - len(out)
