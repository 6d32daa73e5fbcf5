"""The checksum that stands between a damaged page and the model."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest


def page_checksum(key: bytes, data: memoryview) -> int:
    """64-bit checksum of a page's bytes, seeded with its key: another page's bytes do not pass either."""
    return xxh3_64_intdigest(data, seed=int.from_bytes(key[:8], "little"))
