"""Rotary position embeddings (Su et al., "RoFormer", 2021), in the layout of Hugging Face's Llama.

Element i of a head is paired with element i + head_dim/2. Llama's own checkpoints, llama2.c and llama.cpp pair
2i with 2i + 1 instead; `pair_halves` reorders the rows of their q and k weights, after which both agree.
"""

from __future__ import annotations

import math

import torch

from hicache.serving.geometry import ModelGeometry, RopeScaling


def inverse_frequencies(geometry: ModelGeometry) -> torch.Tensor:
    """Radians per position of each pair, float32 (head_dim / 2,): theta^(-2i / head_dim), scaled."""
    exponents = torch.arange(0, geometry.head_dim, 2, dtype=torch.float32) / geometry.head_dim
    frequencies: torch.Tensor = 1.0 / geometry.rope_theta**exponents
    return _scaled(frequencies, geometry.rope_scaling)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "table":
        return frequencies / torch.tensor(scaling.table, dtype=torch.float32)
    return _llama3(frequencies, scaling) if scaling.kind == "llama3" else frequencies


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Scaling of Llama 3.1 (llama-models, `apply_scaling`): by how often a pair turns within the original context."""
    turns = scaling.original_context * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def angles(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine for `positions` (n,): two float32 tensors (n, 1, head_dim / 2), the same for every head."""
    turned = positions.to(torch.float32)[:, None, None] * frequencies
    return turned.cos(), turned.sin()


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair of `heads` (n, heads, head_dim) by its angle, computed in float32, returned in their type."""
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(heads.dtype)


def pair_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of a q or k weight (heads * head_dim, ...) from pairs (2i, 2i+1) to (i, i + head_dim/2)."""
    rows, rest = weight.shape[0] // heads // 2, weight.shape[1:]
    return weight.reshape(heads, rows, 2, *rest).transpose(1, 2).reshape(weight.shape).contiguous()
