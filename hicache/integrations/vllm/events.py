"""KV events of the lower tiers, in vLLM's own classes: medium CPU for host memory, DISK for the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

if TYPE_CHECKING:
    from vllm.v1.request import Request

CPU, DISK = "CPU", "DISK"


class EventLog:
    """Events since they were last taken. Nothing is kept while `enabled` is False."""

    def __init__(self, enabled: bool, block_size: int) -> None:
        self._enabled = enabled
        self._block_size = block_size
        self._events: list[KVCacheEvent] = []

    def stored(self, request: Request, first: int, count: int, medium: str) -> None:
        """Blocks `first`, `first + 1`, ... of a request are on a tier now."""
        if not self._enabled or not count:
            return
        hashes, size = request.block_hashes, self._block_size
        lora = request.lora_request
        self._events.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(one) for one in hashes[first : first + count]],
                parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
                token_ids=list(request.all_token_ids[first * size : (first + count) * size]),
                block_size=size,
                lora_id=lora.adapter_id if lora is not None else None,
                medium=medium,
                lora_name=lora.name if lora is not None else None,
            )
        )

    def removed(self, hashes: Sequence[bytes], medium: str) -> None:
        if self._enabled and hashes:
            names = [maybe_convert_block_hash(BlockHash(one)) for one in hashes]
            self._events.append(BlockRemoved(block_hashes=names, medium=medium))

    def cleared(self) -> None:
        if self._enabled:
            self._events.append(AllBlocksCleared())

    def take(self) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        return events
