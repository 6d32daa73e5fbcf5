from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.storage_backends.budget import (
    MAX_CHUNK_PAGES,
    MIB,
    MIN_PAGES,
    Budget,
    BudgetPlan,
    ValuesMode,
    inline_cost,
    page_cost,
)
from hicache.testing.storage import IDENTITY

MODES = get_args(ValuesMode)
KIB = 1 << 10

plans = st.builds(
    BudgetPlan,
    st.sampled_from(MODES),
    st.integers(64 * MIB, 1 << 40),
    st.integers(1, 64).map(lambda blocks: blocks * 4 * KIB),
)


@given(plans, st.integers(0, 8))
def test_both_limits_together_keep_to_the_budget(plan: BudgetPlan, setbacks: int) -> None:
    budget = plan.split(setbacks=setbacks)
    assert budget.data_bytes >= MIN_PAGES * plan.page_cost
    if plan.values == "slab":
        assert budget.map_bytes + budget.data_bytes <= plan.budget_bytes
    else:
        assert budget.data_bytes < budget.map_bytes <= plan.budget_bytes


@given(plans, st.integers(0, 1 << 30))
def test_an_index_that_takes_more_takes_it_from_the_pages(plan: BudgetPlan, used_bytes: int) -> None:
    plain = plan.split()
    try:
        budget = plan.split(used_bytes)
    except ConfigError:
        assert used_bytes > plan.budget_bytes // 4
        return
    assert budget.data_bytes <= plain.data_bytes
    if plan.values == "slab":
        assert budget.map_bytes >= used_bytes
        assert budget.map_bytes + budget.data_bytes <= plan.budget_bytes


@given(plans)
def test_each_setback_leaves_less_for_pages(plan: BudgetPlan) -> None:
    plan = replace(plan, values="inline")
    limits = [plan.split(setbacks=setbacks).data_bytes for setbacks in range(5)]
    assert limits == sorted(set(limits), reverse=True)


@pytest.mark.parametrize("values", MODES)
def test_a_budget_that_is_too_small_says_what_would_do(values: ValuesMode) -> None:
    plan = BudgetPlan(values, MIB, 64 * KIB)
    with pytest.raises(ConfigError, match="does not hold one batch of 16 pages") as raised:
        plan.split()
    enough = float(str(raised.value).split("at least ")[1].split()[0])
    replace(plan, budget_bytes=int(enough * MIB) + MIB // 10).split()
    assert plan.pages == 0


@given(st.sampled_from(MODES), st.integers(MIN_PAGES, 100_000), st.sampled_from([4 * KIB, 36 * KIB, MIB]))
def test_the_budget_for_a_number_of_pages_holds_them(values: ValuesMode, pages: int, cost: int) -> None:
    plan = BudgetPlan.for_pages(values, pages, cost)
    assert plan.pages >= pages


def test_a_chunk_is_an_eighth_and_at_least_a_page() -> None:
    assert Budget(0, 800 * KIB).chunk_pages(4 * KIB) == 25
    assert Budget(0, 16 * KIB).chunk_pages(4 * KIB) == 1
    assert Budget(0, 1 << 40).chunk_pages(4 * KIB) == MAX_CHUNK_PAGES


def test_what_a_page_takes() -> None:
    """Large values take whole pages of LMDB's, and its header goes before them."""
    assert [inline_cost(length) for length in (100, 4080, 4081, 8192)] == [4096, 4096, 8192, 12288]
    assert page_cost(IDENTITY.layout, "none", "slab") == 4096
    assert page_cost(IDENTITY.layout, "none", "inline") == 8192
