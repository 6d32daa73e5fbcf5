"""A made-up model: any geometry, weights from a seed, text as bytes. It talks nonsense, but always the same."""

from __future__ import annotations

from dataclasses import fields
from hashlib import sha256

import numpy as np
import torch

from hicache.errors import ConfigError
from hicache.serving.geometry import ModelGeometry
from hicache.serving.loaded import LoadedModel
from hicache.serving.tensors import TORCH_DTYPES, Shape, Tensors, expected_shapes
from hicache.serving.tokenizer import ByteTokenizer

RANDOM_GEOMETRY = ModelGeometry(
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=16,
    hidden=128,
    ffn=256,
    vocab=ByteTokenizer.vocab_size,
    context=32768,
    tied=False,
    bos_id=ByteTokenizer.BOS,
    eos_ids=(ByteTokenizer.EOS,),
)
"""What `random` is without further words."""

_RECIPE = "uniform-1"


def load_random(spec: str = "random", dtype: str | None = None) -> LoadedModel:
    """A model from `random` or `random:key=value,...`, the keys being `seed` and the integers of ModelGeometry.

    Raises ConfigError for other keys and values.
    """
    settings = _settings(spec)
    seed = settings.pop("seed", 0)
    geometry = ModelGeometry(**{**vars(RANDOM_GEOMETRY), **settings, **({"dtype": dtype} if dtype else {})})
    return random_model(geometry, seed, spec)


def random_model(geometry: ModelGeometry, seed: int = 0, name: str = "random") -> LoadedModel:
    """A model of any geometry. The same seed gives the same weights on every machine."""
    if geometry.vocab < ByteTokenizer.vocab_size:
        raise ConfigError(f"{name}: vocab is {geometry.vocab}, bytes need at least {ByteTokenizer.vocab_size}")
    digest = sha256(f"{_RECIPE} {seed} {geometry}".encode()).hexdigest()
    return LoadedModel(name, geometry, random_tensors(geometry, seed), digest, ByteTokenizer(), _RECIPE)


def random_tensors(geometry: ModelGeometry, seed: int = 0) -> Tensors:
    """Weights of variance 1 / columns, embeddings of variance 1, norms around 1, biases around 0."""
    generator = np.random.Generator(np.random.Philox(key=seed))
    dtype = TORCH_DTYPES[geometry.dtype]
    shapes = expected_shapes(geometry)
    return {name: _tensor(generator, name, shape).to(dtype) for name, shape in shapes.items()}


def _tensor(generator: np.random.Generator, name: str, shape: Shape) -> torch.Tensor:
    """Uniform rather than normal: such draws need no transcendental function, whose bits differ between machines."""
    uniform = torch.from_numpy(generator.random(shape, np.float32)) * 2 - 1
    if name.endswith("norm"):
        return 1 + uniform / 4
    if name.endswith("_bias"):
        return uniform / 4
    variance = 1.0 if name == "embed" else 1.0 / shape[-1]
    return uniform * float(np.sqrt(3 * variance))


def _settings(spec: str) -> dict[str, int]:
    known = {"seed", *(f.name for f in fields(ModelGeometry) if f.type == "int")}
    settings = {}
    for word in filter(None, spec.partition(":")[2].split(",")):
        key, _, value = word.partition("=")
        if key not in known:
            raise ConfigError(f"{spec}: {key!r} is unknown, use {', '.join(sorted(known))}")
        if not value.isdecimal():
            raise ConfigError(f"{spec}: {key} is {value!r}, not a number")
        settings[key] = int(value)
    return settings
