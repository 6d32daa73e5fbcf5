"""Geometry of the KV cache of well-known models, so that a configuration can name the model only.

Figures are those of the models' own config.json: num_hidden_layers, num_key_value_heads, head_dim; for MLA
head_dim is kv_lora_rank + qk_rope_head_dim. Keys written in the configuration take precedence.
"""

from __future__ import annotations


def _gqa(layers: int, kv_heads: int, head_dim: int = 128) -> dict[str, object]:
    return {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "kind": "mha", "dtype": "bfloat16"}


def _mla(layers: int, head_dim: int) -> dict[str, object]:
    return {"layers": layers, "kv_heads": 1, "head_dim": head_dim, "kind": "mla", "dtype": "bfloat16"}


KNOWN_MODELS: dict[str, dict[str, object]] = {
    "Qwen/Qwen3-0.6B": _gqa(28, 8),
    "Qwen/Qwen3-1.7B": _gqa(28, 8),
    "Qwen/Qwen3-4B": _gqa(36, 8),
    "Qwen/Qwen3-8B": _gqa(36, 8),
    "Qwen/Qwen3-14B": _gqa(40, 8),
    "Qwen/Qwen3-32B": _gqa(64, 8),
    "Qwen/Qwen2.5-7B-Instruct": _gqa(28, 4),
    "meta-llama/Llama-3.1-8B-Instruct": _gqa(32, 8),
    "meta-llama/Llama-3.1-70B-Instruct": _gqa(80, 8),
    "mistralai/Mistral-7B-Instruct-v0.3": _gqa(32, 8),
    "deepseek-ai/DeepSeek-V3": _mla(61, 576),
    "deepseek-ai/DeepSeek-R1": _mla(61, 576),
}

KNOWN_COMPUTE: dict[str, tuple[float, int]] = {
    "Qwen/Qwen3-0.6B": (0.44e9, 28 * 16 * 128),
    "Qwen/Qwen3-1.7B": (1.4e9, 28 * 16 * 128),
    "Qwen/Qwen3-4B": (3.6e9, 36 * 32 * 128),
    "Qwen/Qwen3-8B": (6.95e9, 36 * 32 * 128),
    "Qwen/Qwen3-14B": (13.2e9, 40 * 40 * 128),
    "Qwen/Qwen3-32B": (31.2e9, 64 * 64 * 128),
    "Qwen/Qwen2.5-7B-Instruct": (6.53e9, 28 * 28 * 128),
    "meta-llama/Llama-3.1-8B-Instruct": (6.98e9, 32 * 32 * 128),
    "meta-llama/Llama-3.1-70B-Instruct": (68.5e9, 80 * 64 * 128),
    "mistralai/Mistral-7B-Instruct-v0.3": (6.98e9, 32 * 32 * 128),
    "deepseek-ai/DeepSeek-V3": (37e9, 61 * 128 * 160),
    "deepseek-ai/DeepSeek-R1": (37e9, 61 * 128 * 160),
}
"""Parameters used for a token, without embeddings, and attention width (layers * query heads * head_dim), as the
models' cards and config.json give them. DeepSeek: active parameters; head_dim is the mean of 192 (scores) and 128
(values) of its uncompressed prefill.
"""
