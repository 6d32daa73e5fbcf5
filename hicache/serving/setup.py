"""From a model and the sizes of the tiers to a running engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hicache.build import build_cache
from hicache.config import CacheConfig, config_from_mapping
from hicache.device_pool import resolve_device
from hicache.serving.blocks import Mode
from hicache.serving.engine import Engine, Surroundings
from hicache.serving.executor import TransformerModel
from hicache.serving.loaded import LoadedModel, backend_name
from hicache.serving.scheduler import SchedulerOptions


def serving_config(
    loaded: LoadedModel,
    tiers: Sequence[Mapping[str, object]],
    page_size: int = 16,
    mode: Mode = "exact",
    poison: bool = False,
) -> CacheConfig:
    """A configuration whose `model` section is this model's; `tiers` and the rest are as in a file.

    Raises ConfigError.
    """
    mapping = {"model": loaded.model_section(mode), "page_size": page_size, "poison": poison, "tiers": list(tiers)}
    return on_its_device(config_from_mapping(mapping), mode)


def on_its_device(config: CacheConfig, mode: Mode = "exact") -> CacheConfig:
    """The configuration with what the device it asks for does to the last bits of KV. Raises ConfigError."""
    backend = backend_name(mode, resolve_device(config.device.device))
    return config.model_copy(update={"model": config.model.model_copy(update={"attention_backend": backend})})


def build_engine(
    loaded: LoadedModel,
    config: CacheConfig,
    options: SchedulerOptions | None = None,
    mode: Mode = "exact",
    surroundings: Surroundings | None = None,
) -> Engine:
    """An engine over a new cache, on the device of the cache. `config` is one of this model and mode, see
    `serving_config`. Raises ConfigError."""
    model = TransformerModel(loaded, mode, resolve_device(config.device.device))
    return Engine(model, build_cache(config), options, loaded.tokenizer, surroundings)


def plain_engine(
    loaded: LoadedModel,
    tokens: int,
    options: SchedulerOptions | None = None,
    mode: Mode = "exact",
    surroundings: Surroundings | None = None,
    device: str = "auto",
) -> Engine:
    """The reference: the same engine without cache, one pool of `tokens` tokens and no reuse (see `options`)."""
    tiers = [{"tier": "device", "device": device, "size": f"{tokens} tokens"}]
    config = serving_config(loaded, tiers, mode=mode)
    return build_engine(loaded, config, options or SchedulerOptions(reuse=False, reserve=1.0), mode, surroundings)
