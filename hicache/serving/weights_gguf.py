"""Models in GGUF files (llama.cpp), dequantised by the `gguf` library.

llama.cpp pairs the elements of a head as Llama's own checkpoints do, so files of architecture `llama` hold the rows
of q and k in that order; `rope.pair_halves` takes it back. Files of Qwen keep Hugging Face's order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hicache.config.weights import files_digest
from hicache.errors import ConfigError
from hicache.serving.geometry import ModelGeometry, RopeScaling
from hicache.serving.gguf_tokenizer import gguf_chat_format, gguf_tokenizer
from hicache.serving.loaded import LoadedModel
from hicache.serving.optional import need
from hicache.serving.rope import pair_halves
from hicache.serving.tensors import Tensors, check_shape, expected_shapes, name_in_file, owned

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_TOP_NAMES = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
_LAYER_NAMES = {
    **{name: f"attn_{name}" for name in ("q", "k", "v", "q_norm", "k_norm")},
    **{name: f"ffn_{name}" for name in ("gate", "up", "down")},
    "o": "attn_output",
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
}

Field = Callable[[str, Any], Any]
"""Value of a metadata key, or the default given."""


def gguf_name(name: str) -> str:
    """GGUF's name of one of our tensors."""
    return name_in_file(name, _TOP_NAMES, "blk.", _LAYER_NAMES)


def load_gguf(path: Path, dtype: str | None = None) -> LoadedModel:
    """Read a model, as float32 unless `dtype` says otherwise.

    Raises ConfigError for missing tensors and keys, wrong shapes, unknown architectures and quantisations.
    """
    reader = _open(path)
    present = {tensor.name: tensor for tensor in reader.tensors}
    geometry = _Metadata(path, _fields(reader), present).geometry(dtype or "float32")
    digest = files_digest([path])
    tokenizer = gguf_tokenizer(path, _fields(reader))
    return LoadedModel(
        name=path.stem,
        geometry=geometry,
        tensors=_read_tensors(path, present, geometry, _fields(reader)("general.architecture", "")),
        weights_digest=digest,
        tokenizer=tokenizer,
        tokenizer_digest=digest if tokenizer is not None else None,
        chat=gguf_chat_format(_fields(reader)),
    )


def _open(path: Path) -> Any:
    gguf = need("gguf", "a GGUF file")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"{path}: not a GGUF file: {error}") from error


def _fields(reader: Any) -> Field:
    def field(key: str, default: Any) -> Any:
        found = reader.get_field(key)
        return default if found is None else found.contents()

    return field


class _Metadata:
    """The keys of one file, read into a geometry."""

    def __init__(self, path: Path, field: Field, present: dict[str, Any]) -> None:
        self._path = path
        self._field = field
        self._present = present
        self._architecture = field("general.architecture", "none")
        if self._architecture not in ARCHITECTURES:
            raise ConfigError(
                f"{path}: architecture {self._architecture!r} is unknown, use one of {', '.join(ARCHITECTURES)}"
            )

    def geometry(self, dtype: str) -> ModelGeometry:
        heads, hidden = self._size("attention.head_count"), self._size("embedding_length")
        if self._own("expert_count", 0):
            raise ConfigError(f"{self._path}: mixtures of experts are not supported")
        return ModelGeometry(
            layers=self._size("block_count"),
            heads=heads,
            kv_heads=self._own("attention.head_count_kv", heads),
            head_dim=self._own("attention.key_length", hidden // heads),
            hidden=hidden,
            ffn=self._size("feed_forward_length"),
            vocab=self._vocab(),
            context=self._size("context_length"),
            rope_theta=self._own("rope.freq_base", 10000.0),
            rope_scaling=self._rope_scaling(),
            norm_eps=self._own("attention.layer_norm_rms_epsilon", 1e-5),
            qk_norm=gguf_name("layers.0.q_norm") in self._present,
            qkv_bias=gguf_name("layers.0.q_bias") in self._present,
            out_bias=gguf_name("layers.0.o_bias") in self._present,
            mlp_bias=gguf_name("layers.0.up_bias") in self._present,
            tied=_TOP_NAMES["head"] not in self._present,
            dtype=dtype,
            bos_id=self._field("tokenizer.ggml.bos_token_id", None),
            eos_ids=self._ends(),
        )

    def _own(self, key: str, default: Any) -> Any:
        return self._field(f"{self._architecture}.{key}", default)

    def _size(self, key: str) -> int:
        value = self._own(key, None)
        if not isinstance(value, int):
            raise ConfigError(f"{self._path}: {self._architecture}.{key} is missing or no single number")
        return value

    def _vocab(self) -> int:
        embed = self._present.get(_TOP_NAMES["embed"])
        if embed is None:
            raise ConfigError(f"{self._path}: tensor {_TOP_NAMES['embed']} is missing")
        return int(embed.shape[-1])

    def _ends(self) -> tuple[int, ...]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return tuple(dict.fromkeys(token for key in keys if (token := self._field(key, None)) is not None))

    def _rope_scaling(self) -> RopeScaling:
        table = self._present.get("rope_freqs.weight")
        if table is not None:
            return RopeScaling("table", table=tuple(map(float, table.data)))
        kind = self._own("rope.scaling.type", "none")
        if kind == "linear":
            return RopeScaling("linear", self._own("rope.scaling.factor", 1.0))
        if kind != "none":
            raise ConfigError(f"{self._path}: rope scaling {kind!r} is not supported, only none and linear")
        return RopeScaling()


def _read_tensors(path: Path, present: dict[str, Any], geometry: ModelGeometry, architecture: str) -> Tensors:
    shapes = expected_shapes(geometry)
    ours = {gguf_name(name): name for name in shapes}
    for theirs in present:
        if theirs not in ours and theirs != "rope_freqs.weight":
            raise ConfigError(f"{path}: tensor {theirs} has no place in this model")
    tensors: Tensors = {}
    for theirs, name in ours.items():
        if theirs not in present:
            raise ConfigError(f"{path}: tensor {theirs} is missing")
        check_shape(map(int, reversed(present[theirs].shape)), shapes[name], f"{path}: tensor {theirs}")
        tensor = _dequantise(path, present[theirs])
        heads = _permuted_heads(name, geometry) if architecture == "llama" else None
        tensors[name] = owned(pair_halves(tensor, heads) if heads else tensor, geometry.dtype)
    return tensors


def _permuted_heads(name: str, geometry: ModelGeometry) -> int | None:
    kind = name.rpartition(".")[2].removesuffix("_bias")
    return {"q": geometry.heads, "k": geometry.kv_heads}.get(kind)


def _dequantise(path: Path, tensor: Any) -> torch.Tensor:
    quants = need("gguf.quants", "a GGUF file")
    try:
        return torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy())
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ConfigError(f"{path}: tensor {tensor.name}: quantisation {kind} is not supported") from error
