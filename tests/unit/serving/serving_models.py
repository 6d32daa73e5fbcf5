"""Models for the tests: small geometries, and an independent computation of their logits."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import torch

from hicache.device_pool import DevicePool
from hicache.serving.blocks import Chunk
from hicache.serving.geometry import ModelGeometry, RopeScaling
from hicache.serving.model import Transformer
from hicache.serving.tensors import Tensors

PAGE = 16
SHARED = Path(os.environ.get("HICACHE_SHARED", Path(__file__).parents[4] / "shared"))
STORIES = SHARED / "data" / "stories260K" / "stories260K.bin"

LLAMA = ModelGeometry(layers=3, heads=6, kv_heads=2, head_dim=8, hidden=48, ffn=80, vocab=259, context=1024, tied=False)
QWEN2 = replace(LLAMA, qkv_bias=True, tied=True, rope_theta=1e6, norm_eps=1e-6)
QWEN3 = replace(LLAMA, qk_norm=True, head_dim=16, rope_theta=1e6, norm_eps=1e-6)
BIASED = replace(LLAMA, qkv_bias=True, out_bias=True, mlp_bias=True)
LINEAR = replace(LLAMA, rope_scaling=RopeScaling("linear", 4.0))
LLAMA3 = replace(LLAMA, rope_theta=500000.0, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64))
GEOMETRIES = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "biased": BIASED,
    "linear": LINEAR,
    "llama3": LLAMA3,
    "mha": replace(LLAMA, kv_heads=6),
}


def tokens_of(count: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Random token ids."""
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed))


def scattered_table(pages: int, seed: int = 0) -> torch.Tensor:
    """Slots of a sequence on randomly placed pages of a pool of as many."""
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    return (order[:, None] * PAGE + torch.arange(PAGE)).flatten()


def run(
    model: Transformer, pool: DevicePool, tokens: torch.Tensor, table: torch.Tensor, sizes: list[int]
) -> torch.Tensor:
    """Compute `tokens` in chunks of these sizes; logits after each chunk, (chunks, vocab)."""
    rows, start = [], 0
    for size in sizes:
        rows.append(model.forward([Chunk(tokens[start : start + size], table[: start + size])], pool)[0])
        start += size
    return torch.stack(rows)


def plain_logits(geometry: ModelGeometry, tensors: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of every position in float64, (n, vocab), written without regard to the implementation."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    x = w["embed"][tokens]
    for layer in range(geometry.layers):
        p = f"layers.{layer}."
        x = x + _plain_attention(geometry, w, p, _plain_norm(x, w[p + "attn_norm"], geometry.norm_eps))
        h = _plain_norm(x, w[p + "ffn_norm"], geometry.norm_eps)
        gate = _plain_linear(w, p + "gate", h)
        x = x + _plain_linear(w, p + "down", gate / (1 + torch.exp(-gate)) * _plain_linear(w, p + "up", h))
    x = _plain_norm(x, w["norm"], geometry.norm_eps)
    return x @ w["embed" if geometry.tied else "head"].T


def _plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x**2).sum(-1, keepdim=True) / x.shape[-1] + eps) * weight


def _plain_linear(w: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    y = x @ w[name].T
    return y + w[name + "_bias"] if name + "_bias" in w else y


def _plain_attention(g: ModelGeometry, w: Tensors, p: str, x: torch.Tensor) -> torch.Tensor:
    n, out = len(x), []
    q, k, v = (_plain_linear(w, p + name, x) for name in "qkv")
    for head in range(g.heads):
        own, shared = head * g.head_dim, head // (g.heads // g.kv_heads) * g.head_dim
        qh, kh, vh = (t[:, s : s + g.head_dim] for t, s in ((q, own), (k, shared), (v, shared)))
        if g.qk_norm:
            qh, kh = _plain_norm(qh, w[p + "q_norm"], g.norm_eps), _plain_norm(kh, w[p + "k_norm"], g.norm_eps)
        qh, kh = _plain_rope(g, qh), _plain_rope(g, kh)
        scores = qh @ kh.T / math.sqrt(g.head_dim)
        scores[torch.triu(torch.ones(n, n, dtype=torch.bool), 1)] = -math.inf
        out.append(torch.softmax(scores, -1) @ vh)
    return _plain_linear(w, p + "o", torch.cat(out, -1))


def _plain_rope(g: ModelGeometry, x: torch.Tensor) -> torch.Tensor:
    """As complex numbers: element i and i + head_dim/2 are the parts of one that turns with the position."""
    half = g.head_dim // 2
    turns = torch.tensor([_plain_frequency(g, i) for i in range(half)], dtype=torch.float64)
    phase = torch.polar(torch.ones(len(x), half, dtype=torch.float64), torch.arange(len(x))[:, None] * turns)
    turned = torch.complex(x[:, :half].contiguous(), x[:, half:].contiguous()) * phase
    return torch.cat((turned.real, turned.imag), -1)


def _plain_frequency(g: ModelGeometry, i: int) -> float:
    """The case distinction of transformers' `_compute_llama3_parameters`."""
    frequency, scaling = g.rope_theta ** (-2 * i / g.head_dim), g.rope_scaling
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind != "llama3":
        return frequency
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_context / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_context / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency
