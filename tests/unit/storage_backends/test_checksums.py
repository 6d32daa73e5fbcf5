from __future__ import annotations

from hicache.storage_backends.checksums import page_checksum
from hicache.testing.storage import chain


def test_the_same_bytes_do_not_pass_for_another_key() -> None:
    first, second = chain("a", 2)
    page = memoryview(bytes(4096))
    assert page_checksum(first, page) == page_checksum(first, memoryview(bytearray(4096)))
    assert page_checksum(first, page) != page_checksum(second, page)
