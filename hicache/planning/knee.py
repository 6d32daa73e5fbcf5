"""Where a curve bends: Satopää, Albrecht, Irwin and Raghavan, "Finding a 'kneedle' in a haystack", 2011."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LEAST = 0.02
"""Of the height of the curve; less is noise."""


def knee(sizes: Sequence[float], values: Sequence[float]) -> int | None:
    """Index of the point farthest above the straight line from the first to the last one, both axes linear.

    The curve must not fall. None if it does not bend that way: nothing lies above the line.
    """
    x, y = np.asarray(sizes, float), np.asarray(values, float)
    if len(x) < 3 or x[-1] == x[0] or y[-1] == y[0]:
        return None
    above = (y - y[0]) / (y[-1] - y[0]) - (x - x[0]) / (x[-1] - x[0])
    best = int(np.argmax(above))
    return best if above[best] > _LEAST else None
