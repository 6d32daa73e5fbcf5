"""What the scheduler's side knows of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from hicache.config.weights import files_digest, weight_files
from hicache.integrations.vllm.hints import Hints, hints_of
from hicache.integrations.vllm.host_index import Entry

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

    from hicache.integrations.vllm.fetches import Fetch

_KEY_BYTES = 32


@dataclass(eq=False)
class Track:
    """`keys()[i]` names block i of the request, over its tokens, salt, images and adapter."""

    request: Request
    hints: Hints
    adapter: bytes  # what the engine's block hashes do not say of the adapter
    next_block: int = 0  # blocks before it have been looked at for storing
    first: int = 0  # block at which a load would begin
    stale: bool = False  # computed before a reset: nothing of it is stored
    load_failed: bool = False  # computes from then on
    fetch: Fetch | None = None
    waiting_since: float | None = None
    held: list[Entry] = field(default_factory=list)  # pinned until its load begins
    from_host: int = 0
    from_disk: int = 0  # blocks of its last load
    _keys: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request) -> Track:
        adapter = request.lora_request
        return cls(request, hints_of(request), adapter_state(adapter) if adapter is not None else b"")

    @property
    def rid(self) -> str:
        rid: str = self.request.request_id
        return rid

    def new_entry(self, position: int, parent: Entry | None, page: int, block_size: int) -> Entry:
        """Of block `position`, in a host page."""
        block_hash = self.request.block_hashes[position]
        entry = Entry(self.keys()[position], block_hash, position * block_size, parent, page)
        entry.priority, entry.retention = self.hints.priority, self.hints.retention
        return entry

    def keys(self) -> list[bytes]:
        """Of all whole blocks whose tokens are known."""
        hashes = self.request.block_hashes
        for block_hash in hashes[len(self._keys) :]:
            self._keys.append(_key(self.adapter, block_hash))
        return self._keys


def _key(adapter: bytes, block_hash: bytes) -> bytes:
    if not adapter and len(block_hash) == _KEY_BYTES:
        return block_hash
    return sha256(adapter + block_hash).digest()


def adapter_state(adapter: LoRARequest) -> bytes:
    """The engine's hashes have the adapter's name only; another one may bear it after a restart."""
    folder = Path(adapter.path)
    digest = files_digest([*weight_files(folder), *sorted(folder.glob("*.json"))])
    return sha256(repr((adapter.name, digest)).encode()).digest()
