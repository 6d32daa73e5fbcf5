"""Writes models in the formats that the loaders read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hicache.serving.geometry import ModelGeometry
from hicache.serving.tensors import Tensors

HF_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"self_attn.{name}" for name in ("q_norm", "k_norm")},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
ARCHITECTURE = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def hf_tensors(tensors: Tensors) -> Tensors:
    """The same under Hugging Face's names."""
    top = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
    return {top.get(name) or _hf_layer_name(name): tensor for name, tensor in tensors.items()}


def _hf_layer_name(name: str) -> str:
    _, layer, kind = name.split(".")
    stem, _, bias = kind.partition("_bias") if kind.endswith("_bias") else (kind, "", None)
    return f"model.layers.{layer}.{HF_NAMES[stem]}.{'weight' if bias is None else 'bias'}"


def hf_config(geometry: ModelGeometry, family: str) -> dict[str, Any]:
    g = geometry
    return {
        "architectures": [ARCHITECTURE[family]],
        "num_hidden_layers": g.layers,
        "num_attention_heads": g.heads,
        "num_key_value_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "hidden_size": g.hidden,
        "intermediate_size": g.ffn,
        "vocab_size": g.vocab,
        "max_position_embeddings": g.context,
        "rope_theta": g.rope_theta,
        "rms_norm_eps": g.norm_eps,
        "tie_word_embeddings": g.tied,
        "attention_bias": g.out_bias,
        "mlp_bias": g.mlp_bias,
        "torch_dtype": g.dtype,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }


def write_hf(folder: Path, config: dict[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    """A folder with `config` and `tensors` (ours), in one file or several."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    named = hf_tensors(tensors)
    if shards == 1:
        save_file(named, folder / "model.safetensors")
        return folder
    places = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(named)}
    for file in set(places.values()):
        save_file({name: named[name] for name in named if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def llama_cpp_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """`permute` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(
    path: Path, geometry: ModelGeometry, tensors: Tensors, family: str = "llama", kind: str = "F32", **fields: Any
) -> Path:
    """A file whose matrices are of quantisation `kind`; `fields` are calls of the writer by name, for more metadata."""
    import gguf

    g = geometry
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(g.layers)
    writer.add_head_count(g.heads)
    writer.add_head_count_kv(g.kv_heads)
    writer.add_key_length(g.head_dim)
    writer.add_embedding_length(g.hidden)
    writer.add_feed_forward_length(g.ffn)
    writer.add_context_length(g.context)
    writer.add_rope_freq_base(g.rope_theta)
    writer.add_layer_norm_rms_eps(g.norm_eps)
    for name, arguments in fields.items():
        getattr(writer, name)(*arguments)
    for name, values in (gguf_tensors(geometry, tensors, family) if tensors else {}).items():
        _add(gguf, writer, name, values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(geometry: ModelGeometry, tensors: Tensors, family: str) -> dict[str, torch.Tensor]:
    """Under the names that the gguf library derives from Hugging Face's, q and k in llama.cpp's order."""
    import gguf

    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[family]
    names = gguf.get_tensor_name_map(arch, geometry.layers)
    result = {}
    for name, tensor in hf_tensors(tensors).items():
        heads = {"q_proj": geometry.heads, "k_proj": geometry.kv_heads}.get(name.split(".")[-2])
        ordered = llama_cpp_order(tensor, heads) if heads and family == "llama" else tensor
        result[names.get_name(name, (".weight", ".bias"))] = ordered
    return result


def _add(gguf: Any, writer: Any, name: str, tensor: torch.Tensor, kind: str) -> None:
    values = np.ascontiguousarray(tensor.float().numpy())
    qtype = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
    writer.add_tensor(name, gguf.quants.quantize(values, qtype), raw_dtype=qtype)


def write_llama2c(path: Path, geometry: ModelGeometry, tensors: Tensors) -> Path:
    """As llama2.c's export.py writes version 0."""
    g = geometry
    order = ("attn_norm", "q", "k", "v", "o", "ffn_norm", "gate", "down", "up")
    heads = {"q": g.heads, "k": g.kv_heads}
    parts = [tensors["embed"]]
    for kind in order:
        stacked = [tensors[f"layers.{layer}.{kind}"] for layer in range(g.layers)]
        parts += [llama_cpp_order(tensor, heads[kind]) if kind in heads else tensor for tensor in stacked]
    parts += [tensors["norm"], torch.full((g.context * g.head_dim,), 7.0)]
    parts += [] if g.tied else [tensors["head"]]
    vocab = g.vocab if g.tied else -g.vocab
    header = struct.pack("<7i", g.hidden, g.ffn, g.layers, g.heads, g.kv_heads, vocab, g.context)
    path.write_bytes(header + b"".join(part.contiguous().numpy().tobytes() for part in parts))
    return path


def write_llama2c_tokenizer(path: Path, pieces: list[tuple[bytes, float]]) -> Path:
    """As llama2.c's tokenizer.py does."""
    body = b"".join(struct.pack("<fi", score, len(piece)) + piece for piece, score in pieces)
    path.write_bytes(struct.pack("<i", max(len(piece) for piece, _ in pieces)) + body)
    return path
