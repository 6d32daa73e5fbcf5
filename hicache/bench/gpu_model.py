"""A made-up model for the benchmarks of a GPU: its weights are drawn where they are used, in a moment."""

from __future__ import annotations

import random
from hashlib import sha256
from math import sqrt

import torch

from hicache.serving.geometry import ModelGeometry
from hicache.serving.loaded import LoadedModel
from hicache.serving.tensors import TORCH_DTYPES, Shape, expected_shapes

LLAMA_1B = ModelGeometry(
    layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    hidden=2048,
    ffn=8192,
    vocab=128_256,
    context=131_072,
    rope_theta=500_000.0,
    dtype="bfloat16",
)
"""Llama-3.2-1B: 1.2e9 weights, 32 KiB of KV a token."""

TINY = ModelGeometry(layers=2, heads=4, kv_heads=2, head_dim=16, hidden=64, ffn=128, vocab=512, context=8192)
"""To see that a benchmark works."""

_EMBEDDING = 0.02
"""Deviation of an embedding. With a large one a model without training says its last token again."""


def device_model(geometry: ModelGeometry, device: str, seed: int = 0) -> LoadedModel:
    """A model with weights on `device`. The same seed gives the same weights on the same kind of device only."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {name: _tensor(generator, name, shape, geometry) for name, shape in expected_shapes(geometry).items()}
    digest = sha256(f"device-uniform-1 {seed} {generator.device.type} {torch.__version__} {geometry}".encode())
    return LoadedModel(f"made up, {geometry.layers} layers", geometry, tensors, digest.hexdigest())


def _tensor(generator: torch.Generator, name: str, shape: Shape, geometry: ModelGeometry) -> torch.Tensor:
    """Variance 1 / columns, as for `random`, but for embeddings."""
    if name.endswith("norm"):
        centre, width = 1.0, 0.25
    else:
        centre, width = 0.0, sqrt(3) * (_EMBEDDING if name == "embed" else sqrt(1.0 / shape[-1]))
    tensor = torch.empty(shape, dtype=TORCH_DTYPES[geometry.dtype], device=generator.device)
    return tensor.uniform_(centre - width, centre + width, generator=generator)


def draw_tokens(count: int, geometry: ModelGeometry, seed: int = 0) -> list[int]:
    """Random token ids."""
    draw = random.Random(seed)
    return [draw.randrange(geometry.vocab) for _ in range(count)]
