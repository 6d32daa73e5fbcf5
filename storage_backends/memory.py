"""Pages in a dictionary: the simplest backend that keeps every promise, and the oracle for the others."""

from __future__ import annotations

from hicache.hashing import StoreIdentity
from hicache.storage_backends.managed import ManagedBackend


class MemoryBackend(ManagedBackend):
    def __init__(self, identity: StoreIdentity, budget_bytes: int) -> None:
        super().__init__(identity, budget_bytes)
        self._data: dict[bytes, bytearray] = {}

    def put(self, key: bytes, data: memoryview) -> None:
        self._data[key] = bytearray(data)

    def get(self, key: bytes, buffer: memoryview) -> None:
        buffer[:] = self._data[key]

    def drop(self, key: bytes) -> None:
        del self._data[key]

    def flip_byte(self, key: bytes) -> bool:
        """Damage a stored page, for drills; False if it is not stored."""
        with self._lock:
            page = self._data.get(key)
            if page is None:
                return False
            page[len(page) // 2] ^= 0xFF
            return True
