"""Plain values shared by every layer: tiers, page indices, prefix keys and the reasons a page was lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

TOKEN_BYTES = 4
"""A token id is an int32 in a prefix key."""

PageIndices: TypeAlias = npt.NDArray[np.int32]
"""1-D array of page numbers in one pool."""

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer]


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
        return cls(np.ascontiguousarray(tokens, dtype="<i4").tobytes(), namespace)

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
