"""Residency against a naive model: a dictionary of states and one of pins, and the rules in one place."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from hicache.errors import ProtocolError
from hicache.tree.residency import Residency
from hicache.types import Tier

SOURCES = {Tier.DEVICE: Tier.HOST, Tier.HOST: Tier.DEVICE, Tier.STORAGE: Tier.HOST}
ACTIONS = ("adopt", "begin_fill", "commit_fill", "abort_fill", "pin", "unpin", "drop")
REACHED: Counter[tuple[str, Tier, bool]] = Counter()
"""How often each action was accepted or refused on each tier."""


class Model:
    def __init__(self) -> None:
        self.state = dict.fromkeys(Tier, "absent")
        self.readers: dict[Tier, list[str]] = {tier: [] for tier in Tier}

    def copy(self) -> Model:
        other = Model()
        other.state = dict(self.state)
        other.readers = {tier: list(readers) for tier, readers in self.readers.items()}
        return other

    def allows(self, action: str, tier: Tier) -> bool:
        state, source = self.state[tier], SOURCES[tier]
        return {
            "adopt": state == "absent",
            "begin_fill": state == "absent" and self.state[source] == "resident",
            "commit_fill": state == "filling",
            "abort_fill": state == "filling",
            "pin": state == "resident",
            "unpin": "pin" in self.readers[tier],
            "drop": state == "resident" and not self.readers[tier],
        }[action]

    def apply(self, action: str, tier: Tier) -> None:
        readers, reader = self.readers[SOURCES[tier]], f"fill of {tier.name}"
        if action == "begin_fill":
            readers.append(reader)
        elif action in ("commit_fill", "abort_fill"):
            readers.remove(reader)
        elif action == "pin":
            self.readers[tier].append("pin")
        elif action == "unpin":
            self.readers[tier].remove("pin")
        after = {"adopt": "resident", "begin_fill": "filling", "commit_fill": "resident"}
        self.state[tier] = after.get(action, self.state[tier] if "pin" in action else "absent")


class ResidencyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.halves: list[tuple[Residency, Model]] = [(Residency(), Model())]

    @rule(index=st.integers(0, 3), action=st.sampled_from(ACTIONS), tier=st.sampled_from(Tier))
    def act(self, index: int, action: str, tier: Tier) -> None:
        real, model = self.halves[index % len(self.halves)]
        allowed = model.allows(action, tier)
        if action == "unpin" and not allowed and model.readers[tier]:
            return  # the pin of a fill is the fill's: residency counts pins, it does not know whose they are
        REACHED[action, tier, allowed] += 1
        try:
            {name: getattr(real, name) for name in ACTIONS}[action](tier)
        except ProtocolError:
            assert not allowed, f"{action} of {tier.name} was refused"
        else:
            assert allowed, f"{action} of {tier.name} was accepted"
            model.apply(action, tier)

    @rule(seed=st.integers(0, 2**32))
    def burst(self, seed: int) -> None:
        """Thirty random actions: depth that single rules rarely reach."""
        rng = random.Random(seed)
        for _ in range(30):
            self.act(rng.randrange(4), rng.choice(ACTIONS), rng.choice(list(Tier)))
            self.agrees()

    @rule(index=st.integers(0, 3))
    def split(self, index: int) -> None:
        if len(self.halves) < 4:
            real, model = self.halves[index % len(self.halves)]
            self.halves.append((real.split(), model.copy()))

    @invariant()
    def agrees(self) -> None:
        for real, model in self.halves:
            for tier in Tier:
                assert real[tier].value == model.state[tier]
                assert real.pins[tier] == len(model.readers[tier])
                assert real.can_drop(tier) == model.allows("drop", tier)


def test_residency_is_the_model() -> None:
    REACHED.clear()
    run_state_machine_as_test(ResidencyMachine, settings=settings(max_examples=60, stateful_step_count=20))
    missing = [
        (action, tier.name, allowed)
        for action in ACTIONS
        for tier in Tier
        for allowed in (True, False)
        if not REACHED[action, tier, allowed]
    ]
    assert not missing, f"the walks never reach {missing}"
