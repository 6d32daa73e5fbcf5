"""From a model and the sizes of the tiers to a running engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hicache.build import build_cache
from hicache.config import CacheConfig, config_from_mapping
from hicache.serving.blocks import Mode
from hicache.serving.engine import Engine, Surroundings
from hicache.serving.executor import TransformerModel
from hicache.serving.loaded import LoadedModel
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
    section = loaded.model_section(mode)
    return config_from_mapping({"model": section, "page_size": page_size, "poison": poison, "tiers": list(tiers)})


def build_engine(
    loaded: LoadedModel,
    config: CacheConfig,
    options: SchedulerOptions | None = None,
    mode: Mode = "exact",
    surroundings: Surroundings | None = None,
) -> Engine:
    """An engine over a new cache. `config` is one of this model and mode, see `serving_config`. Raises ConfigError."""
    model = TransformerModel(loaded, mode)
    return Engine(model, build_cache(config), options, loaded.tokenizer, surroundings)


def plain_engine(
    loaded: LoadedModel,
    tokens: int,
    options: SchedulerOptions | None = None,
    mode: Mode = "exact",
    surroundings: Surroundings | None = None,
) -> Engine:
    """The reference: the same engine without cache, one pool of `tokens` tokens and no reuse (see `options`)."""
    config = serving_config(loaded, [{"tier": "device", "size": f"{tokens} tokens"}], mode=mode)
    return build_engine(loaded, config, options or SchedulerOptions(reuse=False, reserve=1.0), mode, surroundings)
