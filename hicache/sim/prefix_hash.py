"""A 64-bit hash of every prefix of a token sequence, continued chunk by chunk."""

from __future__ import annotations

from copy import copy
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from hicache.sim.workload import TokenArray

Hashes = npt.NDArray[np.uint64]
"""One value a token: a function of the namespace and all tokens up to and including it."""

_BLOCK = 8192
"""Tokens hashed at a time, so that the passes over them stay in the cache."""

_ONE = np.uint64(1)


def _mix(values: Hashes) -> None:
    """Scatter the bits of each value over all of it (splitmix64's finaliser), in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    values ^= values >> np.uint64(31)


def random_words(start: int, count: int, seed: int = 0) -> Hashes:
    """Words `start` .. `start + count - 1` of a fixed pseudo-random sequence, the same everywhere."""
    words = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64(seed * 0xD1342543DE82EF95 % 2**64)
    _mix(words)
    return words


class PrefixHasher:
    """Hashes one request's tokens in order: hash i = mix(namespace + sum over j <= i of (token j + 1) * weight j).

    The weights are odd random words, one a position, so neither a changed, swapped nor shifted token goes
    unnoticed. A copy made by `fork` continues on its own.
    """

    def __init__(self, namespace: bytes = b"") -> None:
        self._sum = np.uint64(int.from_bytes(sha256(namespace).digest()[:8], "little"))
        self.position = 0

    def fork(self) -> PrefixHasher:
        """A hasher at the same position with the same past."""
        return copy(self)

    def extend(self, tokens: TokenArray) -> Hashes:
        """Hashes of the next `tokens` (int32), uint64 of the same length."""
        hashes = np.empty(len(tokens), np.uint64)
        for start in range(0, len(tokens), _BLOCK):
            self._extend_block(tokens[start : start + _BLOCK], hashes[start : start + _BLOCK])
        return hashes

    def _extend_block(self, tokens: TokenArray, out: Hashes) -> None:
        np.copyto(out, tokens, casting="unsafe")
        out += _ONE
        out *= _weights(self.position, len(tokens))
        out[:1] += self._sum
        np.cumsum(out, out=out)
        self._sum = out[-1]
        self.position += len(tokens)
        _mix(out)


class _WeightTable:
    """The weights seen so far; replaced as a whole when it grows, so any thread may read it."""

    def __init__(self) -> None:
        self._table = np.empty(0, np.uint64)

    def __call__(self, start: int, count: int) -> Hashes:
        table = self._table
        if start + count > len(table):
            size = max(2 * len(table), start + count, 4 * _BLOCK)
            self._table = table = random_words(0, size) | _ONE
        return table[start : start + count]


_weights = _WeightTable()
