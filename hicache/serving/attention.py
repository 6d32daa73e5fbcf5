"""Attention over paged KV: gather the context's tokens from the pool, then scaled dot products.

`Attention` is the place for another backend: a callable that takes the same arguments, such as a wrapper of
FlashInfer or flash-attn that reads the pages in place. `Transformer` is given one; its name and version belong
into the store's identity, since they decide the last bits of KV. Without one, `devices.attention_for` chooses:

| | exact mode | fast mode |
|---|---|---|
| CPU | `torch_sdpa` | `torch_sdpa` |
| CUDA | `pinned_sdpa`: torch may not choose another kernel | `flash_sdpa`: in the model's type, no mask in memory |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Span:
    """Query rows of one sequence that are computed together.

    Row i has position `first + i` and attends to the positions up to its own. `table` are the pool slots, int64
    (context,), of positions 0 .. context-1; `padded` >= context is the length that keys and values are given.
    """

    first: int
    rows: int
    table: torch.Tensor
    padded: int


class Attention(Protocol):
    """Attention of one layer."""

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span) -> torch.Tensor:
        """Attend `query` (rows, heads, head_dim) to the slots in `span.table`.

        `keys` and `values` are a layer's pool tensors (tokens, kv_heads, head_dim); the span's own KV is in them
        already. Query head h reads KV head h // (heads / kv_heads). The result is like `query`.
        """
        ...


def torch_sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v in float32, by torch. Positions beyond the context are zero and masked."""
    mask = torch.ones(span.rows, span.padded, dtype=torch.bool, device=query.device).tril(span.first)
    attended = scaled_dot_product_attention(
        query.float().transpose(0, 1)[None],
        _gather(keys, span)[None],
        _gather(values, span)[None],
        attn_mask=mask,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1).to(query.dtype)


def pinned_sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span) -> torch.Tensor:
    """`torch_sdpa` by plain products and a softmax, whatever other kernels torch has: equal shapes, equal bits."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch_sdpa(query, keys, values, span)


_FAST = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Not cuDNN, which plans anew for every length of a context."""


def flash_sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v in the type of the pool, without a mask in memory where there is a kernel for
    that: flash attention for 16-bit types. The span has no padding."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, keys[span.table], values[span.table]))
    # a single row sees all of the context; otherwise row i ends i rows after the first one's last key
    mask = causal_lower_right(span.rows, span.padded) if span.rows > 1 else None
    with sdpa_kernel(_FAST):
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return attended[0].transpose(0, 1)


def _gather(pool: torch.Tensor, span: Span) -> torch.Tensor:
    """The context's rows of a pool tensor as float32 (kv_heads, padded, head_dim), zero beyond the context.

    Slots beyond it may hold anything, NaN too, so they are never read.
    """
    gathered = torch.zeros(span.padded, *pool.shape[1:], device=pool.device)
    gathered[: len(span.table)] = pool[span.table]
    return gathered.transpose(0, 1)
