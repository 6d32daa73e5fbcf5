"""Where the copies of one tree node live, and the only legal ways for that to change.

    ABSENT --begin_fill--> FILLING --commit_fill--> RESIDENT --drop--> ABSENT
       |                      '------abort_fill------------------------->'
       '------------------------adopt-----------------------> RESIDENT

A fill pins its source until it is committed or aborted, and a pinned copy cannot be dropped: the
endpoints of a copy stay owned until the copy is acknowledged.
"""

from __future__ import annotations

from enum import Enum

from hicache.errors import ProtocolError
from hicache.types import Tier


class CopyState(Enum):
    ABSENT = "absent"
    FILLING = "filling"  # a transfer into this tier is in flight: owned, not readable
    RESIDENT = "resident"

    __hash__ = object.__hash__  # members are looked up in `_SHARED` all the time, and an Enum hashes their names


ABSENT, FILLING, RESIDENT = CopyState

States = tuple[CopyState, CopyState, CopyState]
Pins = tuple[int, int, int]

SOURCE: dict[Tier, Tier] = {Tier.DEVICE: Tier.HOST, Tier.HOST: Tier.DEVICE, Tier.STORAGE: Tier.HOST}
"""A tier of a node is filled only from its neighbour: the host is the gateway."""

_NOWHERE: States = (ABSENT, ABSENT, ABSENT)
_UNPINNED: Pins = (0, 0, 0)


class Residency:
    """State and pin count of one node's copy on every tier.

    Both are immutable tuples that nodes share: a node costs two references, and a split copies them.
    """

    __slots__ = ("pins", "states")

    def __init__(self, states: States = _NOWHERE, pins: Pins = _UNPINNED) -> None:
        self.states = states
        self.pins = pins

    def __getitem__(self, tier: Tier) -> CopyState:
        return self.states[tier]

    @property
    def on_device(self) -> bool:
        return self.states[0] is RESIDENT

    @property
    def on_host(self) -> bool:
        return self.states[1] is RESIDENT

    @property
    def on_storage(self) -> bool:
        """A hint: the backend may have evicted the pages since."""
        return self.states[2] is RESIDENT

    def is_settled_like(self, other: Residency) -> bool:
        """The same copies, and none of them pinned or on its way."""
        return (
            self.states is other.states
            and FILLING not in self.states
            and self.pins == _UNPINNED
            and other.pins == _UNPINNED
        )

    def can_drop(self, tier: Tier) -> bool:
        return self.states[tier] is RESIDENT and not self.pins[tier]

    def adopt(self, tier: Tier) -> None:
        """Take ownership of bytes that are already valid: prefill wrote them, or a read was verified."""
        self._expect(tier, ABSENT)
        self._set(tier, RESIDENT)

    def begin_fill(self, tier: Tier) -> None:
        self._expect(tier, ABSENT)
        self._expect(SOURCE[tier], RESIDENT)
        self._set(tier, FILLING)
        self._pin(SOURCE[tier], 1)

    def commit_fill(self, tier: Tier) -> None:
        self._end_fill(tier, RESIDENT)

    def abort_fill(self, tier: Tier) -> None:
        self._end_fill(tier, ABSENT)

    def pin(self, tier: Tier) -> None:
        self._expect(tier, RESIDENT)
        self._pin(tier, 1)

    def unpin(self, tier: Tier) -> None:
        if self.pins[tier] < 1:
            raise ProtocolError(f"the {tier.name.lower()} copy is unpinned more often than pinned")
        self._pin(tier, -1)

    def drop(self, tier: Tier) -> None:
        if not self.can_drop(tier):
            state = self.states[tier].value
            raise ProtocolError(f"the {tier.name.lower()} copy cannot be dropped: {state}, {self.pins[tier]} pins")
        self._set(tier, ABSENT)

    def split(self) -> Residency:
        """The residency of the other half of a split node: in the same states, with the same pins."""
        return Residency(self.states, self.pins)

    def _end_fill(self, tier: Tier, state: CopyState) -> None:
        self._expect(tier, FILLING)
        self.unpin(SOURCE[tier])
        self._set(tier, state)

    def _expect(self, tier: Tier, state: CopyState) -> None:
        if self.states[tier] is not state:
            raise ProtocolError(f"the {tier.name.lower()} copy is {self.states[tier].value}, not {state.value}")

    def _set(self, tier: Tier, state: CopyState) -> None:
        states = list(self.states)
        states[tier] = state
        self.states = _SHARED[states[0], states[1], states[2]]

    def _pin(self, tier: Tier, by: int) -> None:
        pins = list(self.pins)
        pins[tier] += by
        self.pins = (pins[0], pins[1], pins[2]) if any(pins) else _UNPINNED


_SHARED: dict[States, States] = {(d, h, s): (d, h, s) for d in CopyState for h in CopyState for s in CopyState}
