"""What the bytes of a block depend on, as this rank of the engine knows it."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from hicache.config.weights import files_digest, weight_files
from hicache.errors import ConfigError
from hicache.integrations.vllm.settings import EngineFacts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

PORTABLE_HASHES = ("sha256", "sha256_cbor")
"""Block hashes that are the same in every process and that nobody can forge."""

BLOCK_FORM = 2
"""Version of what this plug-in keeps of a block. In pages of form 1 there may be bytes of another block."""


_OF_THE_PLACE = frozenset({"_name_or_path", "transformers_version"})
"""Fields of a model's configuration that say where it lies or who wrote it."""


def unsupported(config: VllmConfig, cache: KVCacheConfig) -> str | None:
    """Why blocks of this model cannot be cached, None if they can."""
    groups = cache.kv_cache_groups
    if len(groups) != 1:
        return f"the model has {len(groups)} KV cache groups, one is supported"
    spec = groups[0].kv_cache_spec
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        return f"the KV cache is of kind {type(spec).__name__}, full attention and MLA are supported"
    if getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None):
        return "the attention has a window, full attention is supported"
    hash_size = getattr(cache, "hash_block_size", None) or spec.block_size
    if hash_size != spec.block_size:
        return f"blocks have {spec.block_size} tokens and hashes {hash_size}, they must be equal"
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism is not supported"
    return None


def check_hashes(config: VllmConfig) -> None:
    """Raise ConfigError for hashes that may not name pages on a disk."""
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm not in PORTABLE_HASHES:
        raise ConfigError(
            f"prefix_caching_hash_algo {algorithm} does not name blocks for other processes: "
            f"use {' or '.join(PORTABLE_HASHES)}, or leave the storage tier out"
        )


def scheduler_facts(config: VllmConfig, cache: KVCacheConfig) -> EngineFacts:
    """The engine as the scheduler knows it: good for reading the configuration, not for names on a disk."""
    (group,) = cache.kv_cache_groups
    spec = group.kv_cache_spec
    return EngineFacts(
        model=_model_name(config),
        revision=None if Path(config.model_config.model).exists() else config.model_config.revision,
        weights_digest="unknown",
        backend="unknown",
        block_size=spec.block_size,
        layers=len(group.layer_names),
        plane_bytes=spec.page_size_bytes,
        num_blocks=cache.num_blocks,
        device=config.device_config.device_type,
    )


def worker_facts(config: VllmConfig, cache: KVCacheConfig, device: str) -> EngineFacts:
    """The engine as this rank knows it."""
    (group,) = cache.kv_cache_groups
    spec = group.kv_cache_spec
    tp, pp = get_tp_group(), get_pp_group()
    return EngineFacts(
        model=_model_name(config),
        revision=None if Path(config.model_config.model).exists() else config.model_config.revision,
        weights_digest=_weights_digest(config),
        backend=_backend(config, cache),
        block_size=spec.block_size,
        layers=len(group.layer_names),
        plane_bytes=spec.page_size_bytes,
        num_blocks=cache.num_blocks,
        device=device,
        tp_rank=tp.rank_in_group,
        tp_size=tp.world_size,
        pp_rank=pp.rank_in_group,
        pp_size=pp.world_size,
    )


def _backend(config: VllmConfig, cache: KVCacheConfig) -> str:
    """Version, backend, instruction set, layout, dtypes and layers: how the bytes of a block are to be read."""
    (group,) = cache.kv_cache_groups
    spec: Any = group.kv_cache_spec
    layers = config.compilation_config.static_forward_context
    kinds = sorted({_kind(layers[name]) for name in group.layer_names})
    parts = {
        "engine": f"vllm {vllm.__version__}",
        "block_form": BLOCK_FORM,
        "kinds": kinds,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "layout": str(cache.kv_cache_layout),
        "kv_dtype": config.cache_config.cache_dtype,
        "dtype": str(spec.dtype),
        "kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "layers": list(group.layer_names),
    }
    return json.dumps(parts, sort_keys=True)


def _kind(layer: Any) -> str:
    backend = layer.get_attn_backend()
    return f"{backend.get_name()}:{getattr(layer, 'isa', None)}"


def _weights_digest(config: VllmConfig) -> str:
    """Of the model's configuration and of the content of its weights. A model that is no folder is named by the
    commit of its repository."""
    model = config.model_config
    hf_config = {key: value for key, value in model.hf_config.to_dict().items() if key not in _OF_THE_PLACE}
    path = Path(model.model)
    files = [path] if path.is_file() else weight_files(path)
    commit = getattr(model.hf_config, "_commit_hash", None)
    parts = {
        "config": hf_config,
        "weights": files_digest(files) if files else f"{model.model} {model.revision} {commit}",
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "seed": model.seed if config.load_config.load_format == "dummy" else None,
    }
    return sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _model_name(config: VllmConfig) -> str:
    """For people: the kind of model of a folder, wherever it lies, or the name of a repository."""
    model = config.model_config
    if not Path(model.model).exists():
        return str(model.model)
    kinds = getattr(model.hf_config, "architectures", None) or [getattr(model.hf_config, "model_type", None)]
    return str(kinds[0] or "model")
