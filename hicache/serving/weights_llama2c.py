"""Models of llama2.c (github.com/karpathy/llama2.c), version 0: seven int32 sizes, then float32 tensors.

Order: token embeddings, then by kind for all layers: attention norms, q, k, v, o, FFN norms, gate (w1), down (w2),
up (w3); then the final norm, two rotary tables that are not needed, and the head unless the vocabulary size is
given as positive, which says that it is the embeddings.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hicache.config.weights import files_digest
from hicache.errors import ConfigError
from hicache.serving.geometry import ModelGeometry
from hicache.serving.loaded import LoadedModel
from hicache.serving.rope import pair_halves
from hicache.serving.tensors import Tensors, expected_shapes, owned
from hicache.serving.tokenizer_pieces import load_llama2c_tokenizer

_HEADER = struct.Struct("<7i")
_ORDER = ("attn_norm", "q", "k", "v", "o", "ffn_norm", "gate", "down", "up")


def load_llama2c(path: Path, dtype: str | None = None) -> LoadedModel:
    """Read a model, and the tokenizer in the one file tok*.bin beside it, if there is exactly one.

    Raises ConfigError if sizes and file length do not fit.
    """
    geometry = _geometry(path, dtype or "float32")
    found = sorted(path.parent.glob("tok*.bin"))
    tokenizer = load_llama2c_tokenizer(found[0], geometry.vocab) if len(found) == 1 else None
    return LoadedModel(
        name=path.stem,
        geometry=geometry,
        tensors=_tensors(path, geometry),
        weights_digest=files_digest([path]),
        tokenizer=tokenizer,
        tokenizer_digest=files_digest(found) if tokenizer is not None else None,
    )


def _geometry(path: Path, dtype: str) -> ModelGeometry:
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise ConfigError(f"{path}: {len(header)} bytes are no llama2.c model")
    hidden, ffn, layers, heads, kv_heads, vocab, context = _HEADER.unpack(header)
    if min(hidden, ffn, layers, heads, kv_heads, abs(vocab), context) < 1 or hidden % heads:
        raise ConfigError(f"{path}: its first bytes are not the sizes of a llama2.c model of version 0")
    return ModelGeometry(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        hidden=hidden,
        ffn=ffn,
        vocab=abs(vocab),
        context=context,
        tied=vocab > 0,
        dtype=dtype,
        bos_id=1,
        eos_ids=(1, 2),  # stories end with the BOS of the next one
    )


def _tensors(path: Path, geometry: ModelGeometry) -> Tensors:
    values = np.fromfile(path, np.float32, offset=_HEADER.size)
    names = _names(geometry)
    shapes = expected_shapes(geometry)
    rotary = geometry.context * geometry.head_dim
    expected = sum(int(np.prod(shapes[name])) for name in names) + rotary
    if len(values) != expected:
        raise ConfigError(f"{path}: holds {len(values)} numbers, its sizes need {expected}")
    tensors: Tensors = {}
    offset = 0
    for name in names:
        offset += rotary if name == "head" else 0
        count = int(np.prod(shapes[name]))
        tensors[name] = _tensor(values[offset : offset + count], name, geometry).view(shapes[name])
        offset += count
    return tensors


def _names(geometry: ModelGeometry) -> list[str]:
    """Our names in the order of the file."""
    layers = range(geometry.layers)
    stacked = [f"layers.{layer}.{kind}" for kind in _ORDER for layer in layers]
    return ["embed", *stacked, "norm", *([] if geometry.tied else ["head"])]


def _tensor(values: npt.NDArray[np.float32], name: str, geometry: ModelGeometry) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    heads = {"q": geometry.heads, "k": geometry.kv_heads}.get(name.rpartition(".")[2])
    if heads is not None:
        tensor = pair_halves(tensor.view(-1, geometry.hidden), heads)
    return owned(tensor, geometry.dtype)
