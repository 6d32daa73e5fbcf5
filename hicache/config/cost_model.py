"""From the section `costs` to seconds: the machine's links, and the prefill of the configuration's model."""

from __future__ import annotations

from hicache.config.known_models import KNOWN_COMPUTE
from hicache.config.models import CacheConfig
from hicache.costs import Costs, PrefillCost
from hicache.errors import ConfigError


def costs_of(config: CacheConfig) -> Costs:
    """The costs of a configuration. Raises ConfigError if it does not tell what prefill takes."""
    section = config.costs
    return Costs(
        prefill=prefill_cost(config),
        to_device=section.to_device.link(),
        to_host=section.to_host.link(),
        disk_read=section.disk_read.link(),
        disk_write=section.disk_write.link(),
        lookup=section.lookup,
        decode_step=section.decode_step,
    )


def prefill_cost(config: CacheConfig) -> PrefillCost:
    """Measured rates if there are any, else by flops; tensor parallel ranks share the work."""
    section, model = config.costs.prefill, config.model
    if section.tokens_per_second is not None:
        pairs = section.pairs_per_second
        return PrefillCost(1 / section.tokens_per_second, 1 / pairs if pairs is not None else 0.0)
    known = KNOWN_COMPUTE.get(model.name, (None, None))
    parameters = section.parameters if section.parameters is not None else known[0]
    width = section.attention_width if section.attention_width is not None else known[1]
    if parameters is None or width is None:
        raise ConfigError(
            f"{config.where('costs', 'prefill')}: how long prefill of {model.name} takes is not known: give "
            "tokens_per_second (hicache bench calibrate measures it), or parameters and attention_width"
        )
    return PrefillCost.from_flops(section.flops * model.tp_size, parameters, width)
