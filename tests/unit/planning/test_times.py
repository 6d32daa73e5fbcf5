from __future__ import annotations

import numpy as np
import pytest

from hicache.costs import Costs, Link, PrefillCost
from hicache.planning.times import TimeModel, TokenSplit


def tokens(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


COSTS = Costs(PrefillCost(1e-3, 1e-6), to_device=Link(1e6, 0.01), disk_read=Link(1e5, 0.02), lookup=0.005)


def test_without_hits_it_is_the_prefill() -> None:
    split = TokenSplit(tokens(0), tokens(0), tokens(0))
    assert TimeModel(COSTS, 10, 4).first_token(tokens(100), split)[0] == pytest.approx(COSTS.prefill.seconds(0, 100))


def test_a_device_hit_leaves_the_rest_to_compute() -> None:
    split = TokenSplit(tokens(60), tokens(0), tokens(0))
    assert TimeModel(COSTS, 10, 4).first_token(tokens(100), split)[0] == pytest.approx(COSTS.prefill.seconds(60, 100))


def test_a_host_load_goes_on_beside_the_compute_but_for_one_layer() -> None:
    split = TokenSplit(tokens(0), tokens(60), tokens(0))
    compute, load = COSTS.prefill.seconds(60, 100), 0.01 + 600 / 1e6
    expected = compute + load / 4
    assert TimeModel(COSTS, 10, 4).first_token(tokens(100), split)[0] == pytest.approx(expected)


def test_a_disk_read_comes_before_everything() -> None:
    split = TokenSplit(tokens(0), tokens(0), tokens(60))
    compute, load, fetch = COSTS.prefill.seconds(60, 100), 0.01 + 600 / 1e6, 0.005 + 0.02 + 600 / 1e5
    assert TimeModel(COSTS, 10, 4).first_token(tokens(100), split)[0] == pytest.approx(fetch + compute + load / 4)
