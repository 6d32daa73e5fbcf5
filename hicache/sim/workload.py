"""One request of a workload: compact until its tokens are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

TokenArray: TypeAlias = npt.NDArray[np.int32]
"""1-D array of token ids."""

TOKEN_LIMIT = 2**31
"""Token ids are int32 and not negative."""


class Prompt(Protocol):
    """The tokens of a prompt, stored in whatever form is small."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        ...

    def expand(self) -> TokenArray:
        """All tokens, int32 (length,). Not to be written to."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class TokenPrompt:
    """A prompt whose tokens are held as they are; `tokens` may be a view on a longer history."""

    tokens: TokenArray

    @property
    def length(self) -> int:
        return len(self.tokens)

    def expand(self) -> TokenArray:
        return self.tokens


@dataclass(frozen=True, eq=False, slots=True)
class BlockPrompt:
    """A prompt of a trace that names blocks, not tokens.

    Token i of block b is b * block_size + i. The last block is cut at `length`; tokens beyond the last
    block are `tail_token`, which no other request of the trace has.
    """

    blocks: npt.NDArray[np.int32]
    block_size: int
    length: int
    tail_token: int

    def expand(self) -> TokenArray:
        tokens = np.empty(max(self.length, len(self.blocks) * self.block_size), np.int32)
        covered = len(self.blocks) * self.block_size
        offsets = np.arange(self.block_size, dtype=np.int32)
        first = self.blocks * np.int32(self.block_size)
        np.add(first[:, None], offsets, out=tokens[:covered].reshape(-1, self.block_size))
        tokens[covered:] = self.tail_token
        return tokens[: self.length]


@dataclass(frozen=True, eq=False, slots=True)
class TraceRequest:
    """A request as the scheduler gets it.

    `arrival_ms` counts from the start of the trace. `output` is None where the trace tells only how many
    tokens were answered. Requests with different `namespace` (see hashing.RequestNamespace) share nothing.
    """

    rid: str
    arrival_ms: float
    session: str | None
    prompt: Prompt
    output_len: int
    output: TokenArray | None = None
    namespace: bytes = b""

    @property
    def prompt_len(self) -> int:
        return self.prompt.length

    def tokens(self) -> TokenArray:
        """Prompt tokens, made anew at every call."""
        return self.prompt.expand()


def private_token(index: int) -> int:
    """A token that stands for content known to request number `index` of a trace alone.

    Counted down from the top of int32, as block tokens count up from 0.
    """
    return TOKEN_LIMIT - 1 - index
