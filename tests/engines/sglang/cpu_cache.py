"""One rank of SGLang's hierarchical cache on a CPU: real tree, controller, threads and host pool; a stand-in for the
device pool, whose copies to and from the host pool are torch's."""

from __future__ import annotations

import json
import threading
import time
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import sglang.srt.managers.cache_controller as controller_module
import sglang.srt.mem_cache.pool_host.base as base_module
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.storage_attachment import StorageAttachment
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

PAGE = 64
LAYERS, HEADS, HEAD_DIM = 4, 2, 64


class Ranks(SimpleNamespace):
    """What SGLang asks for the place of this process among others."""

    def __init__(self, tp_rank: int = 0, tp_size: int = 1, pp_rank: int = 0, pp_size: int = 1) -> None:
        super().__init__(
            tp_rank=tp_rank, tp_size=tp_size, attn_tp_rank=tp_rank, attn_tp_size=tp_size, attn_dp_rank=0,
            pp_rank=pp_rank, pp_size=pp_size, attn_dcp_size=1, attn_dcp_rank=0, launch_world_size=1, nnodes=1,
        )  # fmt: skip


def place(ranks: Ranks) -> None:
    """Make SGLang believe that this process is there."""
    controller_module.get_parallel = base_module.get_parallel = lambda: ranks
    controller_module.is_dp_attention_enabled = lambda: False
    controller_module.LayerLoadingEvent.wait = lambda self, layer: None
    base_module.host_memory_budget_bytes = lambda *args, **kwargs: 1 << 40


class DevicePool:
    """Layer-first KV of `size` token slots; `shape`: layers, heads, head_dim."""

    layer_shard_enabled = False
    start_layer = 0

    def __init__(self, size: int, dtype: torch.dtype, shape: tuple[int, int, int] = (LAYERS, HEADS, HEAD_DIM)) -> None:
        self.layer_num, *self.token = shape
        self.device = "cpu"
        self.k = [torch.zeros(size, *self.token, dtype=dtype) for _ in range(self.layer_num)]
        self.v = [torch.zeros(size, *self.token, dtype=dtype) for _ in range(self.layer_num)]

    def register_layer_transfer_counter(self, counter: Any) -> None:
        """Nobody waits for layers here."""

    def info(self) -> MHABufferInfo:
        pointers = torch.zeros(self.layer_num, dtype=torch.uint64)
        buffers = KVBuffers(
            k=tuple(self.k), v=tuple(self.v), k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD
        )
        return MHABufferInfo(
            buffers=buffers, page_size=PAGE, head_num=self.token[0], head_dim=self.token[1], v_head_dim=self.token[1],
            dtype=self.k[0].dtype, device=torch.device("cpu"),
        )  # fmt: skip


class Allocator:
    """Token slots of the device pool."""

    device = "cpu"

    def __init__(self, size: int, pool: DevicePool) -> None:
        self._free, self._pool = torch.arange(size), pool

    def get_kvcache(self) -> DevicePool:
        return self._pool

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> torch.Tensor | None:
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def free(self, indices: torch.Tensor, start_pos: int = 0) -> None:
        self._free = torch.cat([self._free, indices])

    free_segment = free

    def mamba_full_cache_donor(self) -> None:
        return None

    def set_hicache_transfer_done_event(self, *args: Any) -> None:
        """Copies are done when they return."""


