"""What a step computes: chunks of sequences, divided into pieces whose rows go through the model together.

Exact mode: the KV and logits of a token depend, bit for bit, on nothing but the tokens up to it and the model.
Matrix products give other last bits for other shapes, so every shape has to follow from the token's position alone:

    positions   0 .......... 15 | 16 .......... 31 | 32 ...
    computed    one block of EXACT_BLOCK rows at a time, aligned to its size

A block is always computed as a whole: rows that are not asked for are padding, keys after the last known one are
zero and masked. On a CPU one thread computes it (`devices.threads_of`). So a token gives the same bits in a long
prefill, in a short chunk, in decoding, beside any other requests, and over KV restored from any tier. It costs up to
EXACT_BLOCK times the arithmetic of plain decoding.

Fast mode: all rows of a step in one matrix product. Last bits depend on what else is in the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from hicache.errors import ProtocolError
from hicache.serving.attention import Span

EXACT_BLOCK = 16
"""Rows of a block in exact mode."""

Mode = Literal["exact", "fast"]


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence that a step computes: a piece of a prompt, or one decoded token.

    `tokens`: int64 (n,), n >= 1. `table`: int64 (start + n,), the pool slot of every token of the sequence so
    far; its last n slots are where the KV of `tokens` is written. Raises ProtocolError for other lengths.
    """

    tokens: torch.Tensor
    table: torch.Tensor

    def __post_init__(self) -> None:
        if not 1 <= len(self.tokens) <= len(self.table):
            raise ProtocolError(f"a chunk of {len(self.tokens)} tokens cannot end a context of {len(self.table)}")

    @property
    def start(self) -> int:
        """Position of the first token."""
        return len(self.table) - len(self.tokens)

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return len(self.table)


@dataclass(frozen=True)
class Piece:
    """Rows of one chunk that are computed together. `skip` rows of the span come before its first token; they, and
    those after its last token, are padding."""

    span: Span
    tokens: torch.Tensor
    skip: int
    ends_chunk: bool

    @property
    def rows(self) -> slice:
        """The rows of the span that are tokens."""
        return slice(self.skip, self.skip + len(self.tokens))

    @property
    def slots(self) -> torch.Tensor:
        """Where the KV of the tokens goes, int64."""
        return self.span.table[len(self.span.table) - len(self.tokens) :]

    def padded_tokens(self) -> torch.Tensor:
        """A token for each row of the span, int64; padding is token 0."""
        padded = torch.zeros(self.span.rows, dtype=torch.int64, device=self.tokens.device)
        padded[self.rows] = self.tokens
        return padded

    def positions(self) -> torch.Tensor:
        """The position of each row, int64."""
        return torch.arange(self.span.first, self.span.first + self.span.rows, device=self.tokens.device)


def divide(chunks: Sequence[Chunk], mode: Mode) -> list[list[Piece]]:
    """Groups of pieces; the rows of a group share their matrix products. Pieces are in the order of the chunks."""
    if mode == "exact":
        return [[_block(chunk, index)] for chunk in chunks for index in _blocks(chunk)]
    return [[_whole(chunk) for chunk in chunks]]


def _whole(chunk: Chunk) -> Piece:
    span = Span(chunk.start, len(chunk.tokens), chunk.table, padded=chunk.stop)
    return Piece(span, chunk.tokens, skip=0, ends_chunk=True)


def _blocks(chunk: Chunk) -> range:
    """Numbers of the blocks that the chunk touches."""
    return range(chunk.start // EXACT_BLOCK, -(-chunk.stop // EXACT_BLOCK))


def _block(chunk: Chunk, index: int) -> Piece:
    """The chunk's part of one block."""
    first, end = index * EXACT_BLOCK, (index + 1) * EXACT_BLOCK
    start, stop = max(first, chunk.start), min(end, chunk.stop)
    span = Span(first, EXACT_BLOCK, chunk.table[:stop], padded=end)
    tokens = chunk.tokens[start - chunk.start : stop - chunk.start]
    return Piece(span, tokens, skip=start - first, ends_chunk=stop == chunk.stop)
