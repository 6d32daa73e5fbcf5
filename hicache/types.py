"""Plain values shared by every layer: tiers, page indices, prefix keys and the reasons a page was lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.errors import TokenError

TOKEN_BYTES = 4
"""A token id is an int32 in a prefix key."""

MAX_TOKEN = 2**31 - 1
"""The largest token id."""

PageIndices: TypeAlias = npt.NDArray[np.int32]
"""1-D array of page numbers in one pool."""

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
"""Token ids as callers have them: a sequence of integers, or a 1-D array (a torch tensor too) of any integer dtype."""


class Tier(IntEnum):
    """Where a page's bytes can lie, fastest first."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


class DropReason(str, Enum):
    """Why KV was discarded instead of demoted, or could not be kept on a lower tier."""

    NO_LOWER_TIER = "no_lower_tier"
    HOST_FULL = "host_full"
    WRITE_POLICY = "write_policy"  # write_through_selective: too few hits to be worth a copy
    STORAGE_FAILED = "storage_failed"
    STORAGE_REFUSED = "storage_refused"  # the backend did not store the page
    STORAGE_SHED = "storage_shed"  # the store queue was full, or too slow
    NOT_ADMITTED = "not_admitted"  # the admission policy says that it is not worth a place on storage
    CHAIN_CUT = "chain_cut"  # an ancestor is not storable, so this page would be unreachable
    TIER_DEGRADED = "tier_degraded"
    FLUSHED = "flushed"


def no_pages() -> PageIndices:
    return np.empty(0, np.int32)


def token_array(tokens: TokenIds) -> npt.NDArray[np.int32]:
    """The tokens as a 1-D array of int32, with the values that they have: nothing is wrapped, rounded or cut.

    Raises TokenError, naming the first one, for ids that are not integers from 0 to `MAX_TOKEN`.
    """
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:  # ragged lists, tensors on a GPU
        raise TokenError(f"tokens: they make no array of integers: {error}") from None
    if array.ndim != 1:
        raise TokenError(f"tokens: they have shape {array.shape}, one sequence (tokens,) is needed")
    if array.dtype.kind in "fO" and isinstance(tokens, Sequence):
        array = _exact(tokens)  # numpy makes floats or objects of integers that no dtype holds together
    if array.dtype.kind not in "iu" and len(array):
        raise TokenError(f"tokens: they are of type {array.dtype}, integers are needed")
    if len(array) and not 0 <= int(array.min()) <= int(array.max()) <= MAX_TOKEN:
        index = int(np.argmax((array < 0) | (array > MAX_TOKEN)))
        raise _not_an_id(index, array[index])
    return np.asarray(array, np.int32)


def _exact(tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """Raises TokenError for the first that is no integer of 64 bits."""
    for index, token in enumerate(tokens):
        if not isinstance(token, int | np.integer) or isinstance(token, bool) or not 0 <= token <= MAX_TOKEN:
            raise _not_an_id(index, token)
    return np.array([int(token) for token in tokens], np.int64)


def _not_an_id(index: int, token: object) -> TokenError:
    return TokenError(f"tokens[{index}] is {token}: token ids are integers from 0 to {MAX_TOKEN}")


@dataclass(frozen=True)
class PrefixKey:
    """Token ids of a request in the form the tree compares: int32 little-endian bytes, within a namespace.

    `namespace` is the unambiguous encoding made by `hashing.RequestNamespace.encode`; two keys of
    different namespaces never share a page, whatever their tokens.
    """

    data: bytes
    namespace: bytes = b""

    @classmethod
    def of(cls, tokens: TokenIds, namespace: bytes = b"") -> PrefixKey:
        """Raises TokenError for what is no token id."""
        return cls(token_array(tokens).astype("<i4", copy=False).tobytes(), namespace)

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.data) // TOKEN_BYTES

    def tokens(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.data, "<i4")

    def head(self, num_tokens: int) -> PrefixKey:
        """The first `num_tokens` tokens, in the same namespace."""
        if num_tokens >= len(self):
            return self
        return PrefixKey(self.data[: num_tokens * TOKEN_BYTES], self.namespace)