class HostPool(MHATokenToKVPoolHost):
    """SGLang's own host pool; only the copies, which are CUDA kernels, are torch's."""

    def load_to_device_per_layer(
        self, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int, io_backend: str, **options: Any
    ) -> None:
        for refs, tensors in ((self.k_data_refs, device_pool.k), (self.v_data_refs, device_pool.v)):
            tensors[layer_id][device_indices] = self._tokens(refs[layer_id])[host_indices]

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str
    ) -> None:
        for layer in range(self.layer_num):
            for refs, tensors in ((self.k_data_refs, device_pool.k), (self.v_data_refs, device_pool.v)):
                self._put(refs[layer], host_indices, tensors[layer][device_indices])

    def _tokens(self, ref: torch.Tensor) -> torch.Tensor:
        return ref.reshape(self.size, self.head_num, self.head_dim)

    def _put(self, ref: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
        if ref.dim() == 4:  # (pages, page_size, heads, head_dim)
            ref[slots // PAGE, slots % PAGE] = values
        else:
            ref[slots] = values


def host_pool(device: DevicePool, layout: str, pages: int, kind: type[HostPool] = HostPool) -> HostPool:
    return kind(
        device.info(), 1.0, 0, PAGE, layout, pin_memory=False, device="cpu", device_capacity_tokens=PAGE,
        start_layer=0, end_layer=device.layer_num, host_token_capacity=pages * PAGE,
    )  # fmt: skip


class Rank:
    """A cache with a storage backend attached. `tokens`: how many device and host pool hold."""

    def __init__(  # noqa: PLR0913 - what a rank may differ in
        self,
        extra_config: dict[str, Any],
        tokens: int = 4096,
        layout: str = "page_first",
        *,
        ranks: Ranks | None = None,
        model: str = "example/model",
        dtype: torch.dtype = torch.float32,
        core: str = "rust",
    ) -> None:
        place(ranks or Ranks())
        self.device = DevicePool(tokens, dtype)
        self.allocator = Allocator(tokens, self.device)
        self.host = host_pool(self.device, layout, 2 * tokens // PAGE)
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        pools = HostPoolGroup(
            [PoolEntry(PoolName.KV, self.host, self.device, lambda layer: layer, is_primary_index_anchor=True)]
        )
        self.controller = HybridCacheController(
            self.allocator, pools, PAGE, None, threading.Event(), write_policy="write_through", io_backend="direct",
            storage_backend=None, model_name=model, transfer_layer_id_max=LAYERS,
        )  # fmt: skip
        self.controller.move_indices = lambda host, device: (host, device)
        self._wire(pools)
        done, message = self.cache.attach_storage_backend(
            "dynamic", json.dumps(extra_config), model, "wait_complete", "write_through"
        )
        if not done:
            raise RuntimeError(message)

    def _wire(self, pools: HostPoolGroup) -> None:
        """What init_hicache does, less what asks for server arguments."""
        cache = self.cache
        cache.cache_controller, cache.host_pool_group = self.controller, pools
        cache.tree_core.set_hicache_enabled()
        cache.components[ComponentType.FULL]._full_kv_pool_host = self.host
        cache.write_through_threshold, cache.is_write_back, cache.load_back_threshold = 1, False, 10
        cache._storage_attachment = StorageAttachment(cache)

    @property
    def storage(self) -> Any:
        return self.controller.storage_backend

    def compute(self, tokens: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
        """As after a prefill of `tokens`: new KV on the device, inserted; returns it. Waits until it is on disk."""
        slots = self.allocator.alloc(len(tokens))
        assert slots is not None
        generator = torch.Generator().manual_seed(seed)
        truth = []
        for tensor in (*self.device.k, *self.device.v):
            tensor[slots] = torch.randn(len(tokens), HEADS, HEAD_DIM, generator=generator).to(tensor.dtype)
            truth.append(tensor[slots].clone())
        self.cache.insert(InsertParams(key=RadixKey(array("q", tokens)), value=slots))
        self.settle()
        return truth

    def settle(self) -> None:
        self.cache.check_hicache_events()
        self.cache.check_hicache_events()
        while self.cache.ongoing_write_through or self.cache.ongoing_backup:
            self.cache.check_hicache_events()
            time.sleep(0.001)

    def forget(self) -> None:
        """Evict everything from device and host, and wipe their memory."""
        self.cache.evict(EvictParams(num_tokens=1 << 30))
        self.cache.evict_host(1 << 30)
        self.host.kv_buffer.zero_()
        for tensor in (*self.device.k, *self.device.v):
            tensor.zero_()

    def match(self, tokens: Sequence[int]) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))

    def prefetch(self, tokens: Sequence[int], rid: str = "request") -> int:
        """Ask storage for `tokens`; returns how many came to the host."""
        cache, handle, match = self.cache, CacheRequestHandle(rid, 0), self.match(tokens)
        node = match.last_host_node
        prefix = cache.get_prefix_hash_values(node) if cache.hicache_storage_pass_prefix_keys else None
        cache.prefetch_from_storage(handle, node, array("q", tokens), cache.get_last_hash_value(node), prefix, [])
        while not cache.check_prefetch_progress(handle):
            cache.check_hicache_events()
            time.sleep(0.001)
        return int(cache.pop_prefetch_loaded_tokens(handle))

    def load_back(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """KV of the cached prefix of `tokens` once it is on the device."""
        match = self.match(tokens)
        request = SimpleNamespace(
            rid="request", last_node=match.last_device_node, swa_host_hit_length=0, mamba_host_hit_length=0,
            kv=SimpleNamespace(mamba_pool_idx=None),
        )  # fmt: skip
        _, node = self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=match.best_match_node, host_hit_length=match.host_hit_length, req=request
            )
        )
        self.cache.ready_to_load_host_cache()
        self.cache.check_hicache_events()
        slots = self.cache.path_device_indices(node)
        return [tensor[slots] for tensor in (*self.device.k, *self.device.v)]

    def close(self) -> None:
        done, message = self.cache.detach_storage_backend()
        assert done, message
