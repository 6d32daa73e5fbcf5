"""Whose pages these are: everything that SGLang tells, and that its own storage keys leave out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from hicache.hashing import StoreIdentity
from hicache.integrations.sglang.options import StorageOptions
from hicache.integrations.sglang.page_forms import PageForm
from hicache.layout import DTYPE_BYTES, MAX_PAGE_SIZE, KVLayout


@dataclass(frozen=True)
class PoolIdentity(StoreIdentity):
    """`layout` has the length of a part, with all that a token has in a layer as one head; the heads are told here."""

    engine: str = "sglang"
    pool: str = "kv"
    host_layout: str = ""
    parts: int = 1
    kv_dtype: str = ""
    kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    size_per_token: int = 0
    cp_rank: int = 0
    cp_size: int = 1
    is_mla: int = 0


def identity_of(
    config: HiCacheStorageConfig, options: StorageOptions, pool: Any, name: str, form: PageForm
) -> PoolIdentity:
    """The identity of the pages of the host pool `name` (a HostKVCache) of this rank."""
    replicated = config.is_mla_model and not _is_sharded(pool, name)
    return PoolIdentity(
        layout=_part_layout(pool, form),
        model=config.model_name or "",
        revision=options.revision,
        weights_digest=options.weights_digest,
        tenant=options.tenant,
        codec=options.codec,
        attention_backend=options.attention_backend,
        first_layer=int(getattr(pool, "start_layer", 0) or 0),
        tp_rank=0 if replicated else config.tp_rank,
        tp_size=1 if replicated else config.tp_size,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        pool=name,
        host_layout=str(pool.layout),
        parts=form.parts,
        kv_dtype=_dtype_name(pool.dtype),
        kv_heads=getattr(pool, "head_num", None),
        head_dim=getattr(pool, "head_dim", None),
        v_head_dim=getattr(pool, "v_head_dim", None),
        size_per_token=int(pool.size_per_token),
        cp_rank=config.attn_cp_rank,
        cp_size=config.attn_cp_size,
        is_mla=int(config.is_mla_model),
    )


def _is_sharded(pool: Any, name: str) -> bool:
    """Does each tensor-parallel rank of an MLA model have other bytes in this pool? All ranks read what rank 0 wrote
    of the others."""
    return name == PoolName.MAMBA.value or isinstance(pool, MHATokenToKVPoolHost)


def _part_layout(pool: Any, form: PageForm) -> KVLayout:
    name = _dtype_name(form.dtype)
    dtype = name if name in DTYPE_BYTES and form.part_bytes % DTYPE_BYTES[name] == 0 else "int8"
    values, layers, tokens = form.part_bytes // DTYPE_BYTES[dtype], int(getattr(pool, "layer_num", 1)), pool.page_size
    if layers < 1 or tokens > MAX_PAGE_SIZE or values % (layers * tokens):
        layers, tokens = 1, 1  # states that are not one for each layer and token
    return KVLayout(layers, 1, values // (layers * tokens), tokens, dtype, "mla")


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
