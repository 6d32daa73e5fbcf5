"""KV events of the lower tiers, in vLLM's own classes: medium CPU for host memory, DISK for the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from hicache.integrations.vllm.host_index import Entry

if TYPE_CHECKING:
    from vllm.v1.request import Request

CPU, DISK = "CPU", "DISK"


class EventLog:
    """Events since they were last taken. Nothing is kept while `enabled` is False."""

    def __init__(self, enabled: bool, block_size: int) -> None:
        self._enabled = enabled
        self._block_size = block_size
        self._events: list[KVCacheEvent] = []

    def stored(self, request: Request, entries: Sequence[Entry], medium: str) -> None:
        """Blocks of a request, in their order, are on a tier now: an event for each run without a gap."""
        if not self._enabled:
            return
        hashes, size = request.block_hashes, self._block_size
        lora = request.lora_request
        for run in self._runs(entries):
            begin = run[0].start // size
            self._events.append(
                BlockStored(
                    block_hashes=[maybe_convert_block_hash(BlockHash(entry.block_hash)) for entry in run],
                    parent_block_hash=maybe_convert_block_hash(hashes[begin - 1]) if begin else None,
                    token_ids=list(request.all_token_ids[run[0].start : run[-1].start + size]),
                    block_size=size,
                    lora_id=lora.adapter_id if lora is not None else None,
                    medium=medium,
                    lora_name=lora.name if lora is not None else None,
                )
            )

    def _runs(self, entries: Sequence[Entry]) -> Iterator[list[Entry]]:
        """Entries whose blocks follow each other, as long as they do."""
        run: list[Entry] = []
        for entry in entries:
            if run and entry.start != run[-1].start + self._block_size:
                yield run
                run = []
            run.append(entry)
        if run:
            yield run

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
