"""A tiers.yaml for sizes that were found, and how sizes are rounded for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from hicache.config import CacheConfig, config_from_mapping
from hicache.planning.curves import Sizes
from hicache.planning.model_config import PlanModel
from hicache.types import Tier

SUGGESTED_PAGE = 64
"""Tokens. Traces share in larger or smaller blocks; a page this small costs little and wastes little."""

_MIB, _GIB = 1 << 20, 1 << 30


def round_size(nbytes: int, limit: int) -> int:
    """`nbytes` in steps that people write, upwards but not beyond `limit`."""
    steps = ((1024 * _GIB, 64 * _GIB), (16 * _GIB, _GIB), (_GIB, _GIB // 4), (16 * _MIB, _MIB), (0, 4096))
    step = next(step for least, step in steps if nbytes >= least)
    return min(-(-nbytes // step) * step, limit)


def size_text(nbytes: int) -> str:
    """Bytes without loss, in the largest unit that leaves no more than quarters."""
    for unit, step in (("TiB", 1 << 40), ("GiB", _GIB), ("MiB", _MIB), ("KiB", 1 << 10)):
        if nbytes >= step and not 4 * nbytes % step:
            return f"{nbytes / step:g}{unit}"
    return f"{nbytes}B"


def size_words(nbytes: int) -> str:
    """As `size_text`, for people."""
    return re.sub(r"(?<=[0-9])(?=[A-Z])", " ", size_text(nbytes))


def model_values(model: PlanModel, tp: int) -> dict[str, Any]:
    return {
        "name": model.name,
        "layers": model.layers,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "kind": model.kind,
        "dtype": model.dtype,
        "tp_size": tp,
    }


def config_values(
    model: PlanModel, tp: int, page_size: int, sizes: Sizes, policies: Mapping[Tier, str], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of a tiers.yaml. `extra`: `costs`, and `path` of the store."""
    tiers = [{"tier": "device", "size": size_text(sizes.device), "eviction": policies[Tier.DEVICE]}]
    if sizes.host:
        tiers.append({"tier": "host", "size": size_text(sizes.host), "eviction": policies[Tier.HOST]})
    if sizes.storage:
        store = {"tier": "storage", "backend": "lmdb", "path": extra["path"], "size": size_text(sizes.storage)}
        tiers.append({**store, "eviction": policies[Tier.STORAGE]})
    costs = dict(extra.get("costs") or {})
    prefill = dict(costs.get("prefill") or {})
    if "tokens_per_second" not in prefill:
        prefill = {"parameters": model.parameters, "attention_width": float(model.attention_width), **prefill}
    return {
        "model": model_values(model, tp),
        "page_size": page_size,
        "tiers": tiers,
        "costs": {**costs, "prefill": prefill},
    }


def checked(values: Mapping[str, Any], source: str) -> CacheConfig:
    """The configuration of `values`. Raises ConfigError as for a file that a person wrote."""
    return config_from_mapping(values, source=source)


def to_yaml(values: Mapping[str, Any], comments: list[str]) -> str:
    """The file, with `comments` above it."""
    head = "".join(f"# {line}\n" for line in comments)
    return head + yaml.safe_dump(dict(values), sort_keys=False, default_flow_style=None, width=110)
