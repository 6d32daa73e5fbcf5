"""Attention over paged KV: gather the context's tokens from the pool, then scaled dot products.

`Attention` is the place for another backend: a callable that takes the same arguments, such as a wrapper of
FlashInfer or flash-attn that reads the pages in place. `Transformer` is given one; its name and version belong
into the store's identity, since they decide the last bits of KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
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
    mask = torch.ones(span.rows, span.padded, dtype=torch.bool).tril(span.first)
    attended = scaled_dot_product_attention(
        query.float().transpose(0, 1)[None],
        _gather(keys, span)[None],
        _gather(values, span)[None],
        attn_mask=mask,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1).to(query.dtype)


def _gather(pool: torch.Tensor, span: Span) -> torch.Tensor:
    """The context's rows of a pool tensor as float32 (kv_heads, padded, head_dim), zero beyond the context.

    Slots beyond it may hold anything, NaN too, so they are never read.
    """
    gathered = torch.zeros(span.padded, *pool.shape[1:])
    gathered[: len(span.table)] = pool[span.table]
    return gathered.transpose(0, 1)
