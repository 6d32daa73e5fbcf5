"""The decoder: embeddings, layers of attention and SwiGLU, logits, over KV that lies in a paged pool.

Sources: pre-normalised Llama (Touvron et al. 2023), RMSNorm (Zhang & Sennrich 2019), SwiGLU (Shazeer 2020), GQA
(Ainslie et al. 2023), norms of q and k per head (Qwen3, 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, silu

from hicache.device_pool import DevicePool
from hicache.errors import ConfigError, ProtocolError
from hicache.serving.attention import Attention
from hicache.serving.blocks import Chunk, Mode, Piece, divide
from hicache.serving.devices import attention_for, threads_of, upload
from hicache.serving.geometry import ModelGeometry
from hicache.serving.rope import angles, inverse_frequencies, rotate
from hicache.serving.tensors import Tensors, check_tensors

WaitLayer = Callable[[int], None]
"""Called with a layer's number before its KV is read. What the thread computes from then on finds restored KV of this
layer in the pool: on a CPU it returns once it is there, on CUDA at once."""

_Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def no_wait(layer: int) -> None:
    """For contexts that have been on the device all along."""


class Transformer:
    """A decoder with its weights; without state of its own, the KV is the pool's. It computes where its weights are,
    on CUDA on the calling thread's current stream.

    Raises ConfigError if a tensor is missing, unknown or of another shape or type than the geometry says.
    """

    def __init__(
        self, geometry: ModelGeometry, tensors: Tensors, mode: Mode = "exact", attention: Attention | None = None
    ) -> None:
        check_tensors(geometry, tensors, "model")
        self.geometry = geometry
        self.mode = mode
        self.device = tensors["embed"].device
        self._tensors = tensors
        self._attention = attention if attention is not None else attention_for(mode, self.device)
        self._frequencies = inverse_frequencies(geometry).to(self.device)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], pool: DevicePool, wait_layer: WaitLayer = no_wait) -> torch.Tensor:
        """Write the chunks' KV into the pool; logits of each chunk's last token, float32 (chunks, vocab).

        Chunks are of different sequences, their tensors on the CPU. The logits are on the model's device, on CUDA
        perhaps not computed yet. Whatever `wait_layer` raises ends the step; KV of later layers is then not written.
        Raises ConfigError for a pool of another layout or device, ProtocolError for a sequence beyond the context
        or a token beyond the vocabulary.
        """
        self._check(chunks, pool)
        groups = divide(upload(chunks, self.device), self.mode)
        with threads_of(self.mode, self.device):
            states = [self._embed(group) for group in groups]
            for layer in range(self.geometry.layers):
                projected = [self._project(f"layers.{layer}.", state) for state in states]
                wait_layer(layer)
                for group, state, heads in zip(groups, states, projected, strict=True):
                    self._layer(layer, group, state, heads, pool)
            return self._logits(groups, states)

    def _check(self, chunks: Sequence[Chunk], pool: DevicePool) -> None:
        if pool.layout != self.geometry.layout(pool.layout.page_size):
            raise ConfigError(f"the pool is laid out as {pool.layout}, the model's KV is not")
        if pool.k(0).device != self.device:
            raise ConfigError(f"the pool is on {pool.device}, the model on {self.device}: give both the same device")
        for chunk in chunks:
            if len(chunk.table) > self.geometry.context:
                raise ProtocolError(f"{len(chunk.table)} tokens exceed the model's context of {self.geometry.context}")
            if not 0 <= int(chunk.tokens.min()) <= int(chunk.tokens.max()) < self.geometry.vocab:
                raise ProtocolError(f"a token is outside the vocabulary of {self.geometry.vocab}")

    def _embed(self, group: Sequence[Piece]) -> _State:
        tokens = torch.cat([piece.padded_tokens() for piece in group])
        positions = torch.cat([piece.positions() for piece in group])
        cos, sin = angles(positions, self._frequencies)
        return _State(self._tensors["embed"][tokens], cos, sin)

    def _layer(
        self, layer: int, group: Sequence[Piece], state: _State, projected: _Projected, pool: DevicePool
    ) -> None:
        """Advance the hidden state by one layer: x += attention(norm(x)); x += ffn(norm(x))."""
        prefix = f"layers.{layer}."
        heads = [self._attend(piece, rows, projected, pool, layer) for piece, rows in _rows(group)]
        attended = torch.cat(heads).reshape(len(state.hidden), -1)
        state.hidden = state.hidden + self._linear(prefix + "o", attended)
        state.hidden = state.hidden + self._swiglu(prefix, self._norm(prefix + "ffn_norm", state.hidden))

    def _project(self, prefix: str, state: _State) -> _Projected:
        """Rotated queries, rotated keys and values, each (rows, heads, head_dim)."""
        normed = self._norm(prefix + "attn_norm", state.hidden)
        shape = (len(normed), -1, self.geometry.head_dim)
        query, key, value = (self._linear(prefix + name, normed).view(shape) for name in "qkv")
        if self.geometry.qk_norm:
            query, key = self._norm(prefix + "q_norm", query), self._norm(prefix + "k_norm", key)
        return rotate(query, state.cos, state.sin), rotate(key, state.cos, state.sin), value

    def _attend(self, piece: Piece, rows: slice, projected: _Projected, pool: DevicePool, layer: int) -> torch.Tensor:
        query, key, value = (heads[rows] for heads in projected)
        keys, values = pool.k(layer), pool.v(layer)
        keys[piece.slots] = key[piece.rows]
        values[piece.slots] = value[piece.rows]
        return self._attention(query, keys, values, piece.span)

    def _swiglu(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        """down(silu(gate(x)) * up(x)), (rows, hidden)."""
        return self._linear(prefix + "down", silu(self._linear(prefix + "gate", x)) * self._linear(prefix + "up", x))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._tensors[name], self._tensors.get(name + "_bias"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.geometry.norm_eps)
        return (wide * scale).to(x.dtype) * self._tensors[name]

    def _logits(self, groups: Sequence[Sequence[Piece]], states: Sequence[_State]) -> torch.Tensor:
        last = torch.stack(
            [
                state.hidden[rows][piece.rows][-1]
                for group, state in zip(groups, states)
                for piece, rows in _rows(group)
                if piece.ends_chunk
            ]
        )
        head = self._tensors["embed" if self.geometry.tied else "head"]
        batches = [last[i : i + 1] for i in range(len(last))] if self.mode == "exact" else [last]
        return torch.cat([linear(self._norm("norm", batch), head).float() for batch in batches])


@dataclass
class _State:
    """Hidden rows of one group, (rows, hidden), and the angles of their positions."""

    hidden: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def _rows(group: Sequence[Piece]) -> list[tuple[Piece, slice]]:
    """Each piece with its rows in the group's tensors."""
    placed, start = [], 0
    for piece in group:
        placed.append((piece, slice(start, start + piece.span.rows)))
        start += piece.span.rows
    return placed
