from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from hicache.errors import BadInput
from hicache.serving.sampling import SamplingParams, sample

LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.3, 0.2, 0.05]))


def drawn(params: SamplingParams, count: int = 4000) -> Counter[int]:
    return Counter(sample(LOGITS, params, step) for step in range(count))


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    assert sample(torch.tensor([1.0, 3.0, 3.0, 2.0]), SamplingParams(), 0) == 1


def test_draws_follow_the_probabilities() -> None:
    counts = drawn(SamplingParams(temperature=1.0, seed=1))
    shares = np.array([counts[token] / 4000 for token in range(5)])
    assert np.abs(shares - [0.05, 0.4, 0.3, 0.2, 0.05]).max() < 0.03


def test_temperature_sharpens() -> None:
    counts = drawn(SamplingParams(temperature=0.5, seed=1))
    squares = np.array([0.05, 0.4, 0.3, 0.2, 0.05]) ** 2
    shares = np.array([counts[token] / 4000 for token in range(5)])
    assert np.abs(shares - squares / squares.sum()).max() < 0.03


@pytest.mark.parametrize(
    "params, kept",
    [
        (SamplingParams(1.0, top_k=2), {1, 2}),
        (SamplingParams(1.0, top_p=0.4), {1}),
        (SamplingParams(1.0, top_p=0.65), {1, 2}),
        (SamplingParams(1.0, top_p=0.85), {1, 2, 3}),
        (SamplingParams(1.0, top_k=3, top_p=0.99), {1, 2, 3}),
        (SamplingParams(1.0, top_k=99), {0, 1, 2, 3, 4}),
    ],
)
def test_top_k_and_top_p_keep_the_likeliest(params: SamplingParams, kept: set[int]) -> None:
    assert set(drawn(params, 500)) == kept


def test_a_draw_depends_on_seed_and_step_alone() -> None:
    params = SamplingParams(temperature=1.0, seed=7)
    forwards = [sample(LOGITS, params, step) for step in range(50)]
    backwards = [sample(LOGITS, params, step) for step in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert forwards != [sample(LOGITS, SamplingParams(temperature=1.0, seed=8), step) for step in range(50)]
    assert len(set(forwards)) > 1


@pytest.mark.parametrize(
    "values, message",
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_values_out_of_range_are_named(values: dict[str, float], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        SamplingParams(**values)  # type: ignore[arg-type]


def test_logits_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(BadInput, match="not numbers"):
        sample(torch.tensor([0.0, float("nan")]), SamplingParams(), 0)
