"""What a model calls before it reads a layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hicache.serving.scheduler import waits_of


class Load:
    """Counts the layers that computation is made to come after; its events can do nothing else."""

    def __init__(self) -> None:
        self.gated: list[int] = []

    def layer_done(self, layer: int) -> Any:
        return SimpleNamespace(gate=lambda: self.gated.append(layer))


def _slice(*loads: Load, restored: bool = False) -> Any:
    return SimpleNamespace(generation=SimpleNamespace(restored=restored, admission=SimpleNamespace(loads=loads)))


def test_a_layer_gates_each_load_of_the_batch_once() -> None:
    shared, own, old = Load(), Load(), Load()
    new = SimpleNamespace(generation=SimpleNamespace(restored=False, admission=None))
    wait = waits_of([_slice(shared), _slice(shared, own), _slice(old, restored=True), new])  # type: ignore[list-item]
    wait(0)
    wait(3)
    assert (shared.gated, own.gated, old.gated) == ([0, 3], [0, 3], [])
