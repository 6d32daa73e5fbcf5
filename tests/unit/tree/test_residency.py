"""Every transition of a node's copies: the legal ones change exactly what they say, the others change nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from hicache.errors import ProtocolError
from hicache.tree.residency import ABSENT, FILLING, RESIDENT, SOURCE, CopyState, Residency, States
from hicache.types import Tier

ALL_STATES: list[States] = list(product(CopyState, CopyState, CopyState))
CASES: list[tuple[States, Tier]] = list(product(ALL_STATES, Tier))


def residency(states: States, pins: int = 0) -> Residency:
    """A residency in `states`; every source of a fill is pinned by it, every resident copy `pins` times more."""
    needed = [pins if state is RESIDENT else 0 for state in states]
    for tier, source in SOURCE.items():
        needed[source] += states[tier] is FILLING
    return Residency(states, (needed[0], needed[1], needed[2]))


def snapshot(node: Residency) -> tuple[States, list[int]]:
    return node.states, [node.pins[tier] for tier in Tier]


def replaced(states: States, tier: Tier, state: CopyState) -> States:
    changed = list(states)
    changed[tier] = state
    return (changed[0], changed[1], changed[2])


def check(
    states: States, tier: Tier, act: Callable[[Residency], None], after: CopyState | None, pin_change: tuple[Tier, int]
) -> None:
    """`act` leads to state `after` of `tier` and changes one pin count, or (None) it is refused and changes nothing."""
    node = residency(states)
    before = snapshot(node)
    if after is None:
        with pytest.raises(ProtocolError):
            act(node)
        assert snapshot(node) == before
        return
    act(node)
    pins = before[1]
    pins[pin_change[0]] += pin_change[1]
    assert snapshot(node) == (replaced(states, tier, after), pins)


@pytest.mark.parametrize(("states", "tier"), CASES)
def test_adopt_needs_an_absent_copy(states: States, tier: Tier) -> None:
    after = RESIDENT if states[tier] is ABSENT else None
    check(states, tier, lambda node: node.adopt(tier), after, (tier, 0))


@pytest.mark.parametrize(("states", "tier"), CASES)
def test_begin_fill_needs_an_absent_copy_and_a_readable_source(states: States, tier: Tier) -> None:
    legal = states[tier] is ABSENT and states[SOURCE[tier]] is RESIDENT
    check(states, tier, lambda node: node.begin_fill(tier), FILLING if legal else None, (SOURCE[tier], 1))


@pytest.mark.parametrize(("states", "tier"), CASES)
def test_commit_fill_ends_a_fill_and_its_pin(states: States, tier: Tier) -> None:
    after = RESIDENT if states[tier] is FILLING else None
    check(states, tier, lambda node: node.commit_fill(tier), after, (SOURCE[tier], -1))


@pytest.mark.parametrize(("states", "tier"), CASES)
def test_abort_fill_ends_a_fill_and_its_pin(states: States, tier: Tier) -> None:
    after = ABSENT if states[tier] is FILLING else None
    check(states, tier, lambda node: node.abort_fill(tier), after, (SOURCE[tier], -1))


@pytest.mark.parametrize(("states", "tier"), CASES)
def test_pin_needs_a_readable_copy(states: States, tier: Tier) -> None:
    after = RESIDENT if states[tier] is RESIDENT else None
    check(states, tier, lambda node: node.pin(tier), after, (tier, 1))


@pytest.mark.parametrize(("states", "tier"), CASES)
def test_drop_needs_a_readable_copy_that_nothing_reads(states: States, tier: Tier) -> None:
    read = any(states[above] is FILLING for above, source in SOURCE.items() if source is tier)
    legal = states[tier] is RESIDENT and not read
    assert residency(states).can_drop(tier) == legal
    check(states, tier, lambda node: node.drop(tier), ABSENT if legal else None, (tier, 0))


@pytest.mark.parametrize("tier", Tier)
def test_a_copy_can_be_dropped_after_its_last_pin(tier: Tier) -> None:
    node = Residency((RESIDENT, RESIDENT, RESIDENT))
    node.pin(tier)
    node.pin(tier)
    node.unpin(tier)
    with pytest.raises(ProtocolError, match="cannot be dropped: resident, 1 pins"):
        node.drop(tier)
    node.unpin(tier)
    node.drop(tier)
    assert node[tier] is ABSENT


@pytest.mark.parametrize("tier", Tier)
def test_an_unmatched_unpin_is_an_error_not_a_clamp(tier: Tier) -> None:
    node = Residency((RESIDENT, RESIDENT, RESIDENT))
    with pytest.raises(ProtocolError, match="unpinned more often"):
        node.unpin(tier)
    assert node.pins[tier] == 0


@pytest.mark.parametrize("states", ALL_STATES)
def test_readable_means_resident(states: States) -> None:
    node = residency(states)
    assert (node.on_device, node.on_host, node.on_storage) == tuple(state is RESIDENT for state in states)
    assert tuple(node[tier] for tier in Tier) == states


@pytest.mark.parametrize("states", ALL_STATES)
def test_a_split_copies_states_and_pins_and_then_goes_its_own_way(states: States) -> None:
    node = residency(states, pins=2)
    other = node.split()
    assert snapshot(other) == snapshot(node)
    before = snapshot(other)
    for tier in Tier:
        if node[tier] is RESIDENT:
            node.pin(tier)
        elif node[tier] is FILLING:
            node.commit_fill(tier)
    assert snapshot(other) == before


def test_both_reads_of_a_host_copy_pin_it() -> None:
    node = Residency((ABSENT, RESIDENT, ABSENT))
    node.begin_fill(Tier.DEVICE)
    node.begin_fill(Tier.STORAGE)
    assert node.pins[Tier.HOST] == 2
    node.commit_fill(Tier.STORAGE)
    assert not node.can_drop(Tier.HOST)
    node.abort_fill(Tier.DEVICE)
    assert node.can_drop(Tier.HOST)
    assert node.states == (ABSENT, RESIDENT, RESIDENT)
