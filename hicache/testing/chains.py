"""Prompts as chains of blocks, where every block names its whole prefix."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def growing_chains(rng: np.random.Generator, count: int) -> Iterator[list[int]]:
    """Chats that grow by 1 to 4 blocks, and branches of them: up to `count`, of at most 12 blocks."""
    chains: list[list[int]] = [[]]
    fresh = 0
    for _ in range(count):
        base = chains[rng.integers(len(chains))]
        base = base[: rng.integers(len(base) + 1)] if rng.random() < 0.3 else base
        new = int(rng.integers(1, 5))
        chain = [*base, *range(fresh, fresh + new)]
        fresh += new
        if len(chain) <= 12:
            chains.append(chain)
            yield chain
