"""Names, shapes and types of a model's tensors; what every loader has to deliver.

    embed                       (vocab, hidden)         norm                  (hidden,)
    head                        (vocab, hidden)         only where it is not tied to embed
    layers.N.attn_norm          (hidden,)               layers.N.ffn_norm     (hidden,)
    layers.N.q                  (query_width, hidden)   layers.N.o            (hidden, query_width)
    layers.N.k, layers.N.v      (kv_width, hidden)
    layers.N.q_norm, .k_norm    (head_dim,)             with qk_norm
    layers.N.gate, layers.N.up  (ffn, hidden)           layers.N.down         (hidden, ffn)
    <name of a matrix>_bias     (rows of the matrix,)   with biases

q and k are in the order that `rope.rotate` expects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from hicache.errors import ConfigError
from hicache.serving.geometry import ModelGeometry

Tensors = dict[str, torch.Tensor]
Shape = tuple[int, ...]

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def name_in_file(name: str, top: Mapping[str, str], layer: str, kinds: Mapping[str, str]) -> str:
    """Another format's name of one of our tensors: `top` by its whole name, those of layer N after `layer` + "N."."""
    if name in top:
        return top[name]
    _, number, kind = name.split(".")
    stem = kind.removesuffix("_bias")
    return f"{layer}{number}.{kinds[stem]}.{'weight' if stem == kind else 'bias'}"


def expected_shapes(geometry: ModelGeometry) -> dict[str, Shape]:
    """Every tensor that a model of this geometry has."""
    g = geometry
    shapes: dict[str, Shape] = {"embed": (g.vocab, g.hidden), "norm": (g.hidden,)}
    if not g.tied:
        shapes["head"] = (g.vocab, g.hidden)
    for layer in range(g.layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(g).items()}
    return shapes


def _layer_shapes(g: ModelGeometry) -> dict[str, Shape]:
    matrices = {
        "q": (g.query_width, g.hidden),
        "k": (g.kv_width, g.hidden),
        "v": (g.kv_width, g.hidden),
        "o": (g.hidden, g.query_width),
        "gate": (g.ffn, g.hidden),
        "up": (g.ffn, g.hidden),
        "down": (g.hidden, g.ffn),
    }
    biased = "qkv" * g.qkv_bias, "o" * g.out_bias
    names = [*biased[0], *biased[1], *(("gate", "up", "down") if g.mlp_bias else ())]
    norms: dict[str, Shape] = {"attn_norm": (g.hidden,), "ffn_norm": (g.hidden,)}
    if g.qk_norm:
        norms |= {"q_norm": (g.head_dim,), "k_norm": (g.head_dim,)}
    return {**norms, **matrices, **{f"{name}_bias": matrices[name][:1] for name in names}}


def check_tensors(geometry: ModelGeometry, tensors: Mapping[str, torch.Tensor], place: str) -> None:
    """Raise ConfigError, starting with `place`, for the first missing, unknown or unfit tensor."""
    shapes = expected_shapes(geometry)
    for name, shape in shapes.items():
        if name not in tensors:
            raise ConfigError(f"{place}: tensor {name} is missing")
        check_shape(tensors[name].shape, shape, f"{place}: tensor {name}")
        if tensors[name].dtype is not TORCH_DTYPES[geometry.dtype]:
            raise ConfigError(f"{place}: tensor {name} is {tensors[name].dtype}, the model's dtype is {geometry.dtype}")
    for name in tensors:
        if name not in shapes:
            raise ConfigError(f"{place}: tensor {name} has no place in this model")


def check_shape(actual: Iterable[int], expected: Shape, place: str) -> None:
    """Raise ConfigError, starting with `place`, if the shapes differ."""
    shape = tuple(actual)
    if shape != expected:
        raise ConfigError(f"{place} has shape {shape}, the model needs {expected}")


def owned(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """A contiguous copy of `tensor` in torch's own, aligned memory: results must not depend on where a file's
    bytes were mapped."""
    return tensor.to(TORCH_DTYPES[dtype], copy=True).contiguous()
