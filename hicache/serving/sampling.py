"""From logits to the next token: greedy, or drawn with a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import BadInput

Probabilities = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen.

    `temperature` 0 is greedy. Of the `top_k` likeliest tokens (0: all), those stay that are needed to reach the
    probability `top_p`. `stop_ids` end the answer. Raises BadInput for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise BadInput(f"temperature is {self.temperature}, it must be 0 or more")
        if self.top_k < 0:
            raise BadInput(f"top_k is {self.top_k}, it must be 0 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise BadInput(f"top_p is {self.top_p}, it must be above 0 and at most 1")
        if not 0 <= self.seed < 1 << 64:
            raise BadInput(f"seed is {self.seed}, it must be at least 0 and below 2^64")


def sample(logits: torch.Tensor, params: SamplingParams, step: int) -> int:
    """Token id for output number `step` of a request; `logits` are float32 (vocab,).

    The draw depends on logits, parameters and step alone: neither on other requests nor on how often the request
    was retracted. Of equally likely tokens the lower id comes first. Raises BadInput if a logit is NaN.
    """
    values: Probabilities = logits.numpy().astype(np.float64)
    if np.isnan(values).any():
        raise BadInput("the model's logits are not numbers")
    if params.temperature == 0.0:
        return int(values.argmax())
    order = _candidates(values, params.top_k)
    chances = _nucleus(_softmax(values[order] / params.temperature), params.top_p)
    draw = np.random.Generator(np.random.Philox(key=params.seed, counter=step)).random()
    cumulative = np.cumsum(chances)
    place = np.searchsorted(cumulative, draw * cumulative[-1], side="right")
    return int(order[min(int(place), len(chances) - 1)])


def _candidates(values: Probabilities, top_k: int) -> npt.NDArray[np.intp]:
    """Token ids from the likeliest on, at most `top_k` of them unless it is 0."""
    order = np.argsort(-values, kind="stable")
    return order[:top_k] if top_k else order


def _softmax(values: Probabilities) -> Probabilities:
    weights: Probabilities = np.exp(values - values.max())
    weights /= weights.sum()
    return weights


def _nucleus(chances: Probabilities, top_p: float) -> Probabilities:
    """The head of descending probabilities whose sum first reaches `top_p` (Holtzman et al. 2020)."""
    if top_p == 1.0:
        return chances
    return chances[: int(np.searchsorted(np.cumsum(chances), top_p)) + 1]
